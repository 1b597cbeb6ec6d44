"""Linear maps by a weight, from units to other units, and products of activations with each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from svdcompress.prune._compare import CONSTANT
from svdcompress.prune._operators._common import combine, other_units
from svdcompress.prune._operators._registry import Unfollowed, operator
from svdcompress.prune._shadow import Shadow, compact, flat, small, varying
from svdcompress.prune._trace import Trace, Use
from svdcompress.prune._units import Parameter

MAX_VALUES = 8_000_000
"""Most values of constant channels that are kept for one consumer; if there are more, the channels count as not constant."""


@operator("convolution", factors=(1,))
def convolution(trace: Trace, name: str, args: tuple, kwargs: dict, out: Tensor) -> None:
    """Convolutions, plain and transposed, grouped or not."""
    x, weight, bias, _, padding, _, transposed, _, groups = args[:9]
    shadow, own = trace.of(x), trace.of(weight)
    parameter = own.parameter
    if parameter is None or parameter.tensor is not weight or parameter.groups != groups or shadow.parameter is not None:
        raise Unfollowed
    channels, produced = parameter.sizes[1], parameter.sizes[0]
    outs, ins = _slots(parameter, 0), _slots(parameter, 1)
    if transposed and groups == 1:
        channels, produced, outs, ins = produced, channels, ins, outs
    mask = _mask(parameter)
    mask = mask.squeeze(3) if mask.shape[3] == 1 else torch.from_numpy(mask.numpy().any(3))  # (groups, outputs, inputs)
    rows = channelwise(shadow.taint, 1, channels)
    _feed(trace, shadow.labels, 1, ins)
    trace.units.produce(outs)
    per_group = channels // groups
    if groups > 1 and per_group == 1:  # depthwise: a channel and its own outputs are tied
        trace.units.tie(ins[:, None].expand(groups, produced // groups), outs.reshape(groups, -1))
    biasable = not transposed and not any(padding)
    values = _values(x.movedim(1, 0).reshape(channels, x.shape[0], -1), rows)
    _record(trace, parameter, ins, outs, mask, biasable, rows, values)
    moved = rows | _drawn(trace, parameter, rows, values)
    reached = _reached(mask, moved.view(groups, 1, per_group)).reshape(-1) | _random_rows(trace, parameter)
    shape = [1, produced] + [1] * (out.dim() - 2)
    result = Shadow(outs.view(shape).expand(out.shape), compact(reached.view(shape).expand(out.shape)))
    if bias is not None:
        other = trace.of(bias).move(lambda t: t.reshape(shape))
        result = combine(trace, [result, other], out.shape, result.taint | small(other.taint))
    trace.put(out, result)


def _slots(parameter: Parameter, axis: int) -> Tensor:
    return torch.arange(parameter.axes[axis], parameter.axes[axis] + parameter.sizes[axis])


def _mask(parameter: Parameter) -> Tensor:
    mask = parameter.mask
    if mask is None:
        mask = torch.ones((), dtype=torch.bool).expand(parameter.tensor.shape)
    return parameter.canonical(mask.cpu())


def _reached(mask: Tensor, inputs: Tensor) -> Tensor:
    """Outputs that depend on at least one reached input; inputs are along the last dimension."""
    if mask.stride() == (0,) * mask.dim():
        return inputs.any(-1).expand(mask.shape[:-1])
    return torch.from_numpy((mask.numpy() & inputs.numpy()).any(-1))


def _random_rows(trace: Trace, parameter: Parameter) -> Tensor:
    """Rows whose bias is already noise: their output is not a constant when sampled."""
    for name in parameter.names:
        if name in trace.random:
            return trace.random[name].cpu()
    return torch.zeros((), dtype=torch.bool)


def _drawn(trace: Trace, parameter: Parameter, reached: Tensor, values: Tensor) -> Tensor:
    """Inputs that are constant but not 0, if the weights that read them are drawn: their outputs are not constant when
    sampled, although they are for the mean."""
    if trace.converted.isdisjoint(parameter.names):
        return torch.zeros_like(reached)
    return ~reached & (values.nan_to_num() != 0).any(1)


def channelwise(taint: Tensor, dim: int, channels: int) -> Tensor:
    """Which channels of a dimension the input reaches anywhere."""
    core = small(taint).movedim(dim, 0)
    return core.reshape(core.shape[0], -1).any(1).expand(channels)


def _feed(trace: Trace, labels: Tensor | None, dim: int, ins: Tensor) -> None:
    """Tie the units that enter along a dimension to the weight's input slots."""
    if labels is None:
        trace.units.pin(ins, "reads values that belong to no unit")
        return
    core = small(labels).movedim(dim, 0)
    trace.units.tie(ins[:, None], core.reshape(core.shape[0], -1))


