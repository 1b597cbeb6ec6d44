"""`to_sparse`: the mean of a pruned model, with sparse products in those Linear layers where they measure faster."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from svdcompress.batch import call, main_output, unwrapped
from svdcompress.convert import as_it_was, leave_fused_paths
from svdcompress.errors import ModelError, UsageError, cause
from svdcompress.execution._eligible import density, linear_layers, why_not
from svdcompress.execution._entry import SparseEntry, summary
from svdcompress.execution._linear import SparseLinear
from svdcompress.execution._timing import Measure, in_turns
from svdcompress.prune import dense_copy

LAYER_SECONDS, MODEL_SECONDS = 0.05, 0.25
"""Time spent on measuring a layer, and the whole model."""

LEAST_GAIN = 1.02
"""How many times as fast the whole model has to be, and what the layers save has to amount to: less is within the noise of such
a measurement, so that sparse layers might as well lose."""

LEAST_WORK = 30_000
"""Multiply-accumulates (rows of the input times numbers in the weight) below which nothing is timed: a dense product of that
size takes a few microseconds, and the call of a sparse one takes as long by itself."""

LAYER_TOLERANCE, MODEL_TOLERANCE = 1e-4, 1e-3
"""How far sparse outputs may be from dense ones, as a share of their spread: sums in another order, in one layer and through
many. A wrong or missing weight is off by far more."""

ROUNDING = 1e-6
"""The same as a share of the largest output: what float32 rounds away where all outputs are alike."""


def to_sparse(model: nn.Module, example_inputs: Any, *, at_least: float = 1.1) -> nn.Module:
    """A copy in `eval()` that computes the mean, with sparse products in those Linear layers where they are faster here.

    Irrelevant weights are 0, as after `to_dense`; a plain model with zeros in its weights is taken too. A layer is sparse
    in the result if its sparse product measures at least `at_least` times as fast as the dense one, on this machine, with
    torch's current number of threads, on the input that one pass with `example_inputs` gives it. Then the whole model is
    measured: unless it is faster by 2%, all layers stay dense. A warning says so, as it does where no layer is faster. Only
    Linear layers are looked at; convolutions stay dense.

    `.sparse_execution` of the result is a list with a `SparseEntry` for each Linear layer: densities, times, reasons. The
    given model is left as it is. Other inputs work too, but were not measured: at another batch size, dtype or device, call
    this function again. The result is for inference: nothing in it takes gradients, and sparse layers raise UsageError in
    `train()`. Like all sparse products of torch they know no autocast, and half precision only on some devices.

    example_inputs: as the model will be called: a tensor, a tuple of positional inputs or a dict of keyword inputs, on the
        model's device.
    at_least: how many times as fast a layer has to be, 1 or more.

    Raises UsageError for an `at_least` below 1, ModelError if the model can't be copied or run on the example inputs.

    Example:
        >>> fast = svdc.to_sparse(svdc.convert(model), x)
        >>> [(entry.name, entry.density, entry.used, entry.reason) for entry in fast.sparse_execution]
    """
    result: Any = chosen(model, example_inputs, at_least, in_turns)
    if not any(entry.used for entry in result.sparse_execution):
        warnings.warn(f"to_sparse: {summary(result.sparse_execution)}", stacklevel=2)
    return result


def chosen(model: nn.Module, example_inputs: Any, at_least: float, measure: Measure) -> nn.Module:
    """`to_sparse` with another clock, and without its warning."""
    if not isinstance(at_least, int | float) or not at_least >= 1:
        raise UsageError(f"at_least: {at_least!r} is not 1 or more; below 1, layers that are slower would be sparse")
    dense = _mean(model)
    entries = _looked_at(dense, example_inputs, at_least, measure)
    sparse = _assembled(dense, [entry.name for entry in entries if entry.used])
    saved = sum((entry.dense_ms or 0) - (entry.sparse_ms or 0) for entry in entries if entry.used)
    problem = _problem(dense, sparse, example_inputs, saved, measure) if any(entry.used for entry in entries) else ""
    if problem:
        entries = [replace(entry, used=False, reason=problem) if entry.used else entry for entry in entries]
    result: Any = dense if problem else sparse
    object.__setattr__(result, "sparse_execution", entries)
    return result


def _mean(model: nn.Module) -> nn.Module:
    model = unwrapped(model)
    try:
        dense = dense_copy(model)
    except Exception as error:  # whatever the user's classes raise
        raise ModelError(f"{type(model).__name__} can't be copied, and to_sparse returns a copy ({error})") from error
    return dense.eval().requires_grad_(False)


def _looked_at(dense: nn.Module, example_inputs: Any, at_least: float, measure: Measure) -> list[SparseEntry]:
    """An entry for each Linear layer, from one pass in which each is measured on the input of its first call."""
    layers = linear_layers(dense)
    densities = {name: density(layer) for name, layer in layers.items()}
    reasons = why_not(dense, example_inputs, densities)
    rest = {name: reasons.get(name) or "the model didn't call it on the example inputs" for name in layers}
    found = {name: SparseEntry(name, densities[name], 0, None, None, False, reason) for name, reason in rest.items()}
    handles = []
    for name, layer in layers.items():
        watched = _Watched(found, name, name not in reasons, at_least, measure)
        handles.append(layer.register_forward_hook(watched, with_kwargs=True, prepend=True))
    try:
        with as_it_was(dense, train=False), torch.no_grad():
            call(dense, example_inputs)
    finally:
        for handle in handles:
            handle.remove()
    return list(found.values())


class _Watched:
    """A hook that measures its layer at the first call."""

    def __init__(self, found: dict[str, SparseEntry], name: str, eligible: bool, at_least: float, measure: Measure) -> None:
        self.found, self.name, self.eligible, self.at_least, self.measure = found, name, eligible, at_least, measure
        self.met = False

    def __call__(self, layer: Any, args: Any, kwargs: Any, output: Any) -> None:
        if self.met:
            return
        self.met = True
        x = args[0] if args else kwargs["input"]
        entry = replace(self.found[self.name], rows=x.numel() // max(layer.in_features, 1))
        self.found[self.name] = _measured(entry, layer, x, output, self.at_least, self.measure) if self.eligible else entry


def _measured(entry: SparseEntry, layer: Any, x: Tensor, output: Tensor, at_least: float, measure: Measure) -> SparseEntry:
    work = entry.rows * layer.weight.numel()
    if work < LEAST_WORK:
        return replace(entry, reason=f"not timed: too small, {work:,} multiply-accumulates in all")
    try:
        sparse = _twin(layer)
        off = _off([sparse(x)], [output], LAYER_TOLERANCE)
    except RuntimeError as error:
        where = f"{str(x.dtype).removeprefix('torch.')} on {x.device.type}"
        return replace(entry, reason=f"torch has no sparse product for it ({where}): {cause(error)}")
    if off:
        return replace(entry, reason=f"its sparse product is {off} off")
    # forward, not the layer itself: its hooks would be called
    seconds = measure(lambda: layer.forward(x), lambda: sparse.forward(x), LAYER_SECONDS, x.device)
    ratio = seconds[0] / seconds[1]
    used = ratio >= at_least
    reason = "" if used else f"{ratio:.2f} times as fast in sparse form, and at least {at_least:g} is asked for"
    return replace(entry, dense_ms=1e3 * seconds[0], sparse_ms=1e3 * seconds[1], used=used, reason=reason)


def _twin(layer: nn.Linear) -> SparseLinear:
    """A sparse layer of a dense one's weights, which stays as it is."""
    twin = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta").eval()
    twin.weight, twin.bias = layer.weight, layer.bias
    return SparseLinear.from_dense(twin)


