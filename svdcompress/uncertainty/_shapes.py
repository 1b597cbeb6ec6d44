"""Brings tensors that belong together to one shape: (N, 1) beside (N,) would be spread over (N, N) without a word."""

from __future__ import annotations

from torch import Tensor

from svdcompress.errors import UsageError


def shaped_like(reference: Tensor, values: Tensor, name: str, *, of: str = "the mean", spread: bool = True) -> Tensor:
    """The values in the shape of the reference: (N, 1) is (N,). spread: whether fewer values may stand for several, as one for
    each row in (N, 1). name, of: what the values and the reference are called. Raises UsageError if they don't fit."""
    if values.shape == reference.shape:
        return values
    if [size for size in values.shape if size != 1] == [size for size in reference.shape if size != 1]:
        return values.reshape(reference.shape)
    try:
        if spread:
            return values.expand_as(reference)
    except RuntimeError:
        pass
    raise UsageError(f"{name}: of shape {tuple(values.shape)}; {of} is of shape {tuple(reference.shape)}")
