"""Records the changes that surgery made to a model, so that a checkpoint can repeat them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Selection:
    """The indices that are kept along a dimension."""

    dim: int
    kept: list[int]


@dataclass
class Surgery:
    """Changes since the model was dense.

    attributes: {module: {attribute: value}}, for integers and for tuples of them (as lists). shapes: {tensor: shape}, if it
    changed. kept: {module: the part of its output that it still returns}. inputs: the part of its input that the model reads,
    None for all.
    outputs: {module: indices of its weight's outputs that are kept}, of the last pruning only; not stored in manifests.
    """

    attributes: dict[str, dict[str, int | list[int]]] = field(default_factory=dict)
    shapes: dict[str, list[int]] = field(default_factory=dict)
    kept: dict[str, Selection] = field(default_factory=dict)
    inputs: Selection | None = None
    outputs: dict[str, list[int]] = field(default_factory=dict)

    def set(self, model: nn.Module, name: str, attribute: str, value: Any) -> None:
        """Set an attribute of one of the model's modules, and record it if it changes."""
        module = model.get_submodule(name)
        if vars(module).get(attribute) != value:
            setattr(module, attribute, value)
            self.attributes.setdefault(name, {})[attribute] = value if isinstance(value, int) else list(value)

    def then(self, later: Surgery) -> Surgery:
        """This surgery and a later one together; `later.kept` indexes the dense model, `later.inputs` what this one left."""
        attributes = {name: dict(own) for name, own in self.attributes.items()}
        for name, own in later.attributes.items():
            attributes[name] = {**attributes.get(name, {}), **own}
        inputs = later.inputs or self.inputs
        if self.inputs is not None and later.inputs is not None:
            inputs = Selection(later.inputs.dim, [self.inputs.kept[i] for i in later.inputs.kept])
        return Surgery(attributes, {**self.shapes, **later.shapes}, {**self.kept, **later.kept}, inputs)

    def to_dict(self) -> dict[str, Any]:
        """The form in a manifest; `kept` and `inputs` are included only if there are any."""
        found: dict[str, Any] = {"attributes": self.attributes, "shapes": self.shapes}
        if self.kept:
            found["kept"] = {name: {"dim": one.dim, "kept": one.kept} for name, one in self.kept.items()}
        if self.inputs is not None:
            found["inputs"] = {"kept": self.inputs.kept, "dim": self.inputs.dim}
        return found

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Surgery:
        """The inverse of `to_dict`; {} stands for no changes."""
        inputs = found.get("inputs")
        return cls(
            {name: dict(own) for name, own in found.get("attributes", {}).items()},
            dict(found.get("shapes", {})),
            {name: Selection(**one) for name, one in found.get("kept", {}).items()},
            None if inputs is None else Selection(**inputs),
        )
