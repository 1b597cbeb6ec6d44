"""Text columns of a table, which become one input for each of their values: what a user is told about them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

MOST_NAMED = 10
"""Columns that the note names; those with the most values come first."""

ODD = 0.1
"""The largest fraction of a column's values that may be no numbers if the others make it a column of numbers with commas."""

HOW = "write numbers with a point for decimals, and without separators of thousands"

_WITH_COMMA = re.compile(
    r"[+-]?(\d+,\d+|\d{1,3}(\.\d{3})+,\d+|\d{1,3}(,\d{3})+(\.\d*)?)(e[+-]?\d+)?%?", flags=re.IGNORECASE
)  # 1,5 or 1.000,5 or 1,000,000.5
_PLAIN = re.compile(r"[+-]?\d+(\.\d*)?(e[+-]?\d+)?%?", flags=re.IGNORECASE)


def note(categories: Mapping[str, Sequence[str]], place: str) -> list[str]:
    """The note that lists a table's text columns with their numbers of values; [] if it has none."""
    if not categories:
        return []
    counts = sorted(((len(names), column) for column, names in categories.items()), key=lambda each: -each[0])
    named = ", ".join(f"{column} ({count} value{'s' * (count != 1)})" for count, column in counts[:MOST_NAMED])
    more = f" and {len(counts) - MOST_NAMED} more" if len(counts) > MOST_NAMED else ""
    return [f"columns of {place} that hold text become one input of 0 or 1 for each value: {named}{more}"]


def commas(categories: Mapping[str, Sequence[str]], place: str) -> list[str]:
    """Warnings about text columns whose values are numbers with a comma."""
    return [
        f"{place}: column {column!r} is read as text, with an input for each of its {len(names)} values, but they look like "
        f"numbers with a comma ({found}): {HOW}"
        for column, names in categories.items()
        if (found := with_comma(names)) is not None
    ]


def with_comma(values: Iterable[str]) -> str | None:
    """The first value with a comma if (nearly) all distinct values are numbers, with or without one; else None."""
    values = [value.strip() for value in values]
    found = [value for value in values if _WITH_COMMA.fullmatch(value)]
    odd = len(values) - len(found) - sum(1 for value in values if _PLAIN.fullmatch(value))
    return found[0] if len(found) > odd and odd <= max(1, ODD * len(values)) else None
