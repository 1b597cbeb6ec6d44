"""Operators that draw noise, as dropout does in `train()`: units keep their positions, values are random."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from svdcompress.prune._operators._registry import operator
from svdcompress.prune._shadow import Shadow, flat
from svdcompress.prune._trace import Trace


@operator("bernoulli", "uniform", "normal", "exponential", "geometric", "log_normal", "cauchy")
def drawn(trace: Trace, name: str, args: tuple, kwargs: dict, out: Tensor) -> None:
    """A tensor filled with noise, or noise of its shape."""
    shadow = trace.of(args[0])
    trace.put(out, Shadow(None if shadow.parameter is not None else shadow.labels, flat(True, out.shape)))


@operator("native_dropout")
def dropped(trace: Trace, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    """Dropout in one operator: (values, mask). Zeros stay zero."""
    shadow = trace.of(args[0])
    trace.put(out[0], replace(shadow, taint=shadow.taint | (args[0] != 0).cpu(), simplex=False))
    trace.put(out[1], Shadow(None, flat(True, out[1].shape)))
