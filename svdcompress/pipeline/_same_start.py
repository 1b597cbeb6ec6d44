"""Whether the trained weights of a run that goes on are those that it began with: others would be compared with its masks."""

from __future__ import annotations

from torch import nn

from svdcompress.errors import ModelError
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._late import digest
from svdcompress.pipeline._resume import FILES


def check_start(context: Context, model: nn.Module, trained: bool) -> None:
    """Raises ModelError where a run goes on with other trained weights, or with weights of another model."""
    now, before = digest(model), context.state.facts.get("start")
    if before is None or not any((context.state.folder / name).exists() for name in FILES):
        context.state.put(start=now)
    elif trained and before != now:
        raise ModelError(
            f"model: its weights are others than when the run in {context.out} began, and what was trained there is of those: "
            "go on with the weights that it began with, or start another run"
        )