def _assembled(dense: nn.Module, names: list[str]) -> nn.Module:
    """A copy that shares the dense model's parameters, with the named layers sparse."""
    if not names:
        return dense
    memo: dict[int, Any] = {id(parameter): parameter for parameter in dense.parameters()}
    sparse = copy.deepcopy(dense, memo)
    for name in names:
        SparseLinear.from_dense(linear_layers(sparse)[name])
    leave_fused_paths(sparse)  # they would give sparse weights to kernels of dense ones
    return sparse


def _problem(dense: nn.Module, sparse: nn.Module, example_inputs: Any, saved: float, measure: Measure) -> str:
    """Why the whole model stays dense although single layers are faster, by `saved` milliseconds; "" if it doesn't."""

    def run(model: nn.Module) -> Callable[[], Any]:
        return lambda: call(model, example_inputs)

    with torch.no_grad():
        try:
            with as_it_was(dense, train=False):
                expected = _tensors(call(dense, example_inputs))
            with as_it_was(sparse, train=False):
                found = _tensors(call(sparse, example_inputs))
        except ModelError:
            raise
        except Exception as error:  # something reads the weight in a way that only dense ones know
            return f"faster by itself, but the model fails with sparse layers ({cause(error)})"
        off = _off(found, expected, MODEL_TOLERANCE)
        if off:
            return f"faster by itself, but the model's outputs are {off} off with sparse layers"
        with as_it_was(dense, train=False), as_it_was(sparse, train=False):
            slow, fast = measure(run(dense), run(sparse), MODEL_SECONDS, expected[0].device)
    if slow < LEAST_GAIN * fast:
        return f"faster by itself, but the whole model is not: {1e3 * fast:.3g} ms sparse, {1e3 * slow:.3g} ms dense"
    if saved < (LEAST_GAIN - 1) * 1e3 * slow:  # then chance made it faster
        return f"faster by itself, but {saved:.2g} ms saved are too little of the whole model's {1e3 * slow:.3g} ms to tell"
    return ""


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)] or [main_output(output)]


def _off(found: list[Tensor], expected: list[Tensor], tolerance: float) -> str:
    """By how much outputs differ, as a share of their spread; "" if they agree."""
    if [t.shape for t in found] != [t.shape for t in expected]:
        return "a shape"
    for a, b in zip(found, expected, strict=True):
        if b.is_floating_point() and b.numel():
            spread = float(b.max() - b.min())
            gap = float((a - b).abs().max())
            if not gap <= tolerance * spread + ROUNDING * float(b.abs().max()):
                return f"{gap / spread:.2g} of the outputs' spread" if spread else f"{gap:.2g}"
    return ""
