"""`to_sparse`: the mean of a pruned model, with sparse products in the Linear layers where they prove faster."""

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
from svdcompress.hooks import hooked
from svdcompress.prune import dense_copy

LAYER_SECONDS, MODEL_SECONDS = 0.05, 0.25
"""Seconds spent on timing a layer, and the whole model."""

LEAST_GAIN = 1.02
"""Smallest speedup of the whole model for which its layers become sparse; the time that these save must amount to as much,
too. Less is within the noise of such a measurement, and sparse layers might as well be slower."""

LEAST_WORK = 30_000
"""Multiply-accumulates (rows of the input times numbers in the weight) below which a layer is not timed: a dense product of
that size takes a few microseconds, and just calling a sparse one takes as long."""

LAYER_TOLERANCE, MODEL_TOLERANCE = 1e-4, 1e-3
"""How far sparse outputs may be from dense ones, as a share of their spread, in a layer and in the whole model: the sums are
taken in another order. A wrong or missing weight makes a far larger difference."""

ROUNDING = 1e-6
"""Further tolerance, as a share of the largest output, for outputs that are all alike: float32 rounds that much away."""


def to_sparse(model: nn.Module, example_inputs: Any, *, at_least: float = 1.1) -> nn.Module:
    """A copy in `eval()` that computes the mean, with sparse products in Linear layers where they are faster on this machine.

    Irrelevant weights are 0, as after `to_dense`; a plain model with zeros in its weights is accepted, too. A layer becomes
    sparse if its sparse product is measured to be at least `at_least` times as fast as the dense one, with torch's current
    number of threads, on the input that it gets in one pass with `example_inputs`. Then the whole model is timed: unless it
    is faster by 2%, all layers stay dense. Warns if no layer becomes sparse. Only Linear layers are considered; convolutions
    stay dense.

    `.sparse_execution` of the result is a list with a `SparseEntry` for each Linear layer: densities, times, reasons. The
    given model is not changed. Other inputs work too, but were not measured: for another batch size, dtype or device, call
    this function again. The result is for inference: nothing in it takes gradients, and sparse layers raise UsageError in
    `train()`. Like all sparse products in torch, they don't support autocast, and support half precision only on some
    devices.

    example_inputs: inputs as the model will get them: a tensor, a tuple of positional inputs or a dict of keyword inputs, on
        the model's device.
    at_least: smallest speedup for which a layer becomes sparse, 1 or more.

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
    """`to_sparse` with a given timing function, and without its warning."""
    if not isinstance(at_least, int | float) or not at_least >= 1:
        raise UsageError(f"at_least: {at_least!r} is not 1 or more; below 1, slower layers would be made sparse")
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
        raise ModelError(f"{type(model).__name__} cannot be copied, but to_sparse returns a copy ({error})") from error
    return dense.eval().requires_grad_(False)


def _looked_at(dense: nn.Module, example_inputs: Any, at_least: float, measure: Measure) -> list[SparseEntry]:
    """An entry for each Linear layer, from one pass in which each eligible layer is timed on the input of its first call."""
    layers = linear_layers(dense)
    densities = {name: density(layer) for name, layer in layers.items()}
    reasons = why_not(dense, example_inputs, densities)
    rest = {name: reasons.get(name) or "the model didn't call it on the example inputs" for name in layers}
    found = {name: SparseEntry(name, densities[name], 0, None, None, False, reason) for name, reason in rest.items()}
    watched = {name: _Watched(found, name, name not in reasons, at_least, measure) for name in layers}
    hooks = (layer.register_forward_hook(watched[name], with_kwargs=True, prepend=True) for name, layer in layers.items())
    with as_it_was(dense, train=False), torch.no_grad(), hooked(hooks):
        call(dense, example_inputs)
    return list(found.values())


class _Watched:
    """A forward hook that times its layer on the first call."""

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
        return replace(entry, reason=f"not timed: too small, {work:,} multiply-accumulates in total")
    try:
        sparse = _twin(layer)
        off = _off([sparse(x)], [output], LAYER_TOLERANCE)
    except RuntimeError as error:
        where = f"{str(x.dtype).removeprefix('torch.')} on {x.device.type}"
        return replace(entry, reason=f"torch has no sparse product for it ({where}): {cause(error)}")
    if off:
        return replace(entry, reason=f"its sparse product differs {off}")
    # forward, not the layer itself, whose hooks would be called
    seconds = measure(lambda: layer.forward(x), lambda: sparse.forward(x), LAYER_SECONDS, x.device)
    ratio = seconds[0] / seconds[1]
    used = ratio >= at_least
    reason = "" if used else f"{ratio:.2f} times as fast in sparse form, but at least {at_least:g} is required"
    return replace(entry, dense_ms=1e3 * seconds[0], sparse_ms=1e3 * seconds[1], used=used, reason=reason)


def _twin(layer: nn.Linear) -> SparseLinear:
    """A sparse layer with the weights of a dense one, which is not changed."""
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
    leave_fused_paths(sparse)  # they would pass sparse weights to kernels for dense ones
    return sparse


def _problem(dense: nn.Module, sparse: nn.Module, example_inputs: Any, saved: float, measure: Measure) -> str:
    """Why the whole model stays dense although single layers save `saved` milliseconds in all; "" if it doesn't."""

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
        except Exception as error:  # something uses the weight in a way that only dense tensors support
            return f"faster by itself, but the model fails with sparse layers ({cause(error)})"
        off = _off(found, expected, MODEL_TOLERANCE)
        if off:
            return f"faster by itself, but the model's outputs differ {off} with sparse layers"
        with as_it_was(dense, train=False), as_it_was(sparse, train=False):
            slow, fast = measure(run(dense), run(sparse), MODEL_SECONDS, expected[0].device)
    if slow < LEAST_GAIN * fast:
        return f"faster by itself, but the whole model is not: {1e3 * fast:.3g} ms sparse, {1e3 * slow:.3g} ms dense"
    if saved < (LEAST_GAIN - 1) * 1e3 * slow:  # then it was faster by chance
        return (
            f"faster by itself, but {saved:.2g} ms saved are too small a part of the whole model's {1e3 * slow:.3g} ms to tell"
        )
    return ""


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)] or [main_output(output)]


def _off(found: list[Tensor], expected: list[Tensor], tolerance: float) -> str:
    """How far outputs are off, as text (a share of their spread); "" if they agree within the tolerance."""
    if [t.shape for t in found] != [t.shape for t in expected]:
        return "in shape"
    for a, b in zip(found, expected, strict=True):
        if b.is_floating_point() and b.numel():
            spread = float(b.max() - b.min())
            gap = float((a - b).abs().max())
            if not gap <= tolerance * spread + ROUNDING * float(b.abs().max()):
                return f"by {gap / spread:.2g} of the outputs' spread" if spread else f"by {gap:.2g}"
    return ""
