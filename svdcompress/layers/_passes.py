"""`sampling`: one draw of the weights for each call of the model.

Hooks on the model's modules tell where a call begins and ends, as long as a context is open; they hold no state and look
into the context of the caller. Which layers may draw noise for each row instead is found before the first call with inputs
of a shape, by two small passes without noise.
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
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves, tree_map

from svdcompress.batch import unwrapped
from svdcompress.errors import UsageError
from svdcompress.layers._positions import positions, shared_over_positions, variational_among
from svdcompress.layers._sampling import Sampler, StochasticLayer, drawing, stochastic_layers, weight_of


class Passes(Sampler):
    """A draw of the weights for each outermost call of a module; noise for each row where each weight meets each row once.

    A layer in `train()` draws as in training, by local reparameterization. A layer whose call no hook has seen draws new
    weights at each call.
    """

    def __init__(self, generator: torch.Generator | None, layers: Sequence[StochasticLayer], modules: set[nn.Module]) -> None:
        super().__init__(generator, layers=layers)
        self.layers, self.modules = layers, modules
        self.outermost: nn.Module | None = None
        self._known: dict[Any, set[StochasticLayer]] = {}
        self._key: Any = None  # key of the current call; its number of rows follows
        self._rows = 0
        self._positions: Counter[tuple[int, ...]] = Counter()

    def draws_weights(self, layer: StochasticLayer) -> bool:
        return not layer.training and (self.outermost is None or layer in self.shared)

    def saw(self, layer: StochasticLayer, output: Tensor) -> None:
        """Count positions, in case a weight meets more than its rows on a path that the small passes did not take."""
        if self.outermost is not None:
            self._positions[weight_of(layer)] += positions(layer, output)

    def kept(self, key: Any, make: Any) -> Any:
        return make() if self.outermost is None else super().kept(key, make)

    @property
    def counts(self) -> bool:
        """Whether the layers draw with this sampler, and not with that of an inner context."""
        return self.layers[0].sampler is self

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note a call of one of the modules; the outermost call starts a new draw."""
        if self.outermost is None and module in self.modules and self.counts:
            leaves = tree_leaves((args, kwargs))
            plain = (leaf if isinstance(leaf, bool | int | str) else None for leaf in leaves)  # a model may branch on these
            key = (module, *kwargs, *(leaf.shape for leaf in leaves if isinstance(leaf, Tensor)), *plain)
            if key not in self._known:
                self._known[key] = self._shared(module, args, kwargs)
            self.resample()
            self.shared, self.outermost = self._known[key], module
            self._key, self._rows = key, _leading(args, kwargs)
            self._positions.clear()

    def end(self, module: nn.Module) -> None:
        """Note the end of a call, also of one that has failed."""
        if self.outermost is module and self.counts:
            self.outermost = None
            self.resample()
            more = {weight for weight, count in self._positions.items() if count > self._rows}
            if more:
                self._known[self._key] = self.shared | {one for one in variational_among(self.layers) if weight_of(one) in more}

    def _shared(self, module: nn.Module, args: Any, kwargs: Any) -> set[StochasticLayer]:
        """The layers whose weights have to be drawn: all of them if a small pass fails or would change statistics."""
        size = _leading(args, kwargs)
        if size == 0 or any(part.training for part in module.modules()):
            return set(self.layers)

        def run(batch: int, backwards: bool) -> Any:
            def few(leaf: Any) -> Any:
                return _rows(leaf, size, batch, backwards) if isinstance(leaf, Tensor) else leaf

            some = tree_map(few, (args, kwargs))
            return unwrapped(module)._call_impl(*some[0], **some[1])  # two more sizes would make a compiled one recompile

        try:
            return shared_over_positions(module, run)
        except Exception:  # models may raise anything at other batch sizes
            return set(self.layers)


def _leading(args: Any, kwargs: Any) -> int:
    """Number of rows of a call: the first dimension of its first tensor that has one; 0 if there is none."""
    leaves = tree_leaves((args, kwargs))
    return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0), 0)


