"""`sampling`: one draw of the weights for each call of the model.

What one call is, hooks on the model's modules tell for as long as a context is open; they hold no state of their own and look
into the context of whoever calls. Which layers may have noise for each row instead is found out ahead of the first call with
inputs of a shape, by two small passes without noise.
"""

from __future__ import annotations

import threading
from collections import Counter
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
from svdcompress.layers._positions import positions, shared_over_positions, variational_among
from svdcompress.layers._sampling import Sampler, StochasticLayer, drawing, stochastic_layers, weight_of


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
        self._key: Any = None  # of the call that is going on, and its rows
        self._rows = 0
        self._positions: Counter[tuple[int, ...]] = Counter()

    def draws_weights(self, layer: StochasticLayer) -> bool:
        return not layer.training and (self.outermost is None or layer in self.shared)

    def saw(self, layer: StochasticLayer, output: Tensor) -> None:
        """Count where a weight meets more than its rows, by a path that the small passes did not take."""
        if self.outermost is not None:
            self._positions[weight_of(layer)] += positions(layer, output)

    def kept(self, key: Any, make: Any) -> Any:
        return make() if self.outermost is None else super().kept(key, make)

    @property
    def counts(self) -> bool:
        """Whether the layers draw with this sampler, and not with one of a context within."""
        return self.layers[0].sampler is self

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A call of one of the modules; the outermost one is a new draw."""
        if self.outermost is None and module in self.modules and self.counts:
            leaves = tree_leaves((args, kwargs))
            plain = (leaf if isinstance(leaf, bool | int | str) else None for leaf in leaves)  # by which a model may branch
            key = (module, *kwargs, *(leaf.shape for leaf in leaves if isinstance(leaf, Tensor)), *plain)
            if key not in self._known:
                self._known[key] = self._shared(module, args, kwargs)
            self.resample()
            self.shared, self.outermost = self._known[key], module
            self._key, self._rows = key, _leading(args, kwargs)
            self._positions.clear()

    def end(self, module: nn.Module) -> None:
        """The call is over, or has failed."""
        if self.outermost is module and self.counts:
            self.outermost = None
            self.resample()
            more = {weight for weight, count in self._positions.items() if count > self._rows}
            if more:
                self._known[self._key] = self.shared | {one for one in variational_among(self.layers) if weight_of(one) in more}

    def _shared(self, module: nn.Module, args: Any, kwargs: Any) -> set[StochasticLayer]:
        """The layers to draw the weights of: all of them where a small pass fails, or would change statistics."""
        size = _leading(args, kwargs)
        if size == 0 or any(part.training for part in module.modules()):
            return set(self.layers)

        def run(batch: int) -> Any:
            some = tree_map(lambda leaf: _rows(leaf, size, batch) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
            return unwrapped(module)._call_impl(*some[0], **some[1])  # two sizes more would have a compiled one compiled again

        try:
            return shared_over_positions(module, run)
        except Exception:  # whatever a model says to other batch sizes
            return set(self.layers)


def _leading(args: Any, kwargs: Any) -> int:
    """Rows of a call: the first dimension of its first tensor that has one; 0 where there is none."""
    leaves = tree_leaves((args, kwargs))
    return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0), 0)


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
    layers are of which kind is found by two small passes without noise, ahead of the first call with inputs of a shape and with
    the same flags, numbers and words; where rows meet, as in a mean over the batch, all layers are of the second. A call in
    which values of the inputs lead a weight to more positions than that has its layer so from the next such call on.

    Norms keep their batch statistics, since the model's mode is not touched. Layers in `train()` draw as in training. Contexts
    nest; the inner one counts. It holds for the thread, or task of asyncio, that enters it: others see the model without noise.

    generator: source of the noise, on the model's device (None: torch's default generator). Not with
        torch.utils.checkpoint, which runs parts of the model again in the backward pass: it sets torch's default generator back
        for that, but not this one, so that gradients would be those of other noise.
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
