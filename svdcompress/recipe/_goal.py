"""Goals of a search: a measure of cost, and the size wanted."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from svdcompress.errors import nearest

MEASURES = {
    "parameters": "parameters",
    "macs": "multiply-accumulates",
    "latency": "milliseconds",
    "bytes": "bytes",
    "nonzero": "non-zeros",
}
"""The measures of a model's size, and what each is counted in: macs for one example; latency (ms, in onnxruntime) and bytes of
model.onnx; nonzero parameters."""


def smaller(measure: str) -> str:
    """What comes after a factor: a model has 2x fewer parameters, or is 2x faster.

    >>> smaller("macs"), smaller("latency")
    ('fewer multiply-accumulates', 'faster')
    """
    return "faster" if measure == "latency" else f"fewer {MEASURES[measure]}"


MOST_LEVELS = 20
"""Most levels of rising pressure in a search: at the last, beta is half a million times that of the first."""

UNITS = {
    "bytes": {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 1024.0, "mib": 1024.0**2, "gib": 1024.0**3},
    "latency": {"ms": 1.0, "us": 1e-3, "s": 1e3},
    "parameters": {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9},
    "nonzero": {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9},
    "macs": {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9},
}
"""Units of absolute sizes, in bytes, milliseconds and counts."""

_HOW = "write a factor (2x), a share of the dense model (0.4 or 40%), or a size ({})"
_SIZES = {"bytes": "200kB", "latency": "5ms", "parameters": "10k", "nonzero": "5000", "macs": "30M"}


@dataclass(frozen=True)
class Goal:
    """A size wanted: absolute (`size`), or how many times smaller than the dense model (`factor`). text: as it was written."""

    text: str
    measure: str
    factor: float | None = None
    size: float | None = None

    def target(self, dense: float) -> float:
        """The size to reach, for a dense model of size `dense`."""
        return self.size if self.size is not None else dense / float(self.factor or 1.0)


def parse_goal(text: str) -> Goal:
    """`latency=2x`, `macs=0.4`, `parameters=10x`, `nonzero=50x`, `bytes=200kB`. Raises ValueError, saying how to write it.

    >>> parse_goal("macs=40%").target(1000.0)
    400.0
    """
    measure, equals, amount = (part.strip() for part in text.partition("="))
    if not equals or measure not in MEASURES:
        close = nearest(measure, MEASURES)
        hint = f"did you mean {close}?" if close else f"there are {', '.join(MEASURES)}"
        raise ValueError(f"{text!r} is not MEASURE=SIZE, as in latency=2x; {hint}")
    found = re.fullmatch(r"(\d+(?:_\d+)*(?:\.\d+)?(?:e[+-]?\d+)?)\s*([a-z%]*)", amount.lower())
    how = _HOW.format(_SIZES[measure])
    if not found:
        raise ValueError(f"{text!r}: {amount!r} is not a size; {how}")
    number, unit = float(found[1].replace("_", "")), found[2]
    if number <= 0 or math.isinf(number):
        raise ValueError(f"{text!r}: a size must be above 0; {how}")
    if unit == "x":
        return Goal(text, measure, factor=_smaller(number, text))
    if unit == "%":
        return Goal(text, measure, factor=_smaller(100 / number, text))
    if unit == "" and number <= 1:
        return Goal(text, measure, factor=_smaller(1 / number, text))
    if unit not in UNITS[measure]:
        raise ValueError(f"{text!r}: {amount!r} does not have a unit of {measure}; {how}")
    return Goal(text, measure, size=number * UNITS[measure][unit])


def _smaller(factor: float, text: str) -> float:
    if factor < 1:
        raise ValueError(f"{text!r} asks for a model larger than the dense one")
    return factor
