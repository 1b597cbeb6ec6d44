"""What all posteriors have in common, and what a posterior of your own needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from torch import Tensor

from svdcompress.layers._moments import Spread
from svdcompress.layers._registry import Named, chosen
from svdcompress.layers.priors import Prior
from svdcompress.renamed import renamed_arguments

TINY = 2.0**-126
"""Least variance under the square root, so that its gradient stays finite: the least normal number of float32 and bfloat16.
Its noise of 1e-19 is invisible next to outputs and inputs of any size; noise of 1e-16 was not."""


class Shaped(Protocol):
    """What a posterior sees of a layer, in addition to the parameters that it gave it."""

    weight: Any

    def canonical(self, tensor: Tensor) -> Tensor:
        """A tensor of the weight's shape as (groups, outputs per group, inputs per group, kernel positions)."""
        ...

    def as_weight(self, view: Tensor, outputs: int | None = None) -> Tensor:
        """The inverse of `canonical`; dimensions of size 1 are broadcast. outputs: number per group (None: the weight's)."""
        ...

    def __getattr__(self, name: str) -> Any: ...


class Posterior(Named):
    """Independent normal weights, N(weight, exp(log_sigma2)), and the parameters that define their log variances.

    A posterior of your own has a `name`, `parameters`, `start` and `log_sigma2`. Everything else (training, sampling, masks,
    pruning, files, export) uses the log variances. A layer's means are always its `weight`.
    """

    kind: ClassVar[str] = "posterior"
    registry: ClassVar[dict[str, Any]] = {}
    parameters: ClassVar[tuple[str, ...]]
    """Names of the parameters that a layer has for its variances; "log_sigma2" is reserved for one of the weight's shape.

    Pruning cuts parameters of the weight's shape, and of the shape of its canonical view (groups, outputs per group, inputs
    per group, kernel positions) with some sizes 1. A layer whose posterior has others gets the posterior "independent" when
    it is cut.
    """

    def start(self, layer: Shaped, log_sigma2: Tensor) -> dict[str, Tensor]:
        """Values of the parameters, by name, for these log variances of the weights, or the nearest possible ones.

        log_sigma2: of the weight's shape; all equal when a layer is converted.
        """
        raise NotImplementedError

    def log_sigma2(self, layer: Shaped) -> Tensor:
        """The log variance of each weight, in the weight's shape, with gradients for the layer's parameters."""
        raise NotImplementedError

    @renamed_arguments(keep="mask")
    def spread(self, layer: Shaped, mask: Tensor | None) -> Spread | None:
        """The variances in a form from which those of the outputs cost less, with gradients; None if there is none.

        mask: bool of the weight's shape, which weights count; None: all of them.
        """
        return None

    def kl(self, layer: Shaped, prior: Prior, share: Mapping[str, float]) -> Tensor | None:
        """The KL to a prior for a layer without a frozen mask, computed without a log variance for each weight; None if
        there is no such way. Otherwise as `Prior.kl`."""
        return None

    def draw(self, mean: Tensor, sigma2: Tensor, noise: Tensor) -> Tensor:
        """A draw of the weights from standard normal noise, all of one shape; not in place, so that vmap can batch it."""
        return mean + (sigma2.clamp_min(TINY).sqrt() * noise).to(mean.dtype)


def check_posterior(posterior: str | Posterior | Mapping[str, Any]) -> Posterior:
    """The posterior that is given, by name or manifest too; a ModelError for an unknown name lists the known ones."""
    return chosen(Posterior, posterior)
