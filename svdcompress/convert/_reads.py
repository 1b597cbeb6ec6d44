"""Watches one forward pass: which layers run, and which have their weight read by another module.

`F.linear(x, self.fc.weight)` in another module's forward gets neither the mask nor the noise of the layer `self.fc`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from svdcompress.batch import call
from svdcompress.convert._derived import HOOKS
from svdcompress.errors import ModelError

SHAPE_ALONE = frozenset(
    (
        *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided", "detach", "alias", "sym_size"),
    )
)
"""Operators that do not use the values of their argument, or only return an alias of it."""

PAST_CURE = "Name it in convert's exclude, or pass example_inputs to convert, which then finds such layers before training"

Key = tuple[int, int]


@dataclass
class Reads:
    """What a pass did with the weights of some layers, by their names.

    past: {layer: the module that read its weight while the layer itself was not running}. ran: layers that ran themselves.
    touched: how many operators read each tensor, by id.
    """

    past: dict[str, str] = field(default_factory=dict)
    ran: set[str] = field(default_factory=set)
    touched: Counter[int] = field(default_factory=Counter)

    def reason(self, name: str) -> str:
        """Why a layer whose weight is read past it is left alone."""
        by = f"{self.past[name]!r}" if self.past[name] else "the model itself"
        return f"its weight is read directly by {by}, which bypasses the layer's mask and noise"


def watch(model: nn.Module, inputs: Any, layers: Sequence[tuple[str, nn.Module]], train: bool = False) -> Reads:
    """Run a model once, without gradients, and record which modules read the weights of these layers.

    train: run in `train()` instead of `eval()`. Modes, buffers and random states are restored afterwards.
    Raises whatever the model raises.
    """
    watcher = _Watcher(model, layers)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # torch's fused encoder, which `convert` turns off too
    try:
        with as_it_was(model, train), torch.no_grad(), watcher.names(), watcher:
            call(model, inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return watcher.reads


def read_past(model: nn.Module, inputs: Any, layers: Sequence[tuple[str, nn.Module]]) -> Reads:
    """`watch` in `eval()`, for a caller's inputs. Raises ModelError if the model cannot run on them."""
    try:
        return watch(model, inputs, layers)
    except Exception as error:  # whatever the user's model raises
        what = str(error).strip().partition("\n")[0]
        raise ModelError(f"example_inputs: {type(model).__name__} fails on them ({type(error).__name__}: {what})") from error


@contextmanager
def as_it_was(model: nn.Module, train: bool) -> Iterator[None]:
    """Put the model into `train()` or `eval()`; modes, buffers and random states are restored afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    values = {id(b): (b, b.clone()) for _, own in buffers for b in own.values() if train and b is not None}
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    model.train(train)
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for module, own in buffers:
            module._buffers.update(own)
        with torch.no_grad():
            for buffer, value in values.values():
                buffer.copy_(value)


class _Watcher(TorchDispatchMode):
    def __init__(self, model: nn.Module, layers: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.model = model
        self.reads = Reads()
        self.names_of: dict[Key, list[str]] = {}
        self.keys_of: dict[nn.Module, list[Key]] = {}
        for name, layer in layers:
            keys = [key for tensor in layer.parameters() if (key := _key(tensor)) is not None and _is_weight(layer, tensor)]
            self.keys_of[layer] = keys
            for key in keys:
                self.names_of.setdefault(key, []).append(name)
        self.open: Counter[Key] = Counter()  # weights whose layer is running
        self.stack: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; True would import all of dynamo on the first operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name.split("::")[-1] not in SHAPE_ALONE:
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor):
                    self.reads.touched[id(tensor)] += 1
                    key = _key(tensor)
                    if key in self.names_of and not self.open[key]:
                        for name in self.names_of[key]:
                            self.reads.past.setdefault(name, self.stack[-1] if self.stack else "")
        return func(*args, **kwargs)

    @contextmanager
    def names(self) -> Iterator[None]:
        """Keep track of which module runs. Forwards are wrapped meanwhile, so that modules called without hooks count too."""
        wrapped: list[tuple[nn.Module, Any]] = []
        for name, module in self.model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            wrapped.append((module, vars(module).get("forward")))
            module.__dict__["forward"] = self._wrapped(name, module)
        computing = [
            (module._forward_pre_hooks, number, hook, keys)
            for module, keys in self.keys_of.items()
            for number, hook in module._forward_pre_hooks.items()
            if isinstance(hook, tuple(HOOKS))  # they compute the layer's own weight, before its forward
        ]
        for hooks, number, hook, keys in computing:
            hooks[number] = self._opened(keys, hook)
        try:
            yield
        finally:
            for hooks, number, hook, _ in computing:
                hooks[number] = hook
            for module, own in wrapped:
                del module.__dict__["forward"]
                if own is not None:
                    module.__dict__["forward"] = own

    def _opened(self, keys: list[Key], hook: Any) -> Any:
        def run(*args: Any) -> Any:
            self.open.update(keys)
            try:
                return hook(*args)
            finally:
                self.open.subtract(keys)

        return run

    def _wrapped(self, name: str, module: nn.Module) -> Any:
        forward, keys, reads = module.forward, self.keys_of.get(module, []), self.reads

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if module in self.keys_of:
                reads.ran.add(name)
            self.stack.append(name)
            self.open.update(keys)
            try:
                return forward(*args, **kwargs)
            finally:
                self.stack.pop()
                self.open.subtract(keys)

        return run


def _is_weight(layer: nn.Module, tensor: Tensor) -> bool:
    """Whether a tensor is a layer's weight or, if the weight is derived, may be what it is computed from."""
    weight = layer._parameters.get("weight")
    return tensor is weight or (weight is None and tensor.dim() > 1)


def _key(tensor: Tensor) -> Key | None:
    """Where a tensor is in memory, or None: `weight.data` and views from its beginning count as the weight too."""
    try:
        return tensor.untyped_storage()._cdata, int(tensor.storage_offset())
    except (RuntimeError, NotImplementedError):
        return None
