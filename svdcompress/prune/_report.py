"""What pruning did and did not do, group by group and layer by layer."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class PruneGroup:
    """Units that have the same layers in common: the channels of a layer, of a residual stream, the heads of an attention.

    name: the first layer that writes them. removed, kept: numbers of its channels. reason: why those that stay do (""
    where nothing speaks against their going: they are in use). layers: all tensors that have them as an axis. units: in how
    many parts the group could go (heads, where there are any; else channels). unit_parameters, unit_macs: what goes with
    one of them, before anything else does (the mean, where they differ): the weights that write it and read it, its biases
    and entries of norms; the multiply-accumulates of these weights for one example.
    kept_unrounded: channels that would have stayed without `round_to`.
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
        """Whether units of this group may go at all."""
        return self.removed > 0 or not self.reason or self.reason.startswith("kept")


@dataclass(frozen=True)
class LayerShape:
    """A tensor's shape before and after, and the share of zeros in what is left (0 where it holds no mask)."""

    name: str
    shape_before: tuple[int, ...]
    shape_after: tuple[int, ...]
    sparsity: float = 0.0


@dataclass(repr=False)
class PruneReport:
    """The whole of it.

    inputs_kept: indices of the input features that the pruned model reads, or None for all. inputs_dim: the dimension of
    the input that they index. max_error: largest absolute difference from the masked model, None if not verified.
    seconds: wall time. parameters_before, parameters_after: means only. round_to: as it was asked for.
    parameters_unrounded: what would have been left without rounding (cut by the same surgery, not verified; None if that
    cannot be told). notes: what the user should know. surgery: what a checkpoint needs to redo the shapes.
    outputs_kept: which of the dense model's outputs stay, of modules (layers, normalisations) that lost some; nothing where the
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
        """All fields, JSON-able."""
        return asdict(self)

    def __repr__(self) -> str:
        checked = "not verified" if self.max_error is None else f"off by {self.max_error:.1e} at most"
        return (
            f"PruneReport({self.removed:,} units removed, {self.parameters_before:,} to {self.parameters_after:,} parameters, "
            f"{checked})"
        )
