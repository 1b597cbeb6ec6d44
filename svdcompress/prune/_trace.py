"""What was seen in one forward pass: which unit each value belongs to, and which values the input reaches.

The handlers of operators read and write it; `Tracer` fills it by running the model.
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
    owner: name of the module that applied it, or None if the weight is not that module's. biasable: whether a constant input
    gives a constant output, so that a bias can replace it. reached: per input channel, whether the model's input reaches it.
    values: (channels, positions), the values of channels that the input doesn't reach, NaN for those that it reaches.
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
    """A change of shape to lengths that code may hold as numbers: the labels and sizes after it, and the module that made it
    (None: the user, for an input)."""

    labels: Tensor
    sizes: tuple[int, ...]
    module: str | None


@dataclasses.dataclass
class Pieces:
    """A split into lengths that a module holds as a tuple or list: labels, (n,), the lengths, and the attribute with them."""

    labels: Tensor
    lengths: tuple[int, ...]
    module: str
    attribute: str


@dataclasses.dataclass
class Padding:
    """A dimension that a module padded. labels: (n,) slots along it. own: (n,) bool, the positions that it added. module: its
    name. returned: whether the module returns the padded tensor, so that it can be cut there."""

    labels: Tensor
    own: Tensor
    dim: int
    module: str
    returned: bool = False


class Trace:
    """The units of a model, and the unit of each value in a pass.

    masks: {name of a weight: which of its elements count}. random: {name of a weight: rows whose bias is noise}, and modules
    that draw. protect: {module: why its units are kept}.
    uses: applications of weights; branches: those in `train()` only. splits: each (pieces, width), labels of pieces that must
    keep equal sizes. inputs: labels of each raw input, without the batch. stack: names of the running modules, the innermost
    last. kept: index tensors with which modules select what an earlier pruning left. operations: multiply-accumulates of each
    operator that has any, for the whole batch of `batch` examples. applied: the numbers of those that apply a weight, by its
    id. products: of activations with each other: their units, with an equal share each, and the operation's number. sums:
    labels of tensors that add up several others with other units. lookups: columns of tables of embeddings, once for each
    use. viewed: storages that have views. dirty: storages that were overwritten through one of them. touched: ids of
    parameters that were read. entered: modules that ran. bugs: errors that handlers should not have raised.
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
        self.operations: list[int] = []
        self.applied: dict[int, list[int]] = {}
        self.products: list[tuple[Tensor, int]] = []
        self.sums: list[Tensor] = []
        self.lookups: list[Tensor] = []
        self.batch = 1
        self.entered: set[str] = set()
        self.touched: set[int] = set()
        self.bugs: list[str] = []
        own = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
        self._constants = {id(tensor): tensor for tensor in [*own, *model.buffers()]}  # held: a forward pass may replace one
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
                    self.seal(known, "buffer that is not saved in checkpoints")
                if prefix in protect:
                    self.seal(known, protect[prefix])

    def seal(self, parameter: Parameter, reason: str) -> None:
        """Pin all slots of a parameter."""
        for first, size in zip(parameter.axes, parameter.sizes, strict=True):
            self.units.pin(torch.arange(first, first + size), reason)

    # Shadows

    def of(self, tensor: Tensor) -> Shadow:
        """The shadow of a tensor. The input may reach an unseen tensor, unless it is a scalar or a constant of the model."""
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
        """Pin all units of a tensor; for a view of a parameter, all slots of the parameter."""
        shadow = self.of(tensor)
        if shadow.parameter is not None:
            self.seal(shadow.parameter, reason)
        elif shadow.labels is not None:
            self.units.pin(small(shadow.labels), reason)

    def fix(self, labels: Tensor | None, dims: Sequence[int], reason: str) -> None:
        """Keep the length of these dimensions: tie the units along them if they vary along others too, otherwise pin them."""
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
