"""Passes in the precision of training, outside of a fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from svdcompress.layers import arranged_convolutions

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The type of matrix products, by precision."""


@contextmanager
def computing(precision: str, device: torch.device | str, models: Sequence[nn.Module]) -> Iterator[None]:
    """Within it, models on a device compute in a precision from `resolved_precision`, as they do in a fit."""
    kind = torch.device(device).type
    lower = precision in AUTOCAST
    right = arranged_convolutions(models if lower and kind == "cpu" else [])
    with torch.autocast(kind, AUTOCAST.get(precision), enabled=lower), right:
        yield
