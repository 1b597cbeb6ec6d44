"""Asking layers to draw in `eval()` too: the state that stochastic layers look at, and the context manager that sets it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from svdcompress.layers._cache import Cache
from svdcompress.layers._reparam import normal_like


class Sampler:
    """How the stochastic layers of a model draw while `sampling` is on.

    generator: source of the noise (None: torch's default of each device).
    members: True draws one set of weights for all inputs, kept until `resample()` (a consistent ensemble member);
        False draws pre-activations, anew at each call and independently per input (local reparameterisation).
    sign: a scalar of +1 or -1 by which all noise is multiplied, or None: -1 on the same noise is the antithetic draw.
    """

    def __init__(self, generator: torch.Generator | None = None, members: bool = False) -> None:
        self.generator = generator
        self.members = members
        self.sign: Tensor | None = None
        self.draws: dict[nn.Module, Any] = {}

    def normal(self, like: Tensor) -> Tensor:
        """Standard normal noise of a tensor's shape, dtype and device."""
        noise = normal_like(like, self.generator)
        return noise if self.sign is None else noise * self.sign.to(noise.dtype)

    def bernoulli(self, shape: Sequence[int], rate: float, like: Tensor) -> Tensor:
        """Ones at a rate, else zeros, of the given shape and of a tensor's dtype and device."""
        uniform = torch.rand(shape, dtype=torch.float32, device=like.device, generator=self.generator)
        if self.sign is not None:
            uniform = 0.5 + (uniform - 0.5) * self.sign
        return (uniform < rate).to(like.dtype)

    def resample(self) -> None:
        """Forget the current member: the next forward pass draws another."""
        self.draws.clear()


class StochasticLayer(nn.Module):
    """A layer that draws noise in `train()`, and in `eval()` only under `sampling`."""

    sampler: Sampler | None = None
    _cache: Cache | None = None

    if TYPE_CHECKING:  # torch says that any attribute of a module is a Tensor or a Module

        def __getattr__(self, name: str) -> Any: ...

    @property
    def draws(self) -> bool:
        """Whether the next forward pass is random."""
        return self.training or self.sampler is not None


def stochastic_layers(model: nn.Module) -> list[StochasticLayer]:
    """The layers of a model that draw noise, each once."""
    return [module for module in model.modules() if isinstance(module, StochasticLayer)]


@contextmanager
def drawing(layers: Sequence[StochasticLayer], sampler: Sampler | None) -> Iterator[None]:
    """The layers draw with another sampler for a while; None: not at all in `eval()`. What they derived stays."""
    before = [layer.sampler for layer in layers]
    for layer in layers:
        layer.sampler = sampler
    try:
        yield
    finally:
        for layer, old in zip(layers, before, strict=True):
            layer.sampler = old


@contextmanager
def sampling(model: nn.Module, *, generator: torch.Generator | None = None, members: bool = False) -> Iterator[Sampler]:
    """Within this context the stochastic layers of `model` draw also in `eval()`; everything else is left as it is.

    Norms keep their batch statistics, since the model's mode is not touched. Contexts nest; the inner one counts.

    generator: source of the noise, on the model's device (None: torch's default generator).
    members: one weight draw for all inputs until `resample()` of the yielded Sampler, instead of local reparameterisation.
    """
    sampler = Sampler(generator, members)
    layers = stochastic_layers(model)
    for layer in layers:
        if layer._cache is not None:
            layer._cache.clear()
    with drawing(layers, sampler):
        yield sampler
