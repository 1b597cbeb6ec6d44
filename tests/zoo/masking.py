"""Masks with dead rows, dead columns and scattered zeros; models moved away from initial zeros and ones."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.batch import call, map_tensors
from svdcompress.layers import variational_layers
from svdcompress.prune._tensors import tensors_in
from svdcompress.relevance import hold


def shake(model: nn.Module) -> nn.Module:
    """Make biases, norm scales and statistics neither 0 nor 1, so that constants of dead units matter."""
    for module in model.modules():
        bias = getattr(module, "bias", None)
        if isinstance(bias, nn.Parameter):
            nn.init.normal_(bias, std=0.5)
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.running_mean, std=0.3)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            if module.weight is not None:
                nn.init.uniform_(module.weight, 0.5, 1.5)
    return model


def random_masks(model: nn.Module, strewn: float = 0.2, rows: float = 0.3, columns: float = 0.2) -> dict[str, Tensor]:
    """Masks of a converted model, given the fractions of single weights, whole outputs and whole inputs to drop."""
    masks = {}
    for name, layer in variational_layers(model):
        shape = layer.canonical(layer.weight).shape
        groups, outs, ins, _ = shape
        keep = torch.rand(shape) >= strewn
        keep &= torch.rand(groups, outs, 1, 1) >= rows
        keep &= torch.rand(groups, 1, ins, 1) >= columns
        mask = torch.ones_like(layer.weight, dtype=torch.bool)
        layer.canonical(mask).copy_(keep)
        masks[name] = mask
    return masks


def masked(model: nn.Module, masks: dict[str, Tensor]) -> nn.Module:
    """The oracle: a copy of the unpruned model that holds the masks."""
    return hold(copy.deepcopy(model), masks).eval()


def outputs(model: nn.Module, inputs: Any) -> list[Tensor]:
    """All tensors that a model returns, without gradients."""
    with torch.no_grad():
        return [tensor for tensor in tensors_in(call(model, inputs)) if tensor.is_floating_point()]


def other_inputs(inputs: Any) -> Any:
    """Inputs of another batch size (one more example) with new values."""

    def draw(tensor: Tensor) -> Tensor:
        grown = torch.cat([tensor, tensor[:1]])
        return (
            torch.randn_like(grown)
            if grown.is_floating_point()
            else grown.flatten()[torch.randperm(grown.numel())].view_as(grown)
        )

    return map_tensors(inputs, draw)


def gap(found: list[Tensor], expected: list[Tensor]) -> float:
    """Largest absolute difference, relative to the largest expected value (at least 1)."""
    assert [t.shape for t in found] == [t.shape for t in expected]
    scale = max(1.0, *(float(t.abs().max()) for t in expected))
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) / scale
