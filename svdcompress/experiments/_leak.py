"""Leak or no leak: a 1-D convolutional net on simulated series from a station on the sea floor near a CO2 storage site.

As in the lecture: binary classification of multivariate time series, after a difference transform, and the leak probability's
mean and standard deviation over time. The series are simulated: tide, season, autocorrelated noise, and plumes of 30, 300 and
3,000 tonnes that the tidal current carries past the station; how far each stands out from natural variation is measured and
reported. The seed's net uses MC dropout; it is compared with the sparse variational one.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from svdcompress.convert import convert, convert_dropout
from svdcompress.experiments._common import Context, sparsity, train
from svdcompress.experiments._pictures import BLUE, RED, figure, save
from svdcompress.objective import LinearWarmup
from svdcompress.uncertainty import Prediction, auroc, mc_predict, quality

TONNES = (30, 300, 3000)
WINDOW = 96  # half hours: two days
TIDE = 12.42 * 2  # half hours in the principal lunar tide
YEAR = 2 * 24 * 365.25


@dataclass(frozen=True)
class Settings:
    """series: number of training windows. epochs, sparse_epochs: passes over them. samples: draws. p: rate of MC dropout."""

    series: int = 6000
    epochs: int = 12
    sparse_epochs: int = 30
    samples: int = 100
    p: float = 0.2
    beta: float = 1.0


def simulate(count: int, length: int, tonnes: Tensor, onset: int, generator: torch.Generator) -> Tensor:
    """Series of CO2 (anomaly in the units of its noise), temperature and current: (count, 3, length).

    tonnes: (count,), 0 for no leak. onset: when the leak begins, in half hours (its plume takes half a day to build up).
    """
    natural, plume, temperature, current = _parts(count, length, tonnes, onset, generator)
    return torch.stack([natural + plume, temperature, current], 1)


def _parts(count: int, length: int, tonnes: Tensor, onset: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Natural CO2, the leak's, temperature and current, (count, length) each."""
    start = YEAR * torch.rand(count, 1, generator=generator)
    phase = 2 * math.pi * torch.rand(count, 2, generator=generator)
    t = torch.arange(length)
    season = torch.cos(2 * math.pi * (start + t) / YEAR)
    spring = 1 + 0.4 * torch.cos(2 * math.pi * t / (TIDE * 28.5) + phase[:, :1])  # spring and neap
    tide = 2 * math.pi * t / TIDE + phase[:, 1:]
    current = spring * torch.cos(tide) + 0.25 * _autocorrelated(count, length, 0.8, generator)
    temperature = 8 + 3 * season + 0.15 * torch.sin(tide) + 0.2 * _autocorrelated(count, length, 0.97, generator)
    # Respiration raises CO2 with the season, and the tide carries such water past: this can be mistaken for a leak.
    natural = 1.5 * season + 0.6 * torch.sin(tide) * spring + 0.5 * _autocorrelated(count, length, 0.95, generator)
    natural = natural + 0.15 * torch.randn(count, length, generator=generator)
    growth = ((t - onset) / 24).clamp(0, 1)
    towards = (current - 0.3).clamp_min(0)  # the leak lies upstream for a part of each tide
    gusts = (0.5 * _autocorrelated(count, length, 0.5, generator)).exp()
    plume = 0.35 * (tonnes[:, None] / 30).pow(0.5) * towards * gusts * growth
    return natural, plume, temperature, current


def signal_to_noise(generator: torch.Generator, count: int = 2000) -> dict[str, dict[str, float]]:
    """How much of a window's CO2 comes from the leak, compared with natural CO2, on simulated windows of each size of leak.

    For the CO2 itself, and for its differences, which the nets see: variance over time of the plume over that of natural CO2,
    in decibels, from the mean variances over all windows.
    """
    found = {}
    for size in TONNES:
        natural, plume, *_ = _parts(count, WINDOW + 1, torch.full((count,), float(size)), -24, generator)
        found[str(size)] = {
            "snr_db": _decibels(plume, natural),
            "snr_differences_db": _decibels(plume.diff(dim=1), natural.diff(dim=1)),
        }
    return found


def _decibels(signal: Tensor, noise: Tensor) -> float:
    return 10 * math.log10(float(signal.var(1).mean()) / float(noise.var(1).mean()))


def _autocorrelated(count: int, length: int, r: float, generator: torch.Generator) -> Tensor:
    """Noise of unit variance and lag-one correlation r."""
    noise = torch.randn(count, length, generator=generator) * (1 - r * r) ** 0.5
    value = torch.randn(count, generator=generator)
    steps = []
    for k in range(length):
        value = r * value + noise[:, k]
        steps.append(value)
    return torch.stack(steps, 1)


def difference(series: Tensor) -> Tensor:
    """Differences between successive times for CO2 and temperature; the current as it is. (..., 3, L) -> (..., 3, L - 1)."""
    return torch.cat([series[..., :2, :].diff(dim=-1), series[..., 2:, 1:]], -2)


