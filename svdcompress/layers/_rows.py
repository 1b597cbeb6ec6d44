"""Many draws as rows of one batch: the sampler for a model that is known to treat each row by itself.

A batch of b inputs stays as it is until the first noise meets it; from there on it has draws * b rows, draw by draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from svdcompress.layers._cache import Cache
from svdcompress.layers._reparam import as_stored
from svdcompress.layers._sampling import Sampler


class NotRows(Exception):
    """A stochastic layer was given a tensor whose first dimension is neither the inputs nor all rows."""


class Rows(Sampler):
    """Draws for all rows at once.

    inputs: rows of the batch. draws: number of draws for each. generator: source of the noise. antithetic: the noise of the
    second half of the draws is that of the first, mirrored. caches: those of another sampler, to be shared.
    """

    def __init__(
        self,
        inputs: int,
        draws: int,
        generator: torch.Generator | None = None,
        antithetic: bool = False,
        caches: dict[nn.Module, Cache] | None = None,
    ) -> None:
        super().__init__(generator)
        self.caches = self.caches if caches is None else caches
        self.inputs, self.count, self.antithetic = inputs, draws, antithetic

    def by_draw(self, x: Tensor) -> Tensor:
        """A tensor as (draws, inputs, ...), without a copy. Raises NotRows unless it has `inputs` or draws * inputs rows."""
        rows = x.shape[0] if x.dim() > 1 else -1  # the only dimension may be anything
        if rows == self.inputs * self.count:
            return x.unflatten(0, (self.count, self.inputs))
        if rows == self.inputs:
            return x.expand(self.count, *x.shape)
        raise NotRows(f"{rows} rows, not {self.inputs} or {self.count} times that")

    def draw(self, mean: Tensor, spread: Tensor) -> Tensor:
        """`mean + spread * noise`, with a row for each draw of each input; spread is a standard deviation of any dtype."""
        mean, spread = self.by_draw(mean), self.by_draw(spread).to(mean.dtype)
        noise = self.normal(mean)
        return torch.addcmul(mean, spread, noise, out=noise).flatten(0, 1)

    def normal(self, like: Tensor) -> Tensor:
        """Standard normal noise for a tensor as `by_draw` returns it."""

        def make(shape: Sequence[int]) -> Tensor:
            return self._filled((*like.shape[:2], *shape), like, Tensor.normal_, Tensor.neg)

        return as_stored(like[0, 0], make, 2) if like.dim() > 2 else make(())

    def bernoulli(self, shape: Sequence[int], rate: float, like: Tensor) -> Tensor:
        """Ones with probability `rate`, else zeros; shape: (draws, inputs, ...)."""
        uniform = self._filled(shape, like.new_empty((), dtype=torch.float32), Tensor.uniform_, lambda half: 1 - half)
        return (uniform < rate).to(like.dtype)

    def _filled(
        self, shape: Sequence[int], like: Tensor, fill: Callable[..., Tensor], mirror: Callable[[Tensor], Tensor]
    ) -> Tensor:
        noise = torch.empty(shape, dtype=like.dtype, device=like.device)
        if not self.antithetic:
            return fill(noise, generator=self.generator)
        half = self.count // 2
        noise[half:] = mirror(fill(noise[:half], generator=self.generator))
        return noise
