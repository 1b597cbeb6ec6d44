"""Whether the trained weights of a run that goes on are those that it began with: others would be compared with its masks."""

from __future__ import annotations

import zlib

import torch
from torch import nn

from svdcompress.errors import ModelError
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._resume import FILES

VALUES = 4096
"""Of each tensor at least so many are looked at, evenly spaced."""


def check_start(context: Context, model: nn.Module, trained: bool) -> None:
    """Raises ModelError where a run goes on with other trained weights, or with weights of another model."""
    now, before = _checksum(model), context.state.facts.get("start")
    if before is None or not any((context.state.folder / name).exists() for name in FILES):
        context.state.put(start=now)
    elif trained and before != now:
        raise ModelError(
            f"model: its weights are others than when the run in {context.out} began, and what was trained there is of those: "
            "go on with the weights that it began with, or start another run"
        )


def _checksum(model: nn.Module) -> int:
    total = 0
    for name, tensor in model.state_dict().items():
        total = zlib.crc32(f"{name} {tuple(tensor.shape)}".encode(), total)
        flat = tensor.detach().cpu().reshape(-1)
        some = flat[:: max(1, len(flat) // VALUES)].contiguous()
        total = zlib.crc32(some.view(torch.uint8).numpy().tobytes(), total)
    return total
