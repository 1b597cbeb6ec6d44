"""Brings tensors that belong together to one shape: (N, 1) beside (N,) would be spread over (N, N) without a word."""

from __future__ import annotations

from contextlib import suppress

from torch import Tensor

from svdcompress.errors import UsageError
from svdcompress.sources import like


def shaped_like(reference: Tensor, values: Tensor, name: str, *, of: str = "the mean", spread: bool = True) -> Tensor:
    """The values in the shape of the reference: (N, 1) is (N,). spread: whether fewer values may stand for several, as one for
    each row in (N, 1). name, of: what the values and the reference are called. Raises UsageError if they don't fit."""
    try:
        return like(values, reference)
    except ValueError as error:
        with suppress(RuntimeError):
            if spread:
                return values.expand_as(reference)
        raise UsageError(f"{name}: of shape {tuple(values.shape)}; {of} is of shape {tuple(reference.shape)}") from error
