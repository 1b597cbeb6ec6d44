"""Channels of zeros that a module adds by a number in its code (padded shortcuts): what it returns is cut behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from svdcompress.layers import keep_channels, kept_channels
from svdcompress.prune._shadow import Shadow, small, varying

if TYPE_CHECKING:
    from svdcompress.prune._choice import Analysis, Choice
    from svdcompress.prune._trace import Trace


@dataclass
class Padding:
    """A dimension that a module made longer. labels: (n,) slots along it. own: (n,) which of them are places that it added.
    module: its name. returned: whether it is what the module returns, so that it can be cut there."""

    labels: Tensor
    own: Tensor
    dim: int
    module: str
    returned: bool = False


def padded(trace: Trace, shadow: Shadow, pad: list[int], shape: torch.Size) -> Tensor | None:
    """Labels of a tensor padded along its only dimension of units; the places that are added are units of their own.

    None where it is padded along no dimension of units, or also in another way.
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
    """Look whether what a module returns is what it padded, and nothing else of it is."""
    own = [padding for padding in trace.paddings if padding.module == name]
    for padding in own:
        labels = trace.of(out).labels if isinstance(out, Tensor) else None
        hook = kept_channels(trace.model.get_submodule(name))
        line = padding.labels if hook is None else padding.labels[hook.kept]
        alike = labels is not None and varying(labels) == [padding.dim] and torch.equal(small(labels).reshape(-1), line)
        padding.returned = alike and len(own) == 1


def hold_others(trace: Trace) -> None:
    """Places that were added where nothing can be cut stay."""
    for padding in trace.paddings:
        if not padding.returned:
            trace.units.pin(padding.labels[padding.own], "meets channels that are padded by a number in code")


def cut_padding(model: nn.Module, analysis: Analysis, choice: Choice) -> None:
    """Let the modules of a pruned copy return the places that stay."""
    for padding in analysis.trace.paddings:
        module = model.get_submodule(padding.module)
        own, gone = padding.own.numpy(), choice.removed[padding.labels.numpy()]
        hook = kept_channels(module)
        before = np.ones(len(own), bool)
        if hook is not None:
            before = np.isin(np.arange(len(own)), hook.kept)
        if padding.returned and (hook is not None or (gone & own).any()):
            left = (before & ~gone)[own | ~gone]  # those not of its own are not there any more
            keep_channels(module, padding.dim, np.flatnonzero(left).tolist())
