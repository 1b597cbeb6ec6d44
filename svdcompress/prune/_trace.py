"""What was seen of one forward pass: which unit each value belongs to, and which values the input reaches.

It is what the handlers of operators read and write; `Tracer` fills it by running the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from svdcompress.prune._shadow import Shadow, flat, small, varying
from svdcompress.prune._tensors import Storages, marked
from svdcompress.prune._units import Parameter, Units


@dataclasses.dataclass
class Use:
    """One application of a weight: a linear map from units to units.

    ins, outs: slots of the input and output channels. mask: bool (groups, outputs per group, inputs per group).
    owner: name of the module that applied it, or None where that is not plain. biasable: whether a constant input is a
    constant output, so that a bias can stand for it. reached: per input channel, whether the model's input reaches it.
    values: (channels, positions) what each channel that the input doesn't reach holds there, NaN where it reaches it.
    derived: whether the weight was computed from the parameter's values, so that nothing can be folded into these.
    """

    parameter: Parameter
    owner: str | None
    ins: Tensor
    outs: Tensor
    mask: Tensor
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


@dataclasses.dataclass
class Padding:
    """A dimension that a module made longer. labels: (n,) slots along it. own: (n,) which of them are places that it added.
    module: its name. returned: whether it is what the module returns, so that it can be cut there."""

    labels: Tensor
    own: Tensor
    dim: int
    module: str
    returned: bool = False


class Trace:
    """The units of a model, and where each value of a pass stands among them.

    masks: {name of a weight: which of its elements count}. random: {name of a weight: rows whose bias is noise}, and modules
    that draw. protect: {module: why its units stay}.
    uses: applications of weights; branches: those of `train()` alone. splits: each (pieces, width), labels of pieces that stay
    of equal size. inputs: labels of each raw input, without the batch. stack: names of the modules that run now, the innermost
    last. kept: index tensors by which modules select what an earlier pruning left. macs: of a whole batch of `batch`
    examples, by the id of a weight. products: of activations with each other: the units that have an equal share each, and
    the multiply-accumulates of the whole batch. viewed, dirty: storages of which there are views; of which one has been
    overwritten. touched: ids of parameters that were read. entered: modules that ran. bugs: what handlers raised and should
    not have.
    """

    def __init__(
        self, model: nn.Module, masks: Mapping[str, Tensor], random: Mapping[str, Tensor], protect: Mapping[str, str]
    ) -> None:
        self.model, self.random, self.converted = model, random, set(masks)
        self.units = Units()
        self.uses: list[Use] = []
        self.branches: list[Use] = []
        self.views: list[View] = []
        self.paddings: list[Padding] = []
        self.pieces: list[Pieces] = []
        self.splits: list[Tensor] = []
        self.inputs: dict[str, Tensor] = {}
        self.stack: list[str] = [""]
        self.kept: list[Tensor] = []
        self.shadows: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.parameters: dict[int, Parameter] = {}
        self.viewed: Storages = {}
        self.dirty: Storages = {}
        self.macs: dict[int, int] = {}
        self.products: list[tuple[Tensor, int]] = []
        self.batch = 1
        self.entered: set[str] = set()
        self.touched: set[int] = set()
        self.bugs: list[str] = []
        own = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
        self._constants = {id(tensor): tensor for tensor in [*own, *model.buffers()]}  # held: a forward may replace its own
        self._register(masks, protect)

    # What is known before the run

    def _register(self, masks: Mapping[str, Tensor], protect: Mapping[str, str]) -> None:
        for prefix, module in self.model.named_modules(remove_duplicate=False):
            own = [*module._parameters.items(), *module._buffers.items()]
            for key, tensor in own:
                if tensor is None or tensor.dim() == 0 or not tensor.is_floating_point():
                    continue
                name = f"{prefix}.{key}" if prefix else key
                known = self.parameters.get(id(tensor))
                if known is None:
                    known = self.units.add(tensor, [], module, masks.get(name))
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
        if marked(self.dirty, tensor):
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
        here = [d for d in free if d in dims]
        if labels is None or not here:
            return
        core = small(labels)
        if len(here) == len(free):
            self.units.pin(core, reason)
            return
        first = core
        for d in here:
            first = first.narrow(d, 0, 1)
        self.units.tie(core, first)
