"""Estimates, before training, whether it is long enough to bring log alpha to the threshold."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.layers import Threshold, VariationalLayer, set_posterior, variational_layers
from svdcompress.recipe import Training
from svdcompress.train._optim import LrFactor, rate_of_log_sigma2

QUANTILES = (0.1, 0.5, 0.9)
"""The quantiles to report of the distances of weights and prior groups to their thresholds."""

DRIFT = 1 / 3
"""The part of the learning rate by which a mean approaches zero in a step, while the data pull it back and forth. Observed in
short fits of trained networks: 0.15 to 0.3 (ResNet-20), 0.8 and more (a small BERT)."""

ENOUGH = 0.5
"""Training is too short if less than this share of the weights can get to the threshold."""

FARTHEST = 1024
"""The longest training that is considered, as a multiple of this one."""

NEVER = 20.0
"""A threshold this high means that none of its prior groups are to be pruned: e^20 times as much noise as signal."""

POINTS = 10_000
"""The most steps at which a schedule is evaluated; if there are more, this many at equal distances."""

SAMPLE = 100_000
"""The most values of a layer from which quantiles are computed."""


@dataclass(frozen=True)
class Reach:
    """How far it is to the threshold, and how far training can go; distances in units of log alpha.

    distance: {share: quantiles (10, 50, 90%) of threshold - log alpha} over the weights, or the prior groups, of all layers.
    steps: of training. lr_log_sigma2: the learning rate of log sigma2. travel: the most by which log sigma2 can rise in these
        steps. means: the most that a mean can move (0 for SGD, where it is not known). past: the share of the weights that are
        beyond a threshold at the start. within: the share that can get there if log sigma2 rises by `travel` and means move
        towards zero by a third (`DRIFT`) of `means`. times: how many times longer training (or larger its learning rates) would
        have to be for half of the weights to get there; None: more than `FARTHEST`.
    frozen: the share of the weights that training cannot move, neither means nor variances (requires_grad=False).
    """

    distance: dict[str, list[float]]
    steps: int
    lr_log_sigma2: float
    travel: float
    means: float
    past: float
    within: float
    times: float | None
    frozen: float = 0.0

    @property
    def enough(self) -> bool:
        """Whether half of the weights can get to the threshold; True if nothing is to be pruned."""
        return self.within >= ENOUGH or not (self.distance or self.frozen)

    @property
    def mostly_frozen(self) -> bool:
        """Whether so many weights are frozen that half of them can't get to the threshold, however long the training."""
        return self.frozen > 1 - ENOUGH

    def __str__(self) -> str:
        """One sentence with all figures."""
        ways = "; ".join(
            f"{'weights' if share == 'weight' else f'groups by {share}'} {', '.join(f'{way:.1f}' for way in quantiles)}"
            for share, quantiles in self.distance.items()
        )
        means = (
            f"and a mean can move by {self.means:.2g}, at most"
            if self.means
            else "at most; what SGD does to means isn't counted"
        )
        if not self.distance:
            return f"{100 * self.frozen:.0f}% of the weights are frozen" if self.frozen else "no weight is to be pruned"
        frozen = f"; {100 * self.frozen:.0f}% are frozen" if self.frozen else ""
        return (
            f"log alpha starts below it by (10, 50, 90%) {ways}; in {self.steps:,} steps log sigma2 can rise by "
            f"{self.travel:.2g} (lr {self.lr_log_sigma2:.2g}) {means}. "
            f"About {100 * self.within:.0f}% of the weights are within reach, {100 * self.past:.0f}% past it already{frozen}"
        )

    def to_dict(self) -> dict[str, Any]:
        """All fields, JSON-able."""
        return asdict(self)


def steps_of(settings: Training, examples: int, world: int = 1) -> int:
    """The number of steps of a fit on this many examples with `world` processes."""
    batches = max(1, math.ceil(examples / (settings.batch_size * world)))
    return settings.epochs * math.ceil(batches / settings.accumulate)


def factors(settings: Training, steps: int, beta: Callable[[float], float]) -> tuple[float, float]:
    """How far log sigma2 and a mean can move in all steps together, as multiples of their learning rates.

    log sigma2 rises only while beta is above 0. With Adam, which always trains log sigma2, a parameter moves by at most the
    learning rate in a step, whatever its gradient. With SGD, means move in proportion to their gradients; as these are not
    known beforehand, the sum for means is 0.
    """
    factor, count = LrFactor(settings.schedule, settings.epochs), max(1, min(steps, POINTS))
    up = means = 0.0
    for index in range(count if steps else 0):
        where = settings.epochs * index / count
        rate = factor(where)
        up += rate * (beta(where) > 0)
        means += rate * (settings.optimizer != "sgd")
    return up * steps / count, means * steps / count


