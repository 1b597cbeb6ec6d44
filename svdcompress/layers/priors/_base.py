"""What all priors have in common, and all that one of your own needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from svdcompress.errors import ModelError
from svdcompress.layers import _alpha
from svdcompress.layers._registry import Named, chosen
from svdcompress.renamed import renamed_arguments

DEFAULT_LOG_SIGMA2 = -10.0
"""Where log variances start, unless a prior or a user says otherwise."""

Layout = tuple[int, bool]
"""Groups, and whether the weight is a transposed convolution's: what `canonical` needs."""


class Prior(Named):
    """The distribution of the weights before any data: what its KL to the posterior is, and what counts as irrelevant.

    One of your own has a `name` and `terms`, the KL of each weight; settings are arguments of its constructor that `settings`
    returns, so that checkpoints keep them. A prior whose weights have something in common beside takes `kl` itself and says in
    `shares` which groups it knows.
    """

    kind: ClassVar[str] = "prior"
    registry: ClassVar[dict[str, Any]] = {}
    shares: ClassVar[tuple[str, ...]] = ("weight",)
    """Whose prior variance it can share, of the names that `convert(share=...)` takes."""

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
        """KL(posterior || prior) in nats, summed over the mask; a scalar with gradients of mean and log_sigma2.

        mean, log_sigma2: of a layer's weight shape, in any floating dtype. mask: bool of that shape, or None for all.
        share: {name: part} of which weights share a variance. layout: groups of a convolution, and whether it is transposed.
        """
        terms = self.terms(_alpha.wide(mean), _alpha.wide(log_sigma2))
        return (terms if mask is None else terms[mask]).sum()

    def log_alpha(self, mean: Tensor, log_sigma2: Tensor, dims: tuple[int, ...] = ()) -> Tensor:
        """What the threshold is compared with: log of variance over squared mean, high for what is irrelevant.

        dims: dimensions that a prior group lies along, which the result is without; (): of each weight.
        """
        return _alpha.group_log_alpha(mean, log_sigma2, dims) if dims else _alpha.log_alpha(mean, log_sigma2)

    def start(self, weight: Tensor) -> float:
        """Where the log variances of a layer start, unless a user says it."""
        return DEFAULT_LOG_SIGMA2

    def check_share(self, share: Mapping[str, float]) -> None:
        """Raises ModelError for a prior group that this prior has no KL for."""
        unknown = [name for name in share if name not in self.shares]
        if unknown:
            raise ModelError(f"share: the prior {self.name!r} has none for {unknown[0]!r}; use {' or '.join(self.shares)}")


def check_prior(prior: str | Prior | Mapping[str, Any]) -> Prior:
    """The prior of a name, or the one that is given; a ModelError lists those that are known."""
    return chosen(Prior, prior)
