"""What `to_sparse` found out about each Linear layer, and a summary of it in one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SparseEntry:
    """What `to_sparse` did with one Linear layer, and why.

    name: its dotted name. density: share of its weights that are not 0 (None: it has no weight of its own). rows: number of
    rows of the input in its first call (0: it was not called). dense_ms, sparse_ms: median milliseconds of that call (None:
    not timed). used: whether the layer is sparse in the result. reason: why it is not ("" if it is).
    """

    name: str
    density: float | None
    rows: int
    dense_ms: float | None
    sparse_ms: float | None
    used: bool
    reason: str


def summary(entries: Sequence[SparseEntry], most: int = 6) -> str:
    """One line: which layers are sparse or, if none is, why the first few are not."""
    used = [entry.name for entry in entries if entry.used]
    if used:
        return f"sparse products in {', '.join(used[:most])}{' ...' * (len(used) > most)}"
    told = [f"{entry.name or 'the layer'} ({_facts(entry)}): {entry.reason}" for entry in entries[:most]]
    why = "; ".join(told) + " ..." * (len(entries) > most) if told else "the model has no Linear layer"
    return f"no layer is sparse: {why}"


def _facts(entry: SparseEntry) -> str:
    density = "" if entry.density is None else f"{100 * entry.density:.3g}% of the weights not 0, "
    return f"{density}{entry.rows:,} row{'s' * (entry.rows != 1)}"
