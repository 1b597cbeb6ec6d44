"""Which Linear layers are eligible for sparse execution, and why the others are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from svdcompress.convert import read_past

DENSEST = 0.5
"""Share of non-zero weights above which a layer is not timed: break-even is near 10% with one row, 25% with 64
(benchmarks/results/sparse_execution.md)."""

DENSE = f"more than {100 * DENSEST:g}% of its weights are not 0, far above the share at which sparse products pay off"


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Every Linear layer, by its first name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def density(layer: nn.Linear) -> float | None:
    """Share of non-zero weights; None if the layer stores no weight, or one that is empty or not initialized."""
    weight = layer._parameters.get("weight")
    if not isinstance(weight, Tensor) or isinstance(weight, UninitializedParameter) or weight.numel() == 0:
        return None
    return int(torch.count_nonzero(weight.detach())) / weight.numel()


def why_not(model: nn.Module, example_inputs: Any, densities: Mapping[str, float | None]) -> dict[str, str]:
    """{name: reason} for the layers that stay dense whatever a measurement would say.

    densities: of the model's Linear layers. Runs the model once; raises ModelError if it fails on the example inputs.
    """
    layers, names, owners = linear_layers(model), _names(model), _owners(model)
    reasons = {name: _nature(name, layer, names, owners, densities[name]) for name, layer in layers.items()}
    rest = [(name, layer) for name, layer in layers.items() if not reasons[name]]
    past = read_past(model, example_inputs, rest).past
    for name, by in past.items():
        reasons[name] = (
            f"its weight is read directly by {by!r}, bypassing the layer"
            if by
            else "its weight is read directly by the model itself, bypassing the layer"
        )
    return {name: reason for name, reason in reasons.items() if reason}


def _nature(
    name: str, layer: nn.Linear, names: Mapping[nn.Module, list[str]], owners: Mapping[int, list[str]], share: float | None
) -> str:
    weight = layer._parameters.get("weight")
    if type(layer) is not nn.Linear:
        return f"a subclass of Linear: {type(layer).__name__}"
    if weight is None:
        return "its weight is computed in each forward pass: svdcompress.fold_derived_weights turns it into a plain layer"
    if "forward" in vars(layer):
        return "its forward method was replaced on the instance"
    if type(weight) is not nn.Parameter or weight.layout != torch.strided:
        return f"its weight is not a plain tensor: {type(weight).__name__}, {weight.layout}"
    if len(names[layer]) > 1:
        return f"shared: it is also {names[layer][1]!r}"
    if len(owners[id(weight)]) > 1:
        return f"its weight is shared with {next(other for other in owners[id(weight)] if other != name)!r}"
    if share is None or share > DENSEST:
        return f"not timed: {DENSE}" if share else "it has no weights"
    return ""


def _names(model: nn.Module) -> dict[nn.Module, list[str]]:
    found: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(module, []).append(name)
    return found


def _owners(model: nn.Module) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            found.setdefault(id(parameter), []).append(name)
    return found
