"""How many bits each layer's weights need, judging by their posterior variances."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from svdcompress.errors import UsageError
from svdcompress.export._rounding import codes, steps
from svdcompress.layers import VariationalLayer, variational_layers

FEWEST, MOST = 2, 16
"""The fewest and the most bits of a weight."""

SHARE = 0.5
"""Default limit on the rounding error, in standard deviations of the posterior: a quarter of its variance."""


@dataclass(frozen=True)
class LayerBits:
    """The bits of one layer's weights.

    weights: number of relevant weights. bits: of each weight. added: the rounding error at these bits, root mean square, in
    standard deviations of the posterior.
    """

    name: str
    weights: int
    bits: int
    added: float

    def to_dict(self) -> dict[str, Any]:
        """As a JSON-able dict."""
        return asdict(self)


def suggested_bits(model: nn.Module, share: float = SHARE) -> list[LayerBits]:
    """The fewest bits for each layer that keep its rounding error within a share of its posterior standard deviation.

    Weights are rounded to 2**bits - 1 steps of one size for each output channel, symmetric about 0 and up to its largest
    weight. A step of size d has an error of variance d**2 / 12. Divided by the posterior variance sigma2 and summed over the
    relevant weights, it is twice what rounding adds to the KL divergence (the mean moves, the variance does not):
    mean(d**2 / (12 sigma2)) must be at most share**2. A layer for which no number of bits is enough gets 16.

    Raises UsageError for a model without variational layers.

    Example: `[row.bits for row in suggested_bits(small)]`
    """
    return [_suggested(name, layer, share) for name, layer in _layers(model)]


def allocated_bits(model: nn.Module, average: float) -> dict[str, int]:
    """The bits for each layer that cost the least under the posterior, at `average` bits per relevant weight overall.

    Each further bit goes where it lowers the sum of d**2 / sigma2 (see `suggested_bits`) the most for its bytes.
    """
    costs = {name: {bits: _cost(layer, bits) for bits in range(FEWEST, MOST + 1)} for name, layer in _layers(model)}
    return allocate(costs, {name: int(layer.relevant().sum()) for name, layer in _layers(model)}, average)


def allocate(costs: Mapping[str, Mapping[int, float]], sizes: Mapping[str, int], average: float) -> dict[str, int]:
    """Bits for each layer, at most `average` per weight overall. costs: {layer: {bits: mean cost}}; sizes: numbers of
    weights."""
    bits = {name: FEWEST for name in costs}
    left = average * sum(sizes.values()) - sum(FEWEST * sizes[name] for name in costs)
    while True:
        can = [name for name in bits if bits[name] < MOST and 0 < sizes[name] <= left + 1e-9]
        if not can:
            return bits
        best = max(can, key=lambda name: costs[name][bits[name]] - costs[name][bits[name] + 1])
        bits[best] += 1
        left -= sizes[best]


def importance(model: nn.Module) -> dict[str, np.ndarray]:
    """How much an error in each weight counts, as {"LAYER.weight": 1 / sigma2 of its posterior, in the weight's shape}.

    For `pack` and `write_few_bits`, whose steps are then finer where the data determine the weights better. {} for a model
    without variational layers.

    Example: `pack("model.onnx", "model.svdc", "int4", importance=importance(small))`
    """
    layers = variational_layers(model)
    return {f"{name}.weight": _precision(layer).expand_as(layer.weight).numpy() for name, layer in layers}


@torch.no_grad()
def round_weights(model: nn.Module, bits: Mapping[str, int] | int, *, by: str = "posterior") -> nn.Module:
    """Round the weights of variational layers in place, as a file with that many bits would hold them; returns the model.

    bits: for all layers, or for each by its name; layers that are not named stay as they are. by: what the size of a
        channel's steps minimizes below 8 bits: "posterior" (squared errors over the posterior variance), "errors" (squared
        errors, all weighted alike), or "largest" (nothing: the last step is at the largest weight).
    """
    if by not in WAYS:
        raise UsageError(f"by: {by!r} is unknown; one of {', '.join(WAYS)}")
    for name, layer in _layers(model):
        count = bits if isinstance(bits, int) else bits.get(name)
        if count is not None:
            kept = layer.weight * layer.relevant()
            weights = _precision(layer).expand_as(kept) if by == "posterior" else None
            layer.weight.copy_(rounded(kept, count, _axis(layer), weights, search=by != "largest"))
    return model


WAYS = ("posterior", "errors", "largest")


def rounded(weight: Tensor, bits: int, axis: int = 0, importance: Tensor | None = None, *, search: bool = True) -> Tensor:
    """Round a weight to 2**bits - 1 symmetric steps for each channel along an axis; see `_rounding.steps`."""
    array = weight.detach().cpu().numpy()
    if search:
        step = steps(array, bits, axis, None if importance is None else importance.cpu().numpy())
    else:
        step = _steps(weight.detach().cpu().double(), bits, axis).numpy()
    return torch.from_numpy(codes(array, step, bits) * step).to(weight)


def _precision(layer: VariationalLayer) -> Tensor:
    """1 / sigma2 of each weight, float64 on the CPU, clamped so that it is finite."""
    return (-layer.log_sigma2.detach().cpu().double()).clamp(-50.0, 50.0).exp()


def _steps(weight: Tensor, bits: int, axis: int) -> Tensor:
    """The step size of each channel along an axis, in a shape that broadcasts."""
    others = [dim for dim in range(weight.dim()) if dim != axis]
    largest = weight.abs().amax(others, keepdim=True) if others else weight.abs()
    return largest / (2 ** (bits - 1) - 1)


def _cost(layer: VariationalLayer, bits: int) -> float:
    """Mean of d**2 / (12 sigma2) over the relevant weights; 0 if there are none."""
    kept = layer.relevant()
    if not bool(kept.any()):
        return 0.0
    weight = (layer.weight * kept).detach().double()
    step = _steps(weight, bits, _axis(layer)).expand_as(weight)
    return float((step[kept] ** 2 / (12 * layer.log_sigma2.detach().double().exp()[kept])).mean())


def _suggested(name: str, layer: VariationalLayer, share: float) -> LayerBits:
    costs = {bits: _cost(layer, bits) for bits in range(FEWEST, MOST + 1)}
    bits = next((bits for bits, cost in costs.items() if cost <= share**2), MOST)
    return LayerBits(name, int(layer.relevant().sum()), bits, math.sqrt(costs[bits]))


def added_error(model: nn.Module, bits: Mapping[str, int]) -> dict[str, float]:
    """`LayerBits.added` of each layer named in `bits`, at those bits."""
    return {name: math.sqrt(_cost(layer, bits[name])) for name, layer in _layers(model) if name in bits}


def _layers(model: nn.Module) -> Sequence[tuple[str, VariationalLayer]]:
    layers = list(variational_layers(model))
    if not layers:
        raise UsageError("the model has no variational layers: its weights have no posterior to choose bits by")
    return layers


def _axis(layer: VariationalLayer) -> int:
    return 1 if getattr(layer, "transposed", False) else 0
