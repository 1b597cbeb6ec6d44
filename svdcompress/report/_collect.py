"""Collects from models what the plots need."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.layers import Threshold, VariationalLayer, variational_layers

LOW, HIGH, BINS = -12.0, 12.0, 48


@torch.no_grad()
def log_alpha_histograms(model: nn.Module, threshold: Threshold | None = None) -> dict[str, dict[str, Any]]:
    """`log_alpha` of the results: a histogram for each variational layer, all with the same bins.

    It counts a layer's weights if each has a prior variance of its own, else its prior groups; values beyond the ends count in
    the outermost bins. threshold: as in `relevance` (None: each layer's own).
    """
    edges = torch.linspace(LOW, HIGH, BINS + 1).tolist()
    histograms = {}
    for name, layer in variational_layers(model):
        share = "weight" if "weight" in layer.share else next(iter(layer.share))
        limit = layer.limits(threshold)
        values = layer.log_alpha(share).detach().float().clamp(LOW, HIGH).flatten().cpu()
        counts = torch.histc(values, BINS, LOW, HIGH).long().tolist()
        histograms[name] = {"edges": edges, "counts": counts, "threshold": limit[share], "share": share}
    return histograms


@torch.no_grad()
def first_filters(dense: nn.Module, sparse: nn.Module, limit: int = 32) -> dict[str, dict[str, Any]]:
    """`filters` of the results: the first converted layer before and after, or {} if its weights are not pictures.

    dense: the model before. sparse: the same model after, masked but not yet pruned, so that its layers have the same names
    and shapes. If there are more than `limit` filters, those with the largest weights after are taken.
    """
    after = dict(variational_layers(sparse))
    for name, module in dense.named_modules():
        weight = getattr(module, "weight", None)
        if name in after and isinstance(weight, Tensor):
            if after[name].weight.shape != weight.shape or not _is_picture(after[name]):
                break  # later layers read features, even if their number is a square
            left = (after[name].weight * after[name].relevant()).float().cpu()
            order = left.flatten(1).norm(dim=1).argsort(descending=True, stable=True)[:limit]
            return {name: {"before": _rounded(weight.float().cpu()[order]), "after": _rounded(left[order])}}
    return {}


def _is_picture(layer: VariationalLayer) -> bool:
    """Whether this is a 2-D convolution (3 x 3 or larger) of at most three channels, or a Linear on square pictures."""
    shape = layer.weight.shape
    if len(shape) == 4:
        return not layer.transposed and shape[1] <= 3 and min(shape[2:]) >= 3
    return len(shape) == 2 and shape[1] >= 16 and math.isqrt(shape[1]) ** 2 == shape[1]


def _rounded(weights: Tensor) -> list[Any]:
    """Nested lists, rounded to three digits of the largest weight: enough for a picture, and a third of the text."""
    step = 10.0 ** (math.floor(math.log10(max(float(weights.abs().max()), 1e-12))) - 2)
    digits = max(0, -round(math.log10(step)))
    return (weights.double() / step).round().mul(step).numpy().round(digits).tolist()
