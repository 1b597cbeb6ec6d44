"""Operators that rearrange whole tensors, or make new ones of their shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from svdcompress.prune._operators._common import bound, note_view
from svdcompress.prune._operators._registry import operator
from svdcompress.prune._shadow import Shadow, flat
from svdcompress.prune._trace import Trace


@operator("clone", "_to_copy", "detach", "alias", "contiguous", "lift_fresh", "lift_fresh_copy", "positive")
def same(trace: Trace, name: str, args: tuple, kwargs: dict, out: Tensor) -> None:
    """The same values in the same places."""
    trace.put(out, trace.of(args[0]))


@operator("view", "_unsafe_view", "_reshape_alias", "reshape", "_reshape_copy", "flatten", "unflatten")
def reshape(trace: Trace, name: str, args: tuple, kwargs: dict, out: Tensor) -> None:
    """Views: the new lengths are noted if the tensor has units, as code may hold them as numbers."""
    before = trace.of(args[0])
    shadow = before.move(lambda tensor: tensor.reshape(out.shape))
    note_view(trace, shadow.labels, out)
    trace.put(out, _rows(before, shadow))


def _rows(before: Shadow, after: Shadow) -> Shadow:
    """The shadow `after`, whose rows still add up to 1 if the last dimension has not changed."""
    return replace(after, simplex=before.simplex and before.taint.shape[-1:] == after.taint.shape[-1:])


@operator(
    "permute",
    "transpose",
    "t",
    "squeeze",
    "unsqueeze",
    "flip",
    "repeat",
    "pixel_shuffle",
    "pixel_unshuffle",
    "movedim",
    "swapaxes",
)
def move(trace: Trace, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    """Permutations and the like, applied to the shadow too."""
    trace.put(out, trace.of(args[0]).move(bound(name, args, kwargs)))


@operator("expand")
def expand(trace: Trace, name: str, args: tuple, kwargs: dict, out: Tensor) -> None:
    """Broadcasting."""
    before = trace.of(args[0])
    trace.put(out, _rows(before, before.move(lambda tensor: tensor.expand(out.shape))))


@operator(
    "zeros_like",
    "ones_like",
    "full_like",
    "empty_like",
    "rand_like",
    "randn_like",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty",
)
def like(trace: Trace, name: str, args: tuple, kwargs: dict, out: Tensor) -> None:
    """A new tensor of another's shape: it has the units of the other, but its values don't depend on it."""
    shadow = trace.of(args[0])
    labels = None if shadow.parameter is not None or out.shape != args[0].shape else shadow.labels
    trace.put(out, Shadow(labels, flat(name.startswith("rand"), out.shape)))


@operator("channel_shuffle", "native_channel_shuffle")
def shuffle(trace: Trace, name: str, args: tuple, kwargs: dict, out: Tensor) -> None:
    """Channel shuffle: a view as (groups, rest), transposed."""
    x, groups = args[0], args[1]
    shadow = trace.of(x)
    split = (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    moved = shadow.move(lambda t: t.reshape(split))
    note_view(trace, moved.labels, torch.empty(split, device="meta"))
    trace.put(out, moved.move(lambda t: t.transpose(1, 2).reshape(x.shape)))
