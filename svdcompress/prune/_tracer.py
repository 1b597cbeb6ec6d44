"""One forward pass, watched operator by operator.

Operators that move data are applied to the shadows too, so views, splits, concatenations, shuffles and reshapes are followed
exactly, whatever the architecture. An unknown operator pins the units that enter it: they are kept, with a reason.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.hooks import RemovableHandle

from svdcompress.batch import call, first_tensor, map_tensors
from svdcompress.errors import PruneError
from svdcompress.hooks import hooked
from svdcompress.layers import kept_channels
from svdcompress.prune._operations import plain_attention
from svdcompress.prune._operators import follow
from svdcompress.prune._paddings import hold_others, note_returned
from svdcompress.prune._shadow import Shadow, flat, small, varying
from svdcompress.prune._tensors import tensors_in, unseen
from svdcompress.prune._trace import Trace, View

OPAQUE: dict[type[nn.Module], str] = {
    nn.RNNBase: "recurrent layer: its state feeds back into its gates",
    nn.RNNCellBase: "recurrent layer: its state feeds back into its gates",
    nn.MultiheadAttention: "torch's MultiheadAttention computes with the width it was made for",
    nn.Bilinear: "bilinear layer",
}
"""Modules that are not traced inside: the units that enter them and their own parameters are kept."""

IDLE = "never ran on the example inputs: left as it is"

NORMS = nn.modules.batchnorm._NormBase

MAX_FEATURES = 1_000_000
"""The features of an input are units of their own only if there are at most this many."""


class OutOfTime(Exception):
    """Tracing the model took longer than allowed."""


class Tracer(TorchDispatchMode):
    """Watches the model of a trace while it runs, and records in the trace what it sees.

    deadline: as a value of `time.thread_time`.
    """

    def __init__(self, trace: Trace, deadline: float = float("inf")) -> None:
        super().__init__()
        self.trace, self.deadline = trace, deadline
        self.opaque = 0  # how many opaque modules are running, one inside the other

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; True would import all of dynamo on the first operator

    def run(self, inputs: Any, remove_inputs: bool) -> Any:
        """Run the model on the inputs and watch it; returns its outputs, whose units are pinned."""
        device = first_tensor(inputs).device
        self.trace.kept = [
            hook.index(device) for module in self.trace.model.modules() if (hook := kept_channels(module)) is not None
        ]
        self._take_inputs(inputs, remove_inputs)
        self.trace.batch = (*first_tensor(inputs).shape, 1)[0] or 1
        with plain_attention(), hooked(self._hooks()), torch.no_grad():
            with self:
                output = call(self.trace.model, inputs)
            if reason := unseen(output):
                raise PruneError(reason)
            for tensor in tensors_in(output, functions=True):
                self.trace.pin(tensor, "output of the model")
            hold_others(self.trace)
        return output

    def _take_inputs(self, inputs: Any, remove_inputs: bool) -> None:
        whole = self.trace.units.new(1)
        self.trace.units.pin(torch.tensor([whole]), "input of the model")
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
                    first = self.trace.units.new(tensor[0].numel())
                    own = torch.arange(first, self.trace.units.count).view(tensor.shape[1:])
                    self.trace.inputs[name], labels = own, own.expand(tensor.shape)
                    self.trace.units.produce(own.reshape(-1))
                    self.trace.views.append(View(own[None], (1, *tensor.shape[1:]), None))
            self.trace.put(tensor, Shadow(labels, flat(True, tensor.shape)))
            return tensor

        map_tensors(inputs, take)

    def _hooks(self) -> Iterator[RemovableHandle]:
        """Register hooks that keep track of which module runs, and of being inside an opaque one."""
        for name, module in self.trace.model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # takes no hooks; its operators are seen all the same
            reason = next((why for kind, why in OPAQUE.items() if isinstance(module, kind)), None)

            def enter(module: nn.Module, args: Any, kwargs: Any, name: str = name, reason: str | None = reason) -> None:
                self.trace.stack.append(name)
                self.trace.entered.add(name)
                if reason is not None and not self.opaque:
                    self._close(module, (args, kwargs), reason)
                self.opaque += reason is not None
                self._note_width(module, args, name)

            def leave(module: nn.Module, args: Any, kwargs: Any, out: Any, name: str = name, reason: Any = reason) -> None:
                self.trace.stack.pop()
                self.opaque -= reason is not None
                with _disable_current_modes():
                    note_returned(self.trace, name, out)
                    for tensor in tensors_in(out) if reason is not None and not self.opaque else ():
                        self.trace.put(tensor, Shadow(None, flat(True, tensor.shape)))
                    if name in self.trace.random:  # MC dropout: under `sampling` whatever is not zero becomes noise here
                        for tensor in tensors_in(out):
                            self._make_random(tensor)

            yield module.register_forward_pre_hook(enter, with_kwargs=True)
            yield module.register_forward_hook(leave, with_kwargs=True)

    def _note_width(self, module: nn.Module, args: Any, name: str) -> None:
        """Note the channels of a norm without tensors of its own: it still holds their number, and warns if that differs."""
        if isinstance(module, NORMS) and not any(True for _ in (*module.parameters(), *module.buffers())) and args:
            labels = self.trace.of(args[0]).labels
            if labels is not None and varying(labels) == [1]:
                self.trace.views.append(View(small(labels).reshape(1, -1), (1, labels.shape[1]), name))

    def _close(self, module: nn.Module, arguments: Any, reason: str) -> None:
        with _disable_current_modes():
            for tensor in tensors_in(arguments):
                self.trace.pin(tensor, f"enters a {type(module).__name__} ({reason})")
            for tensor in module.parameters():
                if id(tensor) in self.trace.parameters:
                    self.trace.seal(self.trace.parameters[id(tensor)], reason)

    def _make_random(self, tensor: Tensor) -> None:
        shadow = self.trace.of(tensor)
        self.trace.put(tensor, dataclasses.replace(shadow, taint=shadow.taint | (tensor != 0).cpu()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if time.thread_time() > self.deadline:
            raise OutOfTime
        if self.opaque:
            return out
        follow(self.trace, func, args, kwargs, out)
        return out


def leave_idle(trace: Trace) -> None:
    """Keep converted layers that took no part in the pass as they are: their outputs are units that cannot be removed."""
    biases = {name: parameter for parameter in trace.units.parameters for name in parameter.names}
    for parameter in trace.units.parameters:
        owners = [name.rpartition(".")[0] for name in parameter.names]
        idle = id(parameter.tensor) not in trace.touched and not trace.entered.intersection(owners)
        if not idle or trace.converted.isdisjoint(parameter.names):
            continue
        axis = int(parameter.transposed and not parameter.grouped)
        outs = torch.arange(parameter.axes[axis], parameter.axes[axis] + parameter.sizes[axis])
        trace.seal(parameter, IDLE)
        trace.units.produce(outs)
        bias = biases.get(f"{owners[0]}.bias" if owners[0] else "bias")
        if bias is not None and id(bias.tensor) not in trace.touched and bias.sizes == [len(outs)]:
            trace.units.tie(outs, torch.arange(bias.axes[0], bias.axes[0] + len(outs)))
