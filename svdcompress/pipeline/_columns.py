"""Which columns of a table the pruned model no longer reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def dropped(preprocessing: Mapping[str, Any], kept: Sequence[int] | None, inputs: Any) -> list[str] | None:
    """The names of the columns of which no input is kept; None for data that are no table, if inputs are not pruned, or if a
    transform has changed their number.

    A category is dropped as a whole: it has an input for each of its values. kept: indices of the inputs, as in `inputs_kept`.
    inputs: some that the model took before.
    """
    columns = preprocessing.get("columns")
    if kept is None or not columns or preprocessing.get("tokenizer"):
        return None
    categories, stay, gone, start = preprocessing.get("categories") or {}, set(kept), [], 0
    for column in columns:
        end = start + len(categories.get(column) or [column])
        if stay.isdisjoint(range(start, end)):
            gone.append(str(column))
        start = end
    return gone if isinstance(inputs, Tensor) and start == inputs.shape[-1] else None
