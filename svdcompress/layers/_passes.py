"""`sampling`: one draw of the weights for each call of the model.

What one call is, hooks on the model's modules tell for as long as a context is open; they hold no state of their own and look
into the context of whoever calls. Which layers may have noise for each row instead is found out ahead of the first call with
inputs of a shape, by two small passes without noise.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves, tree_map

from svdcompress.batch import unwrapped
from svdcompress.errors import UsageError
from svdcompress.layers._positions import shared_over_positions
from svdcompress.layers._sampling import Sampler, StochasticLayer, drawing, stochastic_layers


class Passes(Sampler):
    """A draw of the weights for each outermost call of a module; noise for each row where each weight meets each row once.

    A layer in `train()` draws as training does, by local reparameterisation. A layer whose call no hook saw draws its weights
    anew at each call.
    """

    def __init__(self, generator: torch.Generator | None, layers: Sequence[StochasticLayer], modules: set[nn.Module]) -> None:
        super().__init__(generator, layers=layers)
        self.layers, self.modules = layers, modules
        self.outermost: nn.Module | None = None
        self._known: dict[Any, set[StochasticLayer]] = {}

    def draws_weights(self, layer: StochasticLayer) -> bool:
        return not layer.training and (self.outermost is None or layer in self.shared)

    def kept(self, key: Any, make: Any) -> Any:
        return make() if self.outermost is None else super().kept(key, make)

    @property
    def counts(self) -> bool:
        """Whether the layers draw with this sampler, and not with one of a context within."""
        return self.layers[0].sampler is self

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A call of one of the modules; the outermost one is a new draw."""
        if self.outermost is None and module in self.modules and self.counts:
            key = (module, *(tensor.shape for tensor in _tensors((args, kwargs))))
            if key not in self._known:
                self._known[key] = self._shared(module, args, kwargs)
            self.resample()
            self.shared, self.outermost = self._known[key], module

    def end(self, module: nn.Module) -> None:
        """The call is over, or has failed."""
        if self.outermost is module and self.counts:
            self.outermost = None
            self.resample()

    def _shared(self, module: nn.Module, args: Any, kwargs: Any) -> set[StochasticLayer]:
        """The layers to draw the weights of: all of them where a small pass fails, or would change statistics."""
        leaders = [tensor.shape[0] for tensor in _tensors((args, kwargs)) if tensor.dim() > 0]
        if not leaders or leaders[0] == 0 or any(part.training for part in module.modules()):
            return set(self.layers)
        size = leaders[0]

        def run(batch: int) -> None:
            some = tree_map(lambda leaf: _rows(leaf, size, batch) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
            unwrapped(module)._call_impl(*some[0], **some[1])  # two sizes more would have a compiled one compiled again

        try:
            return shared_over_positions(module, run)
        except Exception:  # whatever a model says to other batch sizes
            return set(self.layers)


def _tensors(arguments: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]


def _rows(tensor: Tensor, size: int, batch: int) -> Tensor:
    """So many rows of a batch, the same ones again where it has fewer; what has another first dimension goes along."""
    if tensor.dim() == 0 or tensor.shape[0] != size:
        return tensor
    return tensor[torch.arange(batch, device=tensor.device) % size]


_PASSES: ContextVar[tuple[Passes, ...]] = ContextVar("svdcompress_passes", default=())


@_disable_dynamo
def begin(module: nn.Module, args: Any, kwargs: Any = None) -> None:
    """Hook ahead of a call."""
    for passes in _PASSES.get():
        passes.begin(module, args, kwargs or {})


@_disable_dynamo
def end(module: nn.Module, args: Any, output: Any) -> None:
    """Hook after a call, and after one that raises."""
    for passes in _PASSES.get():
        passes.end(module)


HOOKS = (begin, end)
"""What a model's modules may have among their hooks while somebody else samples: it changes nothing for others."""

_lock = threading.Lock()
_hooked: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()  # how many contexts want them, and the hooks' handles


@contextmanager
def _watched(modules: set[nn.Module]) -> Iterator[None]:
    with _lock:
        for module in modules:
            if module not in _hooked:
                ahead = module.register_forward_pre_hook(begin, with_kwargs=True)
                _hooked[module] = [0, ahead, module.register_forward_hook(end, always_call=True)]
            _hooked[module][0] += 1
    try:
        yield
    finally:
        with _lock:
            for module in modules:
                _hooked[module][0] -= 1
                if not _hooked[module][0]:
                    for handle in _hooked.pop(module)[1:]:
                        handle.remove()


@contextmanager
def sampling(
    model: nn.Module, *, generator: torch.Generator | None = None, members: bool = False, local: bool = False
) -> Iterator[Sampler]:
    """Within this context the stochastic layers of `model` draw also in `eval()`; everything else is left as it is.

    Each call of the model is one draw: noise for each row where each weight meets each row of the batch once, which is the
    same for each row by itself, and else one set of weights for all rows. So are calls of a part of it, by themselves. Which
    layers are of which kind is found by two small passes without noise, ahead of the first call with inputs of a shape.

    Norms keep their batch statistics, since the model's mode is not touched. Layers in `train()` draw as in training. Contexts
    nest; the inner one counts. It holds for the thread, or task of asyncio, that enters it: others see the model without noise.

    generator: source of the noise, on the model's device (None: torch's default generator).
    members: one weight draw for all inputs and calls until `resample()` of the yielded Sampler.
    local: the local reparameterisation in all layers, noise of its own for each position of each row: training's estimator.
        Where weights are shared over positions, its sums over positions spread less than those of the posterior.
    """
    if members and local:
        raise UsageError("sampling: members and local exclude each other; a member is one set of weights")
    _refuse_replicas(model)
    layers = stochastic_layers(model)
    if members or local or not layers:
        sampler = Sampler(generator, members, layers=layers)
        with drawing(layers, sampler):
            yield sampler
        return
    modules = set(_containers(model, set()))
    passes = Passes(generator, layers, modules)
    before = _PASSES.get()
    with _watched(modules), drawing(layers, passes):
        _PASSES.set((*before, passes))
        try:
            yield passes
        finally:
            _PASSES.set(before)


def _containers(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Modules that have a stochastic layer in them, or are one. A compiled module's insides are left alone: its call is one."""
    if module in seen or not stochastic_layers(module):
        return
    seen.add(module)
    yield module
    if not hasattr(module, "_orig_mod"):
        for child in module.children():
            yield from _containers(child, seen)


def _refuse_replicas(model: nn.Module) -> None:
    devices = getattr(model, "device_ids", None)
    if isinstance(model, nn.DataParallel) and devices is not None and len(devices) > 1:
        raise UsageError("sampling: DataParallel calls copies of the model in other threads; give its `.module`")