@torch.no_grad()
def distances(model: nn.Module, threshold: Threshold | None = None) -> dict[str, list[float]]:
    """Quantiles of threshold - log alpha, by share, over all variational layers, each counted by its number of weights.

    threshold: as `relevance` takes it. Shares whose threshold is never to be reached (`NEVER`) are left out, and frozen layers.
    """
    found: dict[str, list[tuple[Tensor, float]]] = {}
    for _, layer in variational_layers(model):
        if not any(_trained(layer)):
            continue
        limits = layer.limits(threshold)
        for share in layer.share:
            if limits[share] < NEVER:
                away = (limits[share] - layer.log_alpha(share)).flatten().float().cpu()
                found.setdefault(share, []).append((away[:: -(-len(away) // SAMPLE)], layer.weight.numel()))
    return {share: _quantiles(parts) for share, parts in found.items()}


def _quantiles(parts: list[tuple[Tensor, float]]) -> list[float]:
    """Quantiles of the values of several layers, where the weights of a layer are divided evenly among its values."""
    values = torch.cat([part for part, _ in parts])
    counts = torch.cat([torch.full((len(part),), weights / len(part), dtype=torch.float64) for part, weights in parts])
    order = values.argsort()
    below = counts[order].cumsum(0) / counts.sum()
    return [float(values[order][int((below < q).sum())]) for q in QUANTILES]


@torch.no_grad()
def reach(
    model: nn.Module,
    settings: Training,
    examples: int,
    beta: Callable[[float], float],
    *,
    lr_log_sigma2: float | None = None,
    threshold: Threshold | None = None,
    world: int = 1,
) -> Reach:
    """How far a converted model's weights are from the threshold, and how far a fit with these settings can move them.

    beta: its schedule. lr_log_sigma2: None: that of the means (sgd: at most 0.001). threshold: as `relevance` takes it (None:
        each layer's own).
    """
    rate, steps = rate_of_log_sigma2(settings, lr_log_sigma2), steps_of(settings, examples, world)
    up, along = factors(settings, steps, beta)
    travel, means = rate * up, settings.lr * along
    past, within = (_gone(model, threshold, times * travel, times * DRIFT * means) for times in (0, 1))
    weights = sum(layer.weight.numel() for _, layer in variational_layers(model))
    frozen = sum(frozen_layers(model).values()) / max(weights, 1)
    times = _times(lambda factor: _gone(model, threshold, factor * travel, factor * DRIFT * means), within)
    return Reach(distances(model, threshold), steps, rate, travel, means, past, within, times, frozen)


def _times(share: Callable[[float], float], within: float) -> float | None:
    """The factor on all movements from which half of the weights are within reach, to a tenth; None above `FARTHEST`."""
    if within >= ENOUGH:
        return 1.0
    high = 2.0
    while share(high) < ENOUGH:
        high *= 2
        if high > FARTHEST:
            return None
    low = high / 2
    while high - low > 0.1 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if share(middle) >= ENOUGH else (middle, high)
    return high


def _trained(layer: VariationalLayer) -> tuple[bool, bool]:
    """Whether training moves a layer's means, and its variances."""
    return layer.weight.requires_grad, any(own.requires_grad for own in layer.variance_parameters().values())


def frozen_layers(model: nn.Module) -> dict[str, int]:
    """The number of weights of each variational layer, by name, whose means and variances training leaves as they are."""
    return {name: layer.weight.numel() for name, layer in variational_layers(model) if not any(_trained(layer))}


def _gone(model: nn.Module, threshold: Threshold | None, up: float, along: float) -> float:
    """The share of the weights beyond the threshold if log variances rose by `up` and means moved towards zero by `along`."""
    gone = total = 0
    for _, layer in variational_layers(model):
        total += layer.weight.numel()
        means, variances = _trained(layer)
        gone += int((~_moved(layer, up * variances, along * means).relevant(threshold)).sum())
    return gone / max(total, 1)


def _moved(layer: VariationalLayer, up: float, along: float) -> VariationalLayer:
    """A copy of a layer with all log variances raised by `up`, and all means moved towards zero by `along`."""
    moved = copy.deepcopy(layer)
    set_posterior([moved], "independent")  # so that each weight's variance can be written to
    moved.weight.copy_(layer.weight.sign() * (layer.weight.abs() - along).clamp_min(0))
    moved.log_sigma2.add_(up)
    return moved
