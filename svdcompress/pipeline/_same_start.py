"""Checks that a resumed run has the trained weights and the loss that it began with."""

from __future__ import annotations

import math

from torch import nn

from svdcompress.errors import ModelError
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._late import digest
from svdcompress.pipeline._resume import FILES


def check_start(context: Context, model: nn.Module, trained: bool, loss: float) -> None:
    """Raises ModelError if a run that began with trained weights is resumed with other ones; warns of another loss.

    loss: the loss of the first examples, by which two loss functions passed in from Python can be told apart.
    """
    now, before = digest(model), context.state.facts.get("start")
    if before is None or not any((context.state.folder / name).exists() for name in FILES):
        context.state.put(start=now, loss=loss if math.isfinite(loss) else None)
    elif trained and before != now:
        raise ModelError(
            f"model: its weights differ from those with which the run in {context.out} began, and what was trained there "
            "builds on those: continue with the weights that it began with, or start another run"
        )
    elif before == now and (first := context.state.facts.get("loss")) is not None and not _alike(loss, first):
        context.warn(
            f"the loss of the first examples is {loss:.4g}, but was {first:.4g} when the run in {context.out} began: what was "
            "trained there followed another loss function, or other data"
        )


def _alike(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=0.01, abs_tol=1e-6) or not math.isfinite(one)
