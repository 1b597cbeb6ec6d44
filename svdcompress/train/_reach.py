"""Whether training is long enough to bring log alpha to the threshold, seen before it starts."""

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
"""Of the distances of weights and groups to their thresholds."""

DRIFT = 1 / 3
"""Part of the learning rate that a mean comes nearer to zero by in a step, while the data pull it to and fro. Seen in short
fits of trained networks: 0.15 to 0.3 (ResNet-20), 0.8 and more (a small BERT)."""

ENOUGH = 0.5
"""Where less than this share of the weights can get to the threshold, training is too short."""

FARTHEST = 1024
"""The longest training, in times this one, that is looked at."""

NEVER = 20.0
"""A threshold from here on says that nothing of this share shall go: e^20 times as much noise as signal."""

POINTS = 10_000
"""Steps that a schedule is summed over one by one; of more, as many in equal distances."""

SAMPLE = 100_000
"""Numbers of a layer that its quantiles are taken from, at most."""


@dataclass(frozen=True)
class Reach:
    """How far it is to the threshold, and how far training can go; lengths in units of log alpha.

    distance: {share: quantiles (10, 50, 90%) of threshold - log alpha} over the weights, or the groups, of all layers.
    steps: of training, and lr_log_sigma2 its learning rate. travel: the most by which log sigma2 can rise in them. means: the
        most that a mean can move (0: by SGD, not known). past: the share of the weights that is beyond a threshold at the
        start. within: the share that can get there: log sigma2 by `travel`, and means by a third (`DRIFT`) of `means` towards
        zero. times: how much longer training (or larger its learning rates) would have to be for half of the weights; None:
        that helps little.
    """

    distance: dict[str, list[float]]
    steps: int
    lr_log_sigma2: float
    travel: float
    means: float
    past: float
    within: float
    times: float | None

    @property
    def enough(self) -> bool:
        """Whether half of the weights can get to the threshold; True where nothing shall go."""
        return self.within >= ENOUGH or not self.distance

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
        return (
            f"log alpha starts below it by (10, 50, 90%) {ways}; in {self.steps:,} steps log sigma2 can rise by "
            f"{self.travel:.2g} (lr {self.lr_log_sigma2:.2g}) {means}. "
            f"About {100 * self.within:.0f}% of the weights are within reach, {100 * self.past:.0f}% past it already"
        )

    def to_dict(self) -> dict[str, Any]:
        """All fields, JSON-able."""
        return asdict(self)


def steps_of(settings: Training, examples: int, world: int = 1) -> int:
    """Steps of a fit of so many examples on `world` processes."""
    batches = max(1, math.ceil(examples / (settings.batch_size * world)))
    return settings.epochs * math.ceil(batches / settings.accumulate)


def factors(settings: Training, steps: int, beta: Callable[[float], float]) -> tuple[float, float]:
    """Sums over the steps, in learning rates, of how far log sigma2 and how far a mean can go.

    log sigma2 rises only where beta is above 0. Under Adam, which log sigma2 always has, a number moves by the learning rate in
    a step at most, whatever its gradient. Means under SGD move by theirs, which nobody knows beforehand: they count as 0.
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
    """Quantiles of threshold - log alpha, by share, over all variational layers; each weight counts once in its own layer.

    threshold: as `relevance` takes it. Shares with a threshold that shall never be met are left out.
    """
    found: dict[str, list[tuple[Tensor, float]]] = {}
    for _, layer in variational_layers(model):
        limits = layer.limits(threshold)
        for share in layer.share:
            if limits[share] < NEVER:
                away = (limits[share] - layer.log_alpha(share)).flatten().float().cpu()
                found.setdefault(share, []).append((away[:: -(-len(away) // SAMPLE)], layer.weight.numel()))
    return {share: _quantiles(parts) for share, parts in found.items()}


def _quantiles(parts: list[tuple[Tensor, float]]) -> list[float]:
    """Of numbers that each stand for as many weights as their layer has for each of them."""
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
    """How far a converted model's weights are from the threshold, against how far a fit with these settings can take them.

    beta: its schedule. lr_log_sigma2: None: as the others (sgd: 0.001). threshold: as `relevance` takes it (None: each
        layer's own).
    """
    rate, steps = rate_of_log_sigma2(settings, lr_log_sigma2), steps_of(settings, examples, world)
    up, along = factors(settings, steps, beta)
    travel, means = rate * up, settings.lr * along
    past, within = (_gone(model, threshold, times * travel, times * DRIFT * means) for times in (0, 1))
    times = _times(lambda factor: _gone(model, threshold, factor * travel, factor * DRIFT * means), within)
    return Reach(distances(model, threshold), steps, rate, travel, means, past, within, times)


def _times(share: Callable[[float], float], within: float) -> float | None:
    """The factor on all ways from which half of the weights are within reach, to a tenth."""
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


def _gone(model: nn.Module, threshold: Threshold | None, up: float, along: float) -> float:
    """The share of the weights beyond the threshold, were all log variances higher and all means nearer to zero."""
    gone = total = 0
    for _, layer in variational_layers(model):
        total += layer.weight.numel()
        gone += int((~_moved(layer, up, along).relevant(threshold)).sum())
    return gone / max(total, 1)


def _moved(layer: VariationalLayer, up: float, along: float) -> VariationalLayer:
    """A layer with all log variances higher, and all means nearer to zero."""
    moved = copy.deepcopy(layer)
    set_posterior([moved], "independent")  # a variance for each weight can be written to
    moved.weight.copy_(layer.weight.sign() * (layer.weight.abs() - along).clamp_min(0))
    moved.log_sigma2.add_(up)
    return moved
