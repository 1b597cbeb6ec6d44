"""Describes units for people to read: groups with their layers, numbers and reasons, and layers with their shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from svdcompress.layers import VariationalLayer, kept_channels, variance_parameters
from svdcompress.prune._choice import Analysis, Choice
from svdcompress.prune._record import Selection, Surgery
from svdcompress.prune._report import LayerShape, PruneGroup, PruneReport
from svdcompress.prune._unit_costs import unit_costs


@dataclass
class _Group:
    """Units with slots in the same axes, each a pair (parameter, axis); parameter -1 is the model's input."""

    axes: list[tuple[int, int]]
    roots: np.ndarray


def _by_axes(analysis: Analysis) -> list[_Group]:
    """The units that a weight writes, grouped by the axes in which they have slots, in the model's order."""
    axes, members = [], []
    for number, parameter in enumerate(analysis.trace.units.parameters):
        for axis, (first, size) in enumerate(zip(parameter.axes, parameter.sizes, strict=True)):
            roots = np.unique(analysis.root[first : first + size])
            axes.append((number, axis))
            members.append(roots[analysis.produced[roots]])
    for labels in analysis.trace.inputs.values():
        axes.append((-1, 0))
        members.append(np.unique(analysis.root[labels.numpy()]))
    if not axes:
        return []
    roots = np.concatenate(members)
    which = np.repeat(np.arange(len(axes)), [len(part) for part in members])
    code = np.random.default_rng(0).integers(1, 2**62, len(axes))  # units of a group have the same sum of codes
    signature = np.zeros(analysis.count, np.int64)
    np.add.at(signature, roots, code[which])
    unique = np.unique(roots)
    _, first, inverse = np.unique(signature[unique], return_index=True, return_inverse=True)
    groups = []
    for group, one in enumerate(unique[first].tolist()):
        own = which[roots == one]
        groups.append(_Group([axes[i] for i in own], unique[inverse == group]))
    return sorted(groups, key=lambda group: group.axes)


def group_roots(analysis: Analysis) -> list[np.ndarray]:
    """The units that may be removed, by group."""
    groups = [group.roots[analysis.free[group.roots]] for group in _by_axes(analysis)]
    return [roots for roots in groups if len(roots)]


def tell_groups(
    analysis: Analysis, choice: Choice, failed: Mapping[int, str], unrounded: Choice | None = None
) -> list[PruneGroup]:
    """What happened to each group, in the model's order. unrounded: the choice without rounding (None: the same)."""
    written = _writers(analysis)
    parameters, macs = unit_costs(analysis)
    result = []
    for group in _by_axes(analysis):
        names = ["input" if n < 0 else analysis.trace.units.parameters[n].name for n, _ in group.axes]
        where = next((i for i, axis in enumerate(group.axes) if axis in written), 0)
        gone = choice.removed[group.roots]
        reasons = Counter(why for root in group.roots[~gone].tolist() if (why := _why(analysis, choice, failed, root)))
        reason = reasons.most_common(1)[0][0] if reasons else ""
        removed, kept = _channels(analysis, choice, group, where)
        result.append(
            PruneGroup(
                name=_layer(names[where]),
                removed=removed,
                kept=kept,
                reason=reason,
                layers=tuple(dict.fromkeys(names)),
                units=len(group.roots),
                unit_parameters=round(float(parameters[group.roots].mean())),
                unit_macs=round(float(macs[group.roots].mean())),
                kept_unrounded=kept if unrounded is None else _channels(analysis, unrounded, group, where)[1],
            )
        )
    return result


def _channels(analysis: Analysis, choice: Choice, group: _Group, where: int) -> tuple[int, int]:
    """How many indices of a group are removed and kept along its axis number `where`."""
    number, axis = group.axes[where]
    if number < 0:
        slots = np.concatenate([labels.numpy().reshape(-1) for labels in analysis.trace.inputs.values()])
    else:
        parameter = analysis.trace.units.parameters[number]
        slots = np.arange(parameter.axes[axis], parameter.axes[axis] + parameter.sizes[axis])
    own = slots[np.isin(analysis.root[slots], group.roots)]
    removed = int(choice.removed[own].sum())
    return removed, len(own) - removed


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


def tell_layers(report: PruneReport, model: nn.Module, small: nn.Module, masks: Mapping[str, Tensor], done: Surgery) -> None:
    """Fill in the report's shapes and parameter counts, and the surgery that a checkpoint records.

    done: what this pruning changed.
    """
    before, after = dict(model.named_modules()), dict(small.named_modules())
    report.layers = []
    now = Surgery()
    for name, module in before.items():
        other = after[name]
        if changed := done.attributes.get(name):
            now.attributes[name] = {key: changed[key] for key in vars(other) if key in changed}  # in the model's order
        if (hook := kept_channels(other)) is not None:
            now.kept[name] = Selection(hook.dim, hook.kept)
        own = {**other._parameters, **other._buffers}
        for key, tensor in own.items():
            if tensor is None or key in ("log_sigma2", "mask", "bias_sigma2"):
                continue
            old = {**module._parameters, **module._buffers}.get(key)
            if old is None or old.shape != tensor.shape:
                now.shapes[f"{name}.{key}" if name else key] = list(tensor.shape)
            if key == "weight" and isinstance(other, VariationalLayer) and other.posterior != module.posterior:
                report.notes.append(
                    f"{name}: its posterior is {other.posterior} now, with a variance for each weight: {module.posterior} "
                    "cannot represent the variances of the weights that are left"
                )
            if key == "weight":
                shape = None if old is None else tuple(old.shape)
                mask = other.mask if isinstance(other, VariationalLayer) else None
                sparsity = 0.0 if mask is None else 1 - float(mask.float().mean())
                report.layers.append(LayerShape(name, shape or (), tuple(tensor.shape), sparsity))
    if report.inputs_kept is not None and report.inputs_dim is not None:
        now.inputs = Selection(report.inputs_dim, report.inputs_kept)
    earlier = Surgery.from_dict(getattr(model, "surgery", None) or {})
    surgery = earlier.then(now).to_dict()
    report.surgery = surgery
    if not earlier.shapes:  # otherwise they would not be indices of the dense model
        report.outputs_kept = done.outputs
    object.__setattr__(small, "surgery", surgery)
    report.parameters_before, report.parameters_after = count_means(model), count_means(small)
    if masks and not any(mask.any() for mask in masks.values()):
        report.notes.append("every weight is masked: one unit is kept in each layer, and the model's output is a constant")


def count_means(model: nn.Module) -> int:
    """The number of elements in a model's parameters, without variances."""
    variances = {id(own) for own in variance_parameters(model)}
    return sum(p.numel() for p in model.parameters() if id(p) not in variances)
