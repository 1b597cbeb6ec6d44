"""Which layers draw, and with which sampler: this is state of the call that asks for draws, not of the layers.

`drawing` puts a sampler for each layer into a context variable, so that other threads and asyncio tasks that use the same
model do not see it. A private copy may be given a sampler of its own permanently (`layer.sampler = ...`).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from svdcompress.errors import UsageError
from svdcompress.layers._cache import Cache
from svdcompress.layers._reparam import normal_like

NO_BACKWARD = -1
"""What torch has as the number of the current backward pass while there is none."""


class Sampler:
    """How stochastic layers draw; holds the state of one call in one thread.

    The base class draws new pre-activations at each call, independently for each input (local reparameterization).

    generator: source of the noise (None: torch's default of each device). layers: all layers that will draw with it.
    members: True draws one set of weights for all inputs, kept until `resample()` (a consistent ensemble member).
    shared: layers that do so even if the others do not.
    sign: a scalar of +1 or -1 by which all noise is multiplied, or None: -1 on the same noise is the antithetic draw.
    noises: the noise that members keep. caches: values derived from the parameters.
    """

    def __init__(
        self,
        generator: torch.Generator | None = None,
        members: bool = False,
        shared: Collection[StochasticLayer] = (),
        layers: Sequence[StochasticLayer] = (),
    ) -> None:
        self.generator = generator
        self.members = members
        self.shared = shared
        self._firsts = _tied(layers)
        self.sign: Tensor | None = None
        self.noises: dict[Any, Any] = {}
        self.caches: dict[nn.Module, Cache] = {}

    @property
    def draws(self) -> dict[Any, Any]:
        """Former name of `noises`."""
        warnings.warn("Sampler.draws is now Sampler.noises", DeprecationWarning, stacklevel=2)
        return self.noises

    def draws_weights(self, layer: StochasticLayer) -> bool:
        """Whether a variational layer draws its weights rather than its outputs."""
        return self.members or layer in self.shared

    def saw(self, layer: StochasticLayer, output: Tensor) -> None:
        """Called with the output of a variational layer that did not draw its weights."""

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` drew when this key was first asked for after the last `resample()`."""
        if key not in self.noises:
            self.noises[key] = make()
        return self.noises[key]

    def owner(self, layer: StochasticLayer, name: str = "weight") -> StochasticLayer:
        """The layer that a weight (or bias) belongs to: the first of the layers that share it."""
        return self._firsts.get((layer, name), layer)

    def normal(self, like: Tensor) -> Tensor:
        """Standard normal noise of a tensor's shape, dtype and device."""
        self._check_first_pass()
        noise = normal_like(like, self.generator)
        return noise if self.sign is None else noise * self.sign.to(noise.dtype)

    def bernoulli(self, shape: Sequence[int], rate: float, like: Tensor) -> Tensor:
        """Ones with probability `rate`, else zeros, of the given shape and of a tensor's dtype and device."""
        self._check_first_pass()
        given: dict[str, Any] = {} if self.generator is None else {"generator": self.generator}  # as in `normal_like`
        uniform = torch.rand(shape, dtype=torch.float32, device=like.device, **given)
        if self.sign is not None:
            uniform = 0.5 + (uniform - 0.5) * self.sign
        return (uniform < rate).to(like.dtype)

    def _check_first_pass(self) -> None:
        """Raises UsageError if activation checkpointing is calling the layer again: its gradient would be for other noise."""
        if self.generator is not None and torch._C._current_graph_task_id() != NO_BACKWARD:
            raise UsageError(
                "sampling: with a generator, activation checkpointing would draw other noise in the backward pass, as torch "
                "restores only its default generators: leave generator out and call torch.manual_seed before"
            )

    def resample(self) -> None:
        """Forget the current member: the next forward pass draws another."""
        self.noises.clear()


_SAMPLERS: ContextVar[Mapping[nn.Module, Sampler | None]] = ContextVar("svdcompress_samplers", default={})  # noqa: B039

# Whether any thread is within `drawing`: all that a compiled graph checks, since torch's compiler cannot read a context
# variable. While one is, the stochastic layers of a compiled model run outside of the graph.
_anyone_draws = False
_count = 0
_lock = threading.Lock()


class StochasticLayer(nn.Module):
    """A layer that draws noise in `train()`, and in `eval()` only under `sampling`."""

    _own: Sampler | None = None

    if TYPE_CHECKING:  # torch declares any attribute of a module as a Tensor or a Module

        def __getattr__(self, name: str) -> Any: ...

    @property
    def sampler(self) -> Sampler | None:
        """The sampler of the next call: the context's, else the layer's own. With None the layer draws only in `train()`.

        Set within `drawing` (or `sampling`) of the layer, it lasts as long as that context and is seen by no other thread.
        Set elsewhere, it is the layer's own, for all threads: only do this with a copy that nobody else calls.
        """
        if torch.compiler.is_dynamo_compiling():
            return self._own
        return _SAMPLERS.get().get(self, self._own)

    @sampler.setter
    def sampler(self, sampler: Sampler | None) -> None:
        current = _SAMPLERS.get()
        if self in current:
            _SAMPLERS.set({**current, self: sampler})
        else:
            self._own = sampler

    @property
    def draws(self) -> bool:
        """Whether the next forward pass is random."""
        return self.training or self.sampler is not None


def leaves_the_graph() -> bool:
    """Whether a stochastic layer that is being compiled has to call itself through `outside_of_the_graph`."""
    return torch.compiler.is_dynamo_compiling() and _anyone_draws


@_disable_dynamo
def outside_of_the_graph(forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Call `forward` without compiling it."""
    return forward(*args, **kwargs)


def weight_of(layer: StochasticLayer) -> tuple[int, ...]:
    """A key that identifies the weight of a variational layer: tied layers have the same key."""
    return id(layer.weight), *map(id, layer.variance_parameters().values())


def _tied(layers: Sequence[StochasticLayer]) -> dict[tuple[StochasticLayer, str], StochasticLayer]:
    """For each variational layer's weight and bias, the first layer that has the same one."""
    firsts: dict[Any, StochasticLayer] = {}
    found = {}
    for layer in layers:
        if hasattr(layer, "variance_parameters"):
            found[layer, "weight"] = firsts.setdefault(weight_of(layer), layer)
            if layer.bias is not None:
                found[layer, "bias"] = firsts.setdefault(id(layer.bias), layer)
    return found


def stochastic_layers(model: nn.Module) -> list[StochasticLayer]:
    """The layers of a model that draw noise, each once."""
    return [module for module in model.modules() if isinstance(module, StochasticLayer)]


@contextmanager
def drawing(layers: Sequence[StochasticLayer], sampler: Sampler | None) -> Iterator[None]:
    """Context in which the layers draw with another sampler, for this thread or task only; None: not at all in `eval()`."""
    before = _SAMPLERS.get()
    _SAMPLERS.set({**before, **dict.fromkeys(layers, sampler)})
    _someone(+1)
    try:
        yield
    finally:
        _someone(-1)
        _SAMPLERS.set(before)


def _someone(more: int) -> None:
    global _anyone_draws, _count
    with _lock:
        _count += more
        _anyone_draws = _count > 0
