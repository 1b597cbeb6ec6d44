"""From units to what a person reads: groups with their layers, numbers and reasons; layers with their shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from svdcompress.layers import VariationalLayer
from svdcompress.prune._choice import Analysis, Choice
from svdcompress.prune._report import LayerShape, PruneGroup, PruneReport


def _axes_of(analysis: Analysis) -> dict[int, tuple[tuple[int, int], ...]]:
    """The axes, as (parameter, axis), in which each written unit has slots; by root."""
    found: dict[int, list[tuple[int, int]]] = {}
    for number, parameter in enumerate(analysis.trace.units.parameters):
        for axis, (first, size) in enumerate(zip(parameter.axes, parameter.sizes, strict=True)):
            roots = np.unique(analysis.root[first : first + size])
            for root in roots[analysis.produced[roots]].tolist():
                found.setdefault(root, []).append((number, axis))
    for labels in analysis.trace.inputs.values():
        for root in np.unique(analysis.root[labels.numpy()]).tolist():
            found.setdefault(root, []).append((-1, 0))
    return {root: tuple(axes) for root, axes in found.items()}


def _by_axes(analysis: Analysis) -> dict[tuple[tuple[int, int], ...], list[int]]:
    groups: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for root, axes in _axes_of(analysis).items():
        groups.setdefault(axes, []).append(root)
    return groups


def group_roots(analysis: Analysis) -> list[np.ndarray]:
    """Units that may go, by group."""
    groups = [np.array([r for r in roots if analysis.free[r]], dtype=np.int64) for roots in _by_axes(analysis).values()]
    return [roots for roots in groups if len(roots)]


def tell_groups(analysis: Analysis, choice: Choice, failed: Mapping[int, str]) -> list[PruneGroup]:
    """What happened to each group, in the model's order."""
    written = _writers(analysis)
    result = []
    for axes, roots in _by_axes(analysis).items():
        names = ["input" if n < 0 else analysis.trace.units.parameters[n].name for n, _ in axes]
        first = next((name for name, axis in zip(names, axes, strict=True) if axis in written), names[0])
        removed = [root for root in roots if choice.removed[root]]
        kept = [root for root in roots if not choice.removed[root]]
        reasons = Counter(why for root in kept if (why := _why(analysis, choice, failed, root)))
        reason = reasons.most_common(1)[0][0] if reasons else ""
        result.append(PruneGroup(_layer(first), len(removed), len(kept), reason, tuple(dict.fromkeys(names))))
    return result


def _writers(analysis: Analysis) -> set[tuple[int, int]]:
    numbers = {id(parameter): number for number, parameter in enumerate(analysis.trace.units.parameters)}
    found = set()
    for use in analysis.trace.uses:
        slot = int(use.outs[0])
        for axis, (first, size) in enumerate(zip(use.parameter.axes, use.parameter.sizes, strict=True)):
            if first <= slot < first + size:
                found.add((numbers[id(use.parameter)], axis))
    return found


def _layer(name: str) -> str:
    return name.rpartition(".")[0] if name.rpartition(".")[2] == "weight" else name


def _why(analysis: Analysis, choice: Choice, failed: Mapping[int, str], root: int) -> str:
    return analysis.why.get(root) or failed.get(root) or choice.reasons.get(root, "")


def tell_layers(report: PruneReport, model: nn.Module, small: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Fill in shapes, numbers of parameters, and the surgery that a checkpoint records."""
    before, after = dict(model.named_modules()), dict(small.named_modules())
    report.layers = []
    earlier = getattr(model, "surgery", None) or {}
    surgery: dict[str, Any] = {key: {**earlier.get(key, {})} for key in ("attributes", "shapes")}
    for name, module in before.items():
        other = after[name]
        changed = _integers(module, other)
        if changed:
            surgery["attributes"][name] = {**surgery["attributes"].get(name, {}), **changed}
        own = {**other._parameters, **other._buffers}
        for key, tensor in own.items():
            if tensor is None or key in ("log_sigma2", "mask", "bias_sigma2"):
                continue
            old = {**module._parameters, **module._buffers}.get(key)
            if old is None or old.shape != tensor.shape:
                surgery["shapes"][f"{name}.{key}" if name else key] = list(tensor.shape)
            if key == "weight":
                shape = None if old is None else tuple(old.shape)
                sparsity = 1 - float(other.mask.float().mean()) if isinstance(other, VariationalLayer) else 0.0
                report.layers.append(LayerShape(name, shape or (), tuple(tensor.shape), sparsity))
    if report.inputs_kept is not None:
        surgery["inputs"] = {"kept": report.inputs_kept, "dim": report.inputs_dim}
    small.surgery = report.surgery = surgery
    report.parameters_before, report.parameters_after = _count(model), _count(small)
    if masks and not any(mask.any() for mask in masks.values()):
        report.notes.append("every weight is masked: one unit stays in each layer, and the model's output is a constant")


def _integers(module: nn.Module, other: nn.Module) -> dict[str, int]:
    return {key: value for key, value in vars(other).items() if type(value) is int and vars(module).get(key) != value}


def _count(model: nn.Module) -> int:
    variances = {id(m.log_sigma2) for m in model.modules() if isinstance(m, VariationalLayer)}
    return sum(p.numel() for p in model.parameters() if id(p) not in variances)
