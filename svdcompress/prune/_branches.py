"""Adds branches that run only in `train()` to the trace of a pass in `eval()`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from svdcompress.prune._trace import Trace
from svdcompress.prune._tracer import OutOfTime


def take_branches(trace: Trace, trained: Callable[[], Trace]) -> list[str]:
    """Merge a trace of a pass in `train()` into that of a pass in `eval()`; returns notes for the user.

    trained: makes the former, of the same model and kind of inputs. If it fails, the equivalence check still finds choices
    with which `train()` no longer runs.
    """
    try:
        _absorb(trace, trained())
        return []
    except OutOfTime:
        raise
    except Exception as error:  # whatever a forward pass may raise
        what = f"{type(error).__name__}: {error}"
        return [f"branches that run only in training could not be followed ({what}): units that they read may be kept"]


def _absorb(trace: Trace, other: Trace) -> None:
    """Let units be removed only if both passes allow it. Slots are numbered before the run, so they are the same in both."""
    mine, theirs = trace.units, other.units
    if mine.count != theirs.count:
        raise ValueError("the two passes have different units")
    mine.edges += theirs.edges
    mine.pins += theirs.pins
    mine.producers += theirs.producers
    trace.views += other.views
    trace.splits += other.splits
    trace.touched |= other.touched
    trace.entered |= other.entered
    trace.bugs += (bug for bug in other.bugs if bug not in trace.bugs)
    number = {id(parameter): i for i, parameter in enumerate(theirs.parameters)}
    for use in other.uses:
        same = mine.parameters[number[id(use.parameter)]]
        known = (own for own in trace.uses if own.parameter is same)
        if not any(torch.equal(own.ins, use.ins) and torch.equal(own.outs, use.outs) for own in known):
            trace.branches.append(dataclasses.replace(use, parameter=same))
