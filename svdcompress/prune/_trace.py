"""One forward pass, watched operator by operator: which unit each value belongs to, and which values the input reaches.

Operators that move data are applied to the shadows too, so views, splits, concatenations, shuffles and reshapes are followed
exactly, whatever the architecture. An operator that is not known pins the units that enter it: they stay, with a reason.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from svdcompress.layers import kept_channels
from svdcompress.prune._padding import Padding, hold_others, note_returned
from svdcompress.prune._shadow import Shadow, flat, small, varying
from svdcompress.prune._units import Parameter, Units
from svdcompress.sources import call, first_tensor, map_tensors

OPAQUE: dict[type[nn.Module], str] = {
    nn.RNNBase: "recurrent layer: its state feeds back into its gates",
    nn.RNNCellBase: "recurrent layer: its state feeds back into its gates",
    nn.MultiheadAttention: "torch's MultiheadAttention computes with the width it was made for",
    nn.Bilinear: "bilinear layer",
}
"""Modules that are not looked into: what enters and leaves them stays."""

IDLE = "never ran on the example inputs: left as it is"

NORMS = nn.modules.batchnorm._NormBase

MAX_FEATURES = 1_000_000
"""Features of an input beyond which they are not units of their own."""


@dataclasses.dataclass
class Use:
    """One application of a weight: a linear map from units to units.

    ins, outs: slots of the input and output channels. alive: bool (groups, outputs per group, inputs per group).
    owner: name of the module that applied it, or None where that is not plain. biasable: whether a constant input is a
    constant output, so that a bias can stand for it. reached: per input channel, whether the model's input reaches it.
    values: (channels, positions) what each channel that the input doesn't reach holds there, NaN where it reaches it.
    derived: whether the weight was computed from the parameter's values, so that nothing can be folded into these.
    """

    parameter: Parameter
    owner: str | None
    ins: Tensor
    outs: Tensor
    alive: Tensor
    biasable: bool
    reached: Tensor
    values: Tensor
    derived: bool = False


@dataclasses.dataclass
class View:
    """A change of shape that code asked for in numbers: what it made of which units, and the module that did it (None: the
    user, for an input)."""

    labels: Tensor
    sizes: tuple[int, ...]
    module: str | None


@dataclasses.dataclass
class Pieces:
    """A split into lengths that a module holds as a tuple: labels, (n,), the lengths, and where they stand."""

    labels: Tensor
    lengths: tuple[int, ...]
    module: str
    attribute: str


class OutOfTime(Exception):
    """Following the model took longer than it may."""


class Trace(TorchDispatchMode):
    """Watches `model` while it runs. `units`, `uses`, `views` and `splits` hold what was seen."""

    def __init__(
        self,
        model: nn.Module,
        alive: Mapping[str, Tensor],
        noisy: Mapping[str, Tensor],
        protect: Mapping[str, str],
        deadline: float = float("inf"),
    ) -> None:
        super().__init__()
        self.model = model
        self.deadline = deadline  # on time.thread_time
        self.units = Units()
        self.uses: list[Use] = []
        self.branches: list[Use] = []  # of train() alone
        self.views: list[View] = []
        self.paddings: list[Padding] = []
        self.pieces: list[Pieces] = []
        self.splits: list[Tensor] = []  # each (pieces, width): labels of pieces that stay of equal size
        self.inputs: dict[str, Tensor] = {}  # labels of each raw input, without the batch
        self.stack: list[str] = [""]
        self.opaque = 0
        self.noisy = noisy
        self.shadows: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.parameters: dict[int, Parameter] = {}
        self.viewed: set[int] = set()
        self.dirty: set[int] = set()
        self.macs: dict[int, int] = {}  # of a whole batch, by weight
        self.batch = 1
        self.converted = set(alive)
        self.entered: set[str] = set()
        self.touched: set[int] = set()
        self._register(alive, protect)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; True would import all of dynamo on the first operator

    # What is known before the run

    def _register(self, alive: Mapping[str, Tensor], protect: Mapping[str, str]) -> None:
        for prefix, module in self.model.named_modules(remove_duplicate=False):
            own = [*module._parameters.items(), *module._buffers.items()]
            for key, tensor in own:
                if tensor is None or tensor.dim() == 0 or not tensor.is_floating_point():
                    continue
                name = f"{prefix}.{key}" if prefix else key
                known = self.parameters.get(id(tensor))
                if known is None:
                    known = self.units.add(tensor, [], module, alive.get(name))
                    self.parameters[id(tensor)] = known
                if name not in known.names:
                    known.names.append(name)
                if key in module._non_persistent_buffers_set:
                    self.seal(known, "buffer that no checkpoint would hold")
                if prefix in protect:
                    self.seal(known, protect[prefix])

    def seal(self, parameter: Parameter, reason: str) -> None:
        """Nothing of this parameter goes."""
        for first, size in zip(parameter.axes, parameter.sizes, strict=True):
            self.units.pin(torch.arange(first, first + size), reason)

    # Shadows

    def of(self, tensor: Tensor) -> Shadow:
        """The shadow of a tensor; of one never seen, that of a value the input may reach."""
        known = self.shadows.get(tensor)
        if known is None:
            parameter = self.parameters.get(id(tensor))
            if parameter is not None:
                self.touched.add(id(tensor))
                return self._parameter(parameter, tensor)
            constant = tensor.dim() == 0 or id(tensor) in self._constants
            return Shadow(None, flat(not constant, tensor.shape))
        if known.taint.shape != tensor.shape:  # resized in place
            return Shadow(None, flat(True, tensor.shape))
        if tensor.untyped_storage()._cdata in self.dirty:
            return dataclasses.replace(known, taint=flat(True, tensor.shape), simplex=False)
        return known

    def _parameter(self, parameter: Parameter, tensor: Tensor) -> Shadow:
        places = []
        for d, size in enumerate(tensor.shape):
            shape = [1] * tensor.dim()
            shape[d] = size
            places.append(torch.arange(size).view(shape).expand(tensor.shape))
        return Shadow(None, flat(False, tensor.shape), parameter, tuple(places))

    def put(self, tensor: Tensor, shadow: Shadow) -> None:
        """Remember a tensor's shadow."""
        self.shadows[tensor] = shadow

    def pin(self, tensor: Tensor, reason: str) -> None:
        """All units of a tensor, or all of a parameter, stay."""
        shadow = self.of(tensor)
        if shadow.parameter is not None:
            self.seal(shadow.parameter, reason)
        elif shadow.labels is not None:
            self.units.pin(small(shadow.labels), reason)

    def fix(self, labels: Tensor | None, dims: Sequence[int], reason: str) -> None:
        """These dimensions keep their length: units along them go together, where others remain to go along, or stay."""
        free = varying(labels)
        held = [d for d in free if d in dims]
        if labels is None or not held:
            return
        core = small(labels)
        if len(held) == len(free):
            self.units.pin(core, reason)
            return
        first = core
        for d in held:
            first = first.narrow(d, 0, 1)
        self.units.tie(core, first)

    # The run

    def run(self, inputs: Any, remove_inputs: bool) -> Any:
        """Run the model on the inputs and watch it; returns its outputs, whose units stay."""
        self._constants = {
            id(value) for module in self.model.modules() for value in vars(module).values() if isinstance(value, Tensor)
        } | {id(buffer) for buffer in self.model.buffers()}
        device = first_tensor(inputs).device
        self.kept = [hook.index(device) for module in self.model.modules() if (hook := kept_channels(module)) is not None]
        self._take_inputs(inputs, remove_inputs)
        self.batch = (*first_tensor(inputs).shape, 1)[0] or 1
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with self._hooks(), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
                with self:
                    output = call(self.model, inputs)
                for tensor in tensors_in(output):
                    self.pin(tensor, "output of the model")
                hold_others(self)
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
        return output

    def leave_idle(self) -> None:
        """Converted layers that had no part in the pass stay as they are: their outputs are units that cannot go."""
        biases = {name: parameter for parameter in self.units.parameters for name in parameter.names}
        for parameter in self.units.parameters:
            owners = [name.rpartition(".")[0] for name in parameter.names]
            idle = id(parameter.tensor) not in self.touched and not self.entered.intersection(owners)
            if not idle or self.converted.isdisjoint(parameter.names):
                continue
            axis = int(parameter.transposed and not parameter.grouped)
            outs = torch.arange(parameter.axes[axis], parameter.axes[axis] + parameter.sizes[axis])
            self.seal(parameter, IDLE)
            self.units.produce(outs)
            bias = biases.get(f"{owners[0]}.bias" if owners[0] else "bias")
            if bias is not None and id(bias.tensor) not in self.touched and bias.sizes == [len(outs)]:
                self.units.tie(outs, torch.arange(bias.axes[0], bias.axes[0] + len(outs)))

    def _take_inputs(self, inputs: Any, remove_inputs: bool) -> None:
        whole = self.units.new(1)
        self.units.pin(torch.tensor([whole]), "input of the model")
        index = 0
        eligible: list[Tensor] = []
        map_tensors(inputs, lambda tensor: eligible.append(tensor) if tensor.is_floating_point() and tensor.dim() > 1 else None)
        remove_inputs = remove_inputs and len(eligible) == 1 and eligible[0][0].numel() <= MAX_FEATURES

        def take(tensor: Tensor) -> Tensor:
            nonlocal index
            name, index = str(index), index + 1
            labels = None
            if tensor.is_floating_point() and tensor.dim() > 0:
                labels = flat(whole, tensor.shape)
                if remove_inputs and tensor.dim() > 1:
                    first = self.units.new(tensor[0].numel())
                    own = torch.arange(first, self.units.count).view(tensor.shape[1:])
                    self.inputs[name], labels = own, own.expand(tensor.shape)
                    self.units.produce(own.reshape(-1))
                    self.views.append(View(own[None], (1, *tensor.shape[1:]), None))
            self.put(tensor, Shadow(labels, flat(True, tensor.shape)))
            return tensor

        map_tensors(inputs, take)

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        """Know which module runs; look away within opaque ones."""
        handles = []
        for name, module in self.model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # takes no hooks; its operators are seen all the same
            reason = next((why for kind, why in OPAQUE.items() if isinstance(module, kind)), None)

            def enter(module: nn.Module, args: Any, kwargs: Any, name: str = name, reason: str | None = reason) -> None:
                self.stack.append(name)
                self.entered.add(name)
                if reason is not None and not self.opaque:
                    self._close(module, (args, kwargs), reason)
                self.opaque += reason is not None
                self._note_width(module, args, name)

            def leave(module: nn.Module, args: Any, kwargs: Any, out: Any, name: str = name, reason: Any = reason) -> None:
                self.stack.pop()
                self.opaque -= reason is not None
                with _disable_current_modes():
                    note_returned(self, name, out)
                    for tensor in tensors_in(out) if reason is not None and not self.opaque else ():
                        self.put(tensor, Shadow(None, flat(True, tensor.shape)))
                    if name in self.noisy:  # MC dropout: under `sampling` whatever is not zero becomes noise here
                        for tensor in tensors_in(out):
                            self._make_noisy(tensor)

            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note_width(self, module: nn.Module, args: Any, name: str) -> None:
        """A norm without tensors of its own still knows its number of channels, and warns where it meets others."""
        if isinstance(module, NORMS) and not any(True for _ in (*module.parameters(), *module.buffers())) and args:
            labels = self.of(args[0]).labels
            if labels is not None and varying(labels) == [1]:
                self.views.append(View(small(labels).reshape(1, -1), (1, labels.shape[1]), name))

    def _close(self, module: nn.Module, arguments: Any, reason: str) -> None:
        with _disable_current_modes():
            for tensor in tensors_in(arguments):
                self.pin(tensor, f"enters a {type(module).__name__} ({reason})")
            for tensor in module.parameters():
                if id(tensor) in self.parameters:
                    self.seal(self.parameters[id(tensor)], reason)

    def _make_noisy(self, tensor: Tensor) -> None:
        shadow = self.of(tensor)
        self.put(tensor, dataclasses.replace(shadow, taint=shadow.taint | (tensor != 0).cpu()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from svdcompress.prune._operators import follow

        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if time.thread_time() > self.deadline:
            raise OutOfTime
        if self.opaque:
            return out
        follow(self, func, args, kwargs, out)
        return out


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested containers, mappings, dataclasses and plain objects, each once."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()

    def look(item: Any, depth: int) -> None:
        if isinstance(item, Tensor):
            found[id(item)] = item
            return
        if (
            isinstance(item, str | bytes | int | float | complex | bool | nn.Module | type(None))
            or id(item) in seen
            or depth > 8
        ):
            return
        seen.add(id(item))
        if isinstance(item, Mapping):
            for part in item.values():
                look(part, depth + 1)
        elif isinstance(item, list | tuple | set):
            for part in item:
                look(part, depth + 1)
        elif hasattr(item, "__dict__"):
            for part in vars(item).values():
                look(part, depth + 1)

    look(value, 0)
    return list(found.values())
