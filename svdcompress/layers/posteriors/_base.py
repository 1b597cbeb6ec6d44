"""What all posteriors have in common, and all that one of your own needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from torch import Tensor

from svdcompress.layers._moments import Spread
from svdcompress.layers._registry import Named, chosen
from svdcompress.layers.priors import Prior
from svdcompress.renamed import renamed_arguments

TINY = 2.0**-126
"""Least variance under the root, which so keeps a finite gradient: the least normal number of float32 and bfloat16. Its noise,
of 1e-19, shows beside no output and no input, however small or large; that of 1e-16 did."""


class Shaped(Protocol):
    """What a posterior sees of a layer, beside the parameters that it gave it."""

    weight: Any

    def canonical(self, tensor: Tensor) -> Tensor:
        """A tensor of the weight's shape as (groups, outputs per group, inputs per group, kernel positions)."""
        ...

    def as_weight(self, view: Tensor, outputs: int | None = None) -> Tensor:
        """Such a view, where dimensions of size 1 are broadcast, in the weight's shape (or in that for other outputs per
        group)."""
        ...

    def __getattr__(self, name: str) -> Any: ...


class Posterior(Named):
    """Independent normal weights, N(weight, exp(log_sigma2)), and by which parameters a layer tells their log variances.

    One of your own has a `name`, `parameters`, `start` and `log_sigma2`. All else (training, sampling, masks, pruning, files,
    export) goes by the log variances. A layer's means are always its `weight`.
    """

    kind: ClassVar[str] = "posterior"
    registry: ClassVar[dict[str, Any]] = {}
    parameters: ClassVar[tuple[str, ...]]
    """Names of the parameters that a layer has for its variances; "log_sigma2" is kept for one of the weight's shape.

    Pruning cuts those of the weight's shape, and of the shape of its canonical view (groups, outputs per group, inputs per
    group, kernel positions) with some sizes 1. A layer whose posterior has others becomes independent when it is cut.
    """

    def start(self, layer: Shaped, log_sigma2: Tensor) -> dict[str, Tensor]:
        """Values of the parameters, by name, for these log variances of the weights, or the nearest that there are.

        log_sigma2: of the weight's shape; all the same where a layer is converted.
        """
        raise NotImplementedError

    def log_sigma2(self, layer: Shaped) -> Tensor:
        """The log variance of each weight, in the weight's shape, with gradients of the layer's parameters."""
        raise NotImplementedError

    @renamed_arguments(keep="mask")
    def spread(self, layer: Shaped, mask: Tensor | None) -> Spread | None:
        """The variances in a form by which those of the outputs cost less, with gradients; None where there is none.

        mask: bool, which weights count, of the weight's shape; None: all of them.
        """
        return None

    def kl(self, layer: Shaped, prior: Prior, share: Mapping[str, float]) -> Tensor | None:
        """The KL to a prior of a layer that holds no mask, by a shorter way than by a log variance of each weight; None where
        there is none. As `Prior.kl` otherwise."""
        return None

    def draw(self, mean: Tensor, sigma2: Tensor, noise: Tensor) -> Tensor:
        """The weights of a draw from standard normal noise, all of the weight's shape; nothing in place, so that vmap can
        batch it."""
        return mean + (sigma2.clamp_min(TINY).sqrt() * noise).to(mean.dtype)


def check_posterior(posterior: str | Posterior | Mapping[str, Any]) -> Posterior:
    """The posterior of a name, or the one that is given; a ModelError lists those that are known."""
    return chosen(Posterior, posterior)
