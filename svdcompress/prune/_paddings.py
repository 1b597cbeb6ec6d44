"""Zero channels that a module adds by a number in its code (padded shortcuts): they are cut from what the module returns."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from svdcompress.layers import kept_channels
from svdcompress.prune._shadow import Shadow, small, varying
from svdcompress.prune._trace import Padding, Trace

PADDED = "meets channels that are padded by a fixed number in code"
"""Why channels stay that meet a padding which its module does not return."""


def padded(trace: Trace, shadow: Shadow, pad: list[int], shape: torch.Size) -> Tensor | None:
    """Labels of a tensor padded along its only dimension of units; the added positions are units of their own.

    None if no dimension of units is padded, or if units vary along several dimensions.
    """
    labels = small(shadow.labels)
    grown = [d for d in range(labels.dim()) if shadow.taint.shape[d] != shape[d]]
    own = varying(labels)
    if not set(grown) & set(own) or len(own) != 1:
        return None
    (dim,) = own
    at = len(shape) - 1 - dim
    line, ends = labels.reshape(-1), pad[2 * at : 2 * at + 2]
    added = torch.nn.functional.pad(torch.zeros_like(line), ends, value=1).bool()
    line = torch.nn.functional.pad(line, ends)
    first = trace.units.new(int(added.sum()))
    line[added] = torch.arange(first, trace.units.count)
    trace.units.produce(line[added])
    trace.paddings.append(Padding(line, added, dim, trace.stack[-1]))
    return line.view([-1 if d == dim else 1 for d in range(len(shape))]).expand(shape)


def note_returned(trace: Trace, name: str, out: object) -> None:
    """Note for each padding of a module whether the module returns that tensor, uncombined, and padded no other."""
    own = [padding for padding in trace.paddings if padding.module == name]
    for padding in own:
        labels = trace.of(out).labels if isinstance(out, Tensor) else None
        hook = kept_channels(trace.model.get_submodule(name))
        line = padding.labels if hook is None else padding.labels[hook.kept]
        alike = labels is not None and varying(labels) == [padding.dim] and torch.equal(small(labels).reshape(-1), line)
        padding.returned = alike and len(own) == 1 and not _joined(trace, padding)


def _joined(trace: Trace, padding: Padding) -> bool:
    """Whether added channels have met those of another tensor, as in a sum: cut after that, the sum would fail."""
    added = padding.labels[padding.own].numpy()
    return any(np.isin(side, added).any() for edge in trace.units.edges for side in edge)


def hold_others(trace: Trace) -> None:
    """Pin the added channels of paddings that their module does not return, as they cannot be cut there."""
    for padding in trace.paddings:
        if not padding.returned:
            trace.units.pin(padding.labels[padding.own], PADDED)