def _values(x: Tensor, reached: Tensor) -> Tensor:
    """Values of the channels that the input does not reach, (channels, positions); NaN for the others, and where values are
    not constant over the batch.

    x: (channels, batch, positions). If each channel has the same value in all positions, one position is kept.
    """
    if not x[0].numel():
        raise Unfollowed  # an expert that no example was sent to: its inputs are unknown
    quiet = torch.nonzero(~reached).flatten()
    kept = x[quiet.to(x.device)].detach().double().cpu()
    if kept.numel() > MAX_VALUES:
        return torch.full((len(reached), 1), torch.nan, dtype=torch.float64)
    spread = (kept - kept[:, :1]).abs().amax((1, 2)) if kept.numel() else torch.zeros(len(quiet))
    scale = kept.abs().amax((1, 2)) if kept.numel() else torch.zeros(len(quiet))
    first = kept[:, 0]
    first[spread > CONSTANT * scale] = torch.nan  # differs within the batch: not a constant after all
    if first.numel() and bool(((first - first[:, :1]).abs().amax(1) <= CONSTANT * scale).all()):
        first = first[:, :1]
    values = torch.full((len(reached), max(first.shape[1], 1)), torch.nan, dtype=torch.float64)
    values[quiet] = first
    return values


def _record(
    trace: Trace,
    parameter: Parameter,
    ins: Tensor,
    outs: Tensor,
    mask: Tensor,
    biasable: bool,
    reached: Tensor,
    values: Tensor,
    derived: bool = False,
) -> None:
    owner = trace.stack[-1]
    known = owner if any(name.rpartition(".")[0] == owner for name in parameter.names) else None
    trace.uses.append(Use(parameter, known, ins, outs, mask, biasable, reached, values, derived))


# Matrix products


@operator("mm", factors=(0, 1))
def mm(trace: Trace, name: str, args: tuple, kwargs: dict, out: Tensor) -> None:
    """(M, K) x (K, N)."""
    a, b = args
    product(trace, a[None], b[None], _lift(trace.of(a)), _lift(trace.of(b)), out, lambda t: t.squeeze(0))


def _lift(shadow: Shadow) -> Shadow:
    return shadow.move(lambda t: t[None])


@operator("bmm", factors=(0, 1))
def bmm(trace: Trace, name: str, args: tuple, kwargs: dict, out: Tensor) -> None:
    """(B, M, K) x (B, K, N)."""
    a, b = args
    product(trace, a, b, trace.of(a), trace.of(b), out, lambda t: t)


@operator("addmm", factors=(1, 2))
def addmm(trace: Trace, name: str, args: tuple, kwargs: dict, out: Tensor) -> None:
    """bias + (M, K) x (K, N)."""
    bias, a, b = args
    mm(trace, "mm", (a, b), {}, out)
    _shift(trace, out, trace.of(bias))


@operator("baddbmm", factors=(1, 2))
def baddbmm(trace: Trace, name: str, args: tuple, kwargs: dict, out: Tensor) -> None:
    """bias + (B, M, K) x (B, K, N)."""
    bias, a, b = args
    bmm(trace, "bmm", (a, b), {}, out)
    if kwargs.get("beta", 1) != 0:
        _shift(trace, out, trace.of(bias))


def _shift(trace: Trace, out: Tensor, other: Shadow) -> None:
    """Add a bias, or the outputs of another layer, to a product."""
    result = trace.of(out)
    adds = other_units(trace, [result.labels, other.labels])
    shadow = combine(trace, [result, other], out.shape, result.taint | small(other.taint))
    if adds and shadow.labels is not None:
        trace.sums.append(small(shadow.labels))
    trace.put(out, shadow)


def product(
    trace: Trace, a: Tensor, b: Tensor, left: Shadow, right: Shadow, out: Tensor, shape: Callable[[Tensor], Tensor]
) -> None:
    """A batched matrix product, by a weight on either side or of two activations."""
    if left.parameter is None and right.parameter is not None:
        result = _by_weight(trace, a, left, right)
    elif right.parameter is None and left.parameter is not None:
        turned = (right.move(lambda t: t.transpose(1, 2)), left.move(lambda t: t.transpose(1, 2)))
        result = _by_weight(trace, b.transpose(1, 2), *turned).move(lambda t: t.transpose(1, 2))
    elif left.parameter is not None and right.parameter is not None:
        trace.seal(left.parameter, "multiplied with another parameter")
        trace.seal(right.parameter, "multiplied with another parameter")
        taint = bool(left.taint.any() or right.taint.any())
        result = Shadow(None, flat(taint, (a.shape[0], a.shape[1], b.shape[2])))
    else:
        result = _of_activations(trace, left, right, b, (a.shape[0], a.shape[1], b.shape[2]))
    trace.put(out, result.move(shape))


