"""What all priors have in common, and what a prior of your own needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from svdcompress.errors import ModelError
from svdcompress.layers import _alpha
from svdcompress.layers._registry import Named, chosen
from svdcompress.renamed import renamed_arguments

DEFAULT_LOG_SIGMA2 = -10.0
"""The initial log variance, unless a prior or a user sets another."""

Layout = tuple[int, bool]
"""Number of groups, and whether the weight is transposed (inputs first): what `canonical` needs."""


class Prior(Named):
    """The distribution of the weights before any data; defines the KL from prior to posterior, and what is irrelevant.

    A prior of your own has a `name` and `terms`, the KL of each weight; settings are arguments of its constructor that
    `settings` returns, so that checkpoints keep them. A prior whose weights have something in common overrides `kl` instead,
    and lists in `shares` the prior groups that it supports.
    """

    kind: ClassVar[str] = "prior"
    registry: ClassVar[dict[str, Any]] = {}
    shares: ClassVar[tuple[str, ...]] = ("weight",)
    """The prior groups that it supports, of the names that `convert(share=...)` takes."""

    def terms(self, mean: Tensor, log_sigma2: Tensor) -> Tensor:
        """KL(posterior || prior) of each weight in nats, with gradients.

        mean, log_sigma2: of the posterior N(mean, exp(log_sigma2)), one shape, float32 or wider; returns that shape.
        """
        raise NotImplementedError

    @renamed_arguments(keep="mask")
    def kl(
        self,
        mean: Tensor,
        log_sigma2: Tensor,
        mask: Tensor | None = None,
        share: Mapping[str, float] | None = None,
        layout: Layout = (1, False),
    ) -> Tensor:
        """KL(posterior || prior) in nats, summed over the mask; a scalar with gradients for mean and log_sigma2.

        mean, log_sigma2: of a layer's weight shape, in any floating dtype. mask: bool of that shape, or None for all.
        share: {name: part}, which weights share a variance. layout: groups of a convolution, and whether it is transposed.
        """
        terms = self.terms(_alpha.wide(mean), _alpha.wide(log_sigma2))
        return (terms if mask is None else terms[mask]).sum()

    def log_alpha(self, mean: Tensor, log_sigma2: Tensor, dims: tuple[int, ...] = ()) -> Tensor:
        """The value that the threshold is compared with: log of variance over squared mean, high for irrelevant weights.

        dims: dimensions that a prior group spans, which the result does not have; (): log alpha of each weight.
        """
        return _alpha.group_log_alpha(mean, log_sigma2, dims) if dims else _alpha.log_alpha(mean, log_sigma2)

    def start(self, weight: Tensor) -> float:
        """The initial log variance of a layer, unless a user sets it."""
        return DEFAULT_LOG_SIGMA2

    def check_share(self, share: Mapping[str, float]) -> None:
        """Raises ModelError for a prior group that this prior does not support."""
        unknown = [name for name in share if name not in self.shares]
        if unknown:
            raise ModelError(f"share: the prior {self.name!r} does not support {unknown[0]!r}; use {' or '.join(self.shares)}")


def check_prior(prior: str | Prior | Mapping[str, Any]) -> Prior:
    """The prior that is given, by name or manifest too; a ModelError for an unknown name lists the known ones."""
    return chosen(Prior, prior)
