"""What pruning did and did not do, group by group and layer by layer."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class PruneGroup:
    """Units that belong to the same layers: the channels of a layer or a residual stream, or the heads of an attention layer.

    name: the first layer that writes them. removed, kept: numbers of its channels.
    reason: why the others were kept ("" if nothing prevents their removal: they are in use).
    layers: all tensors that have them as an axis. units: in how many parts the group could be removed (heads, if there are
    any, otherwise channels).
    unit_parameters, unit_macs: what removing one unit alone would save (the mean, if units differ): the weights that write it
    and read it, its biases and norm entries, and the multiply-accumulates of these weights for one example.
    kept_unrounded: channels that would have been kept without `round_to`.
    """

    name: str
    removed: int
    kept: int
    reason: str
    layers: tuple[str, ...] = ()
    units: int = 0
    unit_parameters: int = 0
    unit_macs: int = 0
    kept_unrounded: int = 0

    @property
    def prunable(self) -> bool:
        """Whether any units of this group can be removed."""
        return self.removed > 0 or not self.reason or self.reason.startswith("kept")


@dataclass(frozen=True)
class LayerShape:
    """The shape of a weight before and after, and the sparsity of what is left (0 if it has no mask)."""

    name: str
    shape_before: tuple[int, ...]
    shape_after: tuple[int, ...]
    sparsity: float = 0.0


@dataclass(repr=False)
class PruneReport:
    """The result of one pruning.

    inputs_kept: indices of the input features that the pruned model reads, or None for all. inputs_dim: the dimension of the
    input that they index.
    max_error: largest absolute difference from the masked model, None if not verified.
    seconds: wall time. parameters_before, parameters_after: means only. round_to: as requested.
    parameters_unrounded: parameters_after without rounding (cut by the same surgery but not verified; None if that failed).
    notes: what the user should know. surgery: what a checkpoint needs to redo the shapes.
    outputs_kept: for each module (layer or norm) that lost outputs, which outputs of the dense model are kept; empty if the
    given model had lost units before.
    """

    groups: list[PruneGroup] = field(default_factory=list)
    layers: list[LayerShape] = field(default_factory=list)
    inputs_kept: list[int] | None = None
    inputs_dim: int | None = None
    max_error: float | None = None
    seconds: float = 0.0
    parameters_before: int = 0
    parameters_after: int = 0
    round_to: int = 1
    parameters_unrounded: int | None = None
    notes: list[str] = field(default_factory=list)
    surgery: dict[str, Any] = field(default_factory=dict)
    outputs_kept: dict[str, list[int]] = field(default_factory=dict)

    @property
    def removed(self) -> int:
        """Units removed."""
        return sum(group.removed for group in self.groups)

    def to_dict(self) -> dict[str, Any]:
        """All fields, serializable as JSON."""
        return asdict(self)

    def __repr__(self) -> str:
        checked = "not verified" if self.max_error is None else f"off by {self.max_error:.1e} at most"
        return (
            f"PruneReport({self.removed:,} units removed, {self.parameters_before:,} to {self.parameters_after:,} parameters, "
            f"{checked})"
        )