def examples(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Windows with a leak that has gone on for a while, or with none; three quarters have a leak, as in the seed.

    Returns inputs (count, 3, WINDOW), labels (count,) and tonnes (count,).
    """
    which = torch.randint(0, 4, (count,), generator=generator)
    tonnes = torch.tensor([0.0, *TONNES])[which]
    series = simulate(count, WINDOW + 1, tonnes, -24, generator)
    return difference(series), (which > 0).float(), tonnes


def net(p: float) -> nn.Sequential:
    """Four convolutions and a Linear layer, one logit."""
    layers: list[nn.Module] = []
    for inputs, outputs, kernel in ((3, 24, 9), (24, 32, 7), (32, 32, 5), (32, 32, 5)):
        layers += [nn.Conv1d(inputs, outputs, kernel, padding=kernel // 2), nn.ReLU(), nn.MaxPool1d(2), nn.Dropout(p)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * (WINDOW // 16), 1))


def run(settings: Settings, context: Context) -> dict[str, Any]:
    """Train both nets, judge them on new series, follow four stations through the onset of a leak; writes leak.png."""
    generator = torch.Generator().manual_seed(context.seed)
    x, y, _ = examples(settings.series, generator)
    test, labels, tonnes = examples(2000, generator)
    torch.manual_seed(context.seed)
    dropout = train(net(settings.p), x, y, _binary, context, stage="MC dropout", epochs=settings.epochs)
    start = convert(copy.deepcopy(dropout), log_sigma2=-8.0)
    for module in start.modules():
        if isinstance(module, nn.Dropout):  # the noise of its weights regularizes the sparse net instead
            module.p = 0.0
    epochs = settings.sparse_epochs
    beta = LinearWarmup(0.1 * epochs, 0.6 * epochs, settings.beta)
    sparse = train(start, x, y, _binary, context, stage="sparse variational", epochs=epochs, beta=beta)
    models = {"MC dropout": convert_dropout(dropout), "sparse variational": sparse}
    figures = {name: judge(_predict(model, test, settings, context), labels, tonnes) for name, model in models.items()}
    followed = {name: _follow(model, settings, context) for name, model in models.items()}
    return {
        "nets": figures,
        "signal_to_noise": signal_to_noise(torch.Generator().manual_seed(context.seed + 2)),
        "sparsity": sparsity(sparse),
        "onset": {name: _summary(tracks) for name, tracks in followed.items()},
        "pictures": [_plot(followed, figures, context)],
    }


def judge(prediction: Prediction, labels: Tensor, tonnes: Tensor) -> dict[str, Any]:
    """Scores over all series, and for each size of leak against no leak: area under the ROC curve, mean leak probability and
    mean standard deviation."""
    p, std = prediction.mean[:, 0], prediction.epistemic_std[:, 0]
    sizes = {}
    for size in (0, *TONNES):
        of = tonnes == size
        sizes[str(size)] = {"probability": float(p[of].mean()), "std": float(std[of].mean())}
        if size:
            sizes[str(size)]["auroc"] = auroc(p[tonnes == 0], p[of])
    return {**quality(p, labels), "tonnes": sizes}


def _binary(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output[:, 0], target)


def _predict(model: nn.Module, x: Tensor, settings: Settings, context: Context) -> Prediction:
    generator = torch.Generator().manual_seed(context.seed)
    return mc_predict(model, x, settings.samples, task="binary", generator=generator)


DAYS, ONSET = 12, 6


def _follow(model: nn.Module, settings: Settings, context: Context) -> dict[str, Prediction]:
    """The leak probability in a window that slides over each of four stations: no leak, and each size of leak."""
    generator = torch.Generator().manual_seed(context.seed + 1)
    tracks = {}
    for size in (0, *TONNES):
        series = simulate(1, DAYS * 48 + 1, torch.tensor([float(size)]), ONSET * 48, generator)
        windows = difference(series)[0].unfold(1, WINDOW, 4).transpose(0, 1)
        tracks[str(size)] = _predict(model, windows.contiguous(), settings, context)
    return tracks


def _times(count: int) -> Tensor:
    """The end of each window, in days."""
    return (WINDOW + 4 * torch.arange(count)) / 48


def _summary(tracks: dict[str, Prediction]) -> dict[str, Any]:
    """Mean leak probability before the onset, and from two and a half days after it; and its course, the track, over time."""
    found = {}
    for size, prediction in tracks.items():
        p, std, days = prediction.mean[:, 0], prediction.epistemic_std[:, 0], _times(len(prediction.mean))
        track = {"days": days.tolist(), "mean": p.tolist(), "std": std.tolist()}
        found[size] = {"before": float(p[days < ONSET].mean()), "after": float(p[days > ONSET + 2.5].mean()), "track": track}
    return found


def _plot(followed: dict[str, dict[str, Prediction]], figures: dict[str, Any], context: Context) -> dict[str, str]:
    drawing, axes = figure(4, 2, (10, 8), sharex=True, sharey=True)
    for column, (name, tracks) in enumerate(followed.items()):
        for row, (size, prediction) in enumerate(tracks.items()):
            axis, mean, std = axes[row, column], prediction.mean[:, 0], prediction.epistemic_std[:, 0]
            days = _times(len(mean))
            low, high = (mean - 2 * std).clamp_min(0), (mean + 2 * std).clamp_max(1)
            axis.fill_between(days, low, high, color=BLUE, alpha=0.25, linewidth=0, label="two standard deviations")
            axis.plot(days, mean, color=BLUE, linewidth=1.2, label="mean")
            if size != "0":
                axis.axvline(ONSET, color=RED, linewidth=1, linestyle="--", label="the leak begins")
            score = figures[name]["tonnes"][size].get("auroc")
            text = f"{int(size):,} t" + (f", AUROC {score:.3f}" if score is not None else ": no leak")
            axis.set_title(f"{name}, {text}" if not row else text, fontsize=9)
            axis.set_ylim(-0.03, 1.03)
    for axis in axes[:, 0]:
        axis.set_ylabel("P(leak)")
    axes[-1, 0].legend(frameon=False, fontsize=8, loc="center left")
    for axis in axes[-1]:
        axis.set_xlabel("days (window's end)")
    caption = "Four stations, one for each size of leak: the leak probability in the two days before each time."
    return save(drawing, context.out / "leak.png", "Probability of a leak over time", caption)