def _rows(tensor: Tensor, size: int, batch: int, backwards: bool) -> Tensor:
    """The first `batch` rows of a tensor, repeated if it has fewer; unchanged if its first dimension is not `size`."""
    if tensor.dim() == 0 or tensor.shape[0] != size:
        return tensor
    at = torch.arange(batch, device=tensor.device) % size
    return tensor[at.flip(0) if backwards else at]


_PASSES: ContextVar[tuple[Passes, ...]] = ContextVar("svdcompress_passes", default=())


@_disable_dynamo
def begin(module: nn.Module, args: Any, kwargs: Any = None) -> None:
    """The hook before a call."""
    for passes in _PASSES.get():
        passes.begin(module, args, kwargs or {})


@_disable_dynamo
def end(module: nn.Module, args: Any, output: Any) -> None:
    """The hook after a call, also after one that raises."""
    for passes in _PASSES.get():
        passes.end(module)


HOOKS = (begin, end)
"""The hooks that a model's modules may have while another thread or task samples: they change nothing for anybody else."""

_lock = threading.Lock()
_hooked: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()  # number of contexts that use the hooks, and handles


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
def _refreshed(sampler: Sampler) -> Iterator[None]:
    """Drop what was derived from the parameters at each step of an optimizer: fused ones bypass torch's version counters."""
    handle = register_optimizer_step_post_hook(lambda *given: sampler.caches.clear())
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def sampling(
    model: nn.Module, *, generator: torch.Generator | None = None, members: bool = False, local: bool = False
) -> Iterator[Sampler]:
    """Within this context the stochastic layers of `model` draw in `eval()` too; everything else is left as it is.

    Each call of the model is one draw, and so is a call of a part of it by itself. A layer whose weight meets each row of
    the batch once draws noise for each row, which for a row by itself is equivalent to a draw of the weights; any other
    layer draws one set of weights for all rows. Which layer does what is found by two small passes without noise, before the
    first call with inputs of a shape and with the same flags, numbers and strings; where rows meet, as in a mean over the
    batch, all layers draw weights. If the values of the inputs lead a weight to more positions than in those passes, its
    layer draws weights from the next such call on.

    Norm layers keep their batch statistics, since the model's mode does not change. Layers in `train()` draw as in training.
    Contexts nest; the inner one counts. A context applies to the thread or asyncio task that enters it: others see the model
    without noise.

    Without gradients, what is derived from the weights is computed once, until they change. A change through `.data` goes
    unnoticed in a context: write to parameters in place under `torch.no_grad()`, as optimizers do, or begin a new context.

    generator: source of the noise, on the model's device (None: torch's default generator). It excludes
        torch.utils.checkpoint, which runs parts of the model again in the backward pass and restores only torch's default
        generators: gradients would belong to other noise, so a draw in a backward pass raises UsageError.
    members: one draw of the weights for all inputs and calls until `resample()` of the yielded Sampler.
    local: local reparameterization in all layers, with independent noise for each position of each row: training's
        estimator. Where weights are shared over positions, its sums over positions vary less than under the posterior.
    """
    if members and local:
        raise UsageError("sampling: members and local exclude each other; a member is one set of weights")
    _refuse_replicas(model)
    layers = stochastic_layers(model)
    if members or local or not layers:
        sampler = Sampler(generator, members, layers=layers)
        with drawing(layers, sampler), _refreshed(sampler):
            yield sampler
        return
    modules = set(_containers(model, set()))
    passes = Passes(generator, layers, modules)
    before = _PASSES.get()
    with _watched(modules), drawing(layers, passes), _refreshed(passes):
        _PASSES.set((*before, passes))
        try:
            yield passes
        finally:
            _PASSES.set(before)


def _containers(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Modules that contain a stochastic layer or are one. A compiled module's children are left out: its call is one."""
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