def _by_weight(trace: Trace, x: Tensor, shadow: Shadow, own: Shadow) -> Shadow:
    """x: (B, M, K) times a view (B, K, N) of a parameter; labels of the result vary along N alone."""
    parameter: Any = own.parameter
    along_k = [axis for axis, place in enumerate(own.places) if 1 in varying(place)]
    along_n = [axis for axis, place in enumerate(own.places) if 2 in varying(place)]
    if len(own.places) == 2 and not parameter.grouped:  # an axis of length 1 varies nowhere
        along_k, along_n = _fill(own, along_k, 1), _fill(own, along_n, 2)
        if along_k == along_n and along_k:
            along_k, along_n = ([1], [0]) if parameter.sizes[0] == own.taint.shape[2] else ([0], [1])
    plain = len(along_k) == 1 and len(along_n) == 1 and along_k != along_n and parameter.tensor.dim() == 2
    size_k, size_n = own.taint.shape[1:]
    if not plain or parameter.grouped:
        raise Unfollowed
    k, n = along_k[0], along_n[0]
    at_k = _line(own.places[k], 1, size_k)
    at_n = _line(own.places[n], 2, size_n)
    ins, outs = at_k + parameter.axes[k], at_n + parameter.axes[n]
    mask = None if own.derived else parameter.mask  # a value computed from a zero may not be zero
    mask = torch.ones((), dtype=torch.bool).expand(parameter.tensor.shape) if mask is None else mask.cpu()
    whole = torch.equal(at_k, torch.arange(parameter.sizes[k])) and torch.equal(at_n, torch.arange(parameter.sizes[n]))
    mask = mask if whole else mask.index_select(n, at_n).index_select(k, at_k)
    mask = mask if n == 0 else mask.T
    reached_in = channelwise(shadow.taint, 2, size_k)
    _feed(trace, shadow.labels, 2, ins)
    trace.units.produce(outs)
    values = _values(x.movedim(2, 0).reshape(size_k, 1, -1), reached_in)
    _record(trace, parameter, ins, outs, mask[None], whole, reached_in, values, own.derived)
    reached = _reached(mask, reached_in | _drawn(trace, parameter, reached_in, values)) | _random_rows(trace, parameter)
    shape = (x.shape[0], x.shape[1], size_n)
    return Shadow(outs.expand(shape), compact(reached.expand(size_n).expand(shape)))


def _fill(own: Shadow, found: list[int], dim: int) -> list[int]:
    parameter: Any = own.parameter
    lone = [axis for axis, size in enumerate(parameter.sizes) if size == 1]
    return found if found or own.taint.shape[dim] != 1 or not lone else lone[:1]


def _line(place: Tensor, dim: int, size: int) -> Tensor:
    core = small(place)
    if core.numel() not in (1, size):
        raise Unfollowed
    return core.reshape(-1).expand(size).cpu()


def _of_activations(trace: Trace, left: Shadow, right: Shadow, b: Tensor, shape: tuple[int, ...]) -> Shadow:
    """Attention and the like: contracted units are tied to the batch entry (the head) that they belong to, or pinned."""
    taint = small(left.taint).any(2, keepdim=True) | small(right.taint).any(1, keepdim=True)
    if left.simplex and not bool(right.taint.all()):  # rows that add up to 1, times equal values, give these values
        even = (b == b[:, :1]).all(1, keepdim=True).cpu() & ~small(right.taint).any(1, keepdim=True)
        taint = taint & ~even
    taint = compact(taint.expand(shape))
    first, second = left.labels, right.labels
    if 0 in varying(first) or 0 in varying(second):
        heads = _heads(trace, first, second, shape)
        return Shadow(heads, taint)
    if not varying(first) and varying(second) == [2]:  # positions are mixed, channels are not
        return Shadow(small(second).expand(shape), taint)
    if not varying(second) and varying(first) == [1]:
        return Shadow(small(first).expand(shape), taint)
    for labels in (first, second):
        if labels is not None:
            trace.units.pin(small(labels), "multiplied with other activations")
    return Shadow(None, taint)


def _heads(trace: Trace, first: Tensor | None, second: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    one = []
    for labels in (first, second):
        if labels is None:
            continue
        core = small(labels)
        lead = core[:, :1, :1]
        trace.units.tie(core, lead)
        one.append(lead)
    if len(one) == 2:
        trace.units.tie(one[0], one[1])
    elif 0 in varying(first) or 0 in varying(second):
        # The other side has an index for each head too but belongs to no unit: it would not be cut with the heads.
        trace.units.pin(one[0], "multiplied with values that belong to no unit")
    lead = max(one, key=lambda t: t.numel())
    return lead.expand(shape)


@operator("embedding")
def embedding(trace: Trace, name: str, args: tuple, kwargs: dict, out: Tensor) -> None:
    """Rows of a table: its columns are units."""
    table, indices = args[:2]
    own = trace.of(table)
    parameter = own.parameter
    if parameter is None or parameter.tensor is not table:
        raise Unfollowed
    columns = _slots(parameter, 1)
    trace.units.produce(columns)
    trace.lookups.append(columns)
    taint = trace.of(indices).taint
    trace.put(out, Shadow(columns.expand(out.shape), compact(small(taint)[..., None].expand(out.shape))))
