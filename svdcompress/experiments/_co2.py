"""Mauna Loa CO2: predictive mean and bands, within the record and beyond it (Gal & Ghahramani 2016, fig. 2).

The data are monthly means of the weekly record (statsmodels ships it) minus a line, standardized; the net sees time alone.
Trained on the first part, it predicts the rest and as many months as the record has beyond its end. Side by side, as in the
paper: standard dropout by weight averaging, a Gaussian process with the squared-exponential kernel, MC dropout (ReLU and
tanh); and the sparse variational net, with draws of its mean-field posterior and by the delta method, whose posterior has all
covariances, which a net this small can afford.
"""

from __future__ import annotations

import copy
import time
import warnings
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from svdcompress.convert import convert, convert_dropout
from svdcompress.errors import DependencyError
from svdcompress.experiments._common import Context, sparsity, train
from svdcompress.experiments._delta import Delta, groups_of, jacobian, weights, weights_of
from svdcompress.experiments._pictures import BLUE, QUIET, RED, figure, save
from svdcompress.objective import LinearWarmup
from svdcompress.uncertainty import Prediction, fit_tau, mc_predict, mean_predict, regression_quality


@dataclass(frozen=True)
class Settings:
    """width, layers: of the net; the paper's are 1024 and 4. epochs, sparse_epochs: passes over the training months, for the
    dense nets and for the variational one (the paper: a million steps; here some thousand). samples: draws. years: how many of
    the record's last years are used. beta: weight of the KL at the end."""

    width: int = 1024
    layers: int = 4
    epochs: int = 900
    sparse_epochs: int = 1300
    batch_size: int = 64
    samples: int = 100
    years: int = 16
    scale: float = 12.0  # the training months span -scale to scale
    weight_decay: float = 1e-6
    noise_ppm: float = 0.4  # standard deviation of a month around what season and trend explain
    beta: float = 1.0


AVERAGED = 0.1
"""The dropout rate for which weight averaging is shown as well."""

HELD = 7
"""One known month in this many is held out of training, for the noise; as it does not divide 12, all seasons are among them."""


@dataclass(frozen=True)
class Series:
    """Times and values in the net's units, (N, 1) each; the first `known` are for training, those `held` among them for the
    noise.

    beyond: later times. origin: calendar year of time 0. month: its length in the net's units. line: (slope, offset); a value
    in ppm is offset + slope * t + std * value."""

    t: Tensor
    y: Tensor
    known: int
    beyond: Tensor
    origin: float
    month: float
    line: tuple[float, float]
    std: float

    @property
    def held(self) -> Tensor:
        """Indices of the months held out for validation, all between known ones: tau is fitted on them."""
        return torch.arange(HELD // 2, self.known - 1, HELD)

    @property
    def trained(self) -> Tensor:
        """Indices of the months that the nets are trained on."""
        months = torch.arange(self.known)
        return months[~torch.isin(months, self.held)]

    def years(self, t: Tensor) -> np.ndarray:
        """Calendar years of times."""
        return self.origin + t[:, 0].double().numpy() / self.month / 12

    def ppm(self, t: Tensor, value: Tensor) -> np.ndarray:
        """Values in parts per million, with the line added back."""
        slope, offset = self.line
        return offset + slope * t[:, 0].double().numpy() + self.std * value[:, 0].double().numpy()


def load(settings: Settings) -> Series:
    """The record's last years, three quarters of them known, and as many months again beyond its end."""
    try:
        from statsmodels.datasets import co2
    except ImportError as error:
        raise DependencyError("experiment co2 needs the package statsmodels: pip install statsmodels") from error
    table: Any = co2.load_pandas().data
    monthly = table["co2"].resample("MS").mean().interpolate()[-12 * settings.years :]
    count = len(monthly)
    known = count * 3 // 4
    month = 2 * settings.scale / known
    time = (np.arange(2 * count) - known / 2) * month
    line = np.polyfit(time[:known], monthly.to_numpy()[:known], 1)
    rest = monthly.to_numpy() - np.polyval(line, time[:count])
    std = float(rest[:known].std())
    values = torch.tensor(rest / std).float()[:, None]
    times = torch.tensor(time).float()[:, None]
    origin = monthly.index[0].year + (monthly.index[0].month - 1) / 12 + known / 24
    return Series(times[:count], values, known, times[count:], origin, month, (float(line[0]), float(line[1])), std)


def run(settings: Settings, context: Context) -> dict[str, Any]:
    """Train all nets, predict, judge the months held back; writes co2.png."""
    series = load(settings)
    x, y = series.t[series.trained], series.y[series.trained]
    everywhere = torch.cat([series.t, series.beyond])
    predictions: dict[str, Prediction] = {}
    figures: dict[str, Any] = {}

    def fit(model: nn.Module, stage: str) -> nn.Module:
        return train(
            model,
            x,
            y,
            _half_square,
            context,
            stage=stage,
            epochs=settings.epochs,
            batch_size=settings.batch_size,
            weight_decay=settings.weight_decay,
        )

    dense = fit(net(settings, nn.ReLU), "dense, ReLU")
    predictions["dense, ReLU"] = mean_predict(dense, everywhere, task="regression")
    predictions["Gaussian process"] = gaussian_process(x, y, everywhere)
    for activation in (nn.ReLU, nn.Tanh):
        for p in (0.1, 0.2):
            name = f"MC dropout {p}, {activation.__name__}"
            model = fit(net(settings, activation, p), name)
            if p == AVERAGED and activation is nn.ReLU:
                averaged = f"dropout {p}, ReLU, weight averaging"
                predictions[averaged] = mean_predict(model, everywhere, task="regression")
            predictions[name] = _sampled(convert_dropout(model), everywhere, settings, context)
    sparse = sparse_net(dense, x, y, (series.std / settings.noise_ppm) ** 2, settings, context)
    predictions["sparse variational, ReLU"] = _sampled(sparse, everywhere, settings, context)
    started = time.monotonic()
    prediction, delta = by_delta(sparse, series, everywhere)
    predictions["sparse, delta method"] = prediction
    context.seconds["delta method"] = time.monotonic() - started
    figures["sparsity"] = sparsity(sparse)
    figures["delta"] = delta
    figures["nets"] = {name: judge(prediction, series) for name, prediction in predictions.items()}
    return {**figures, "pictures": [_plot(predictions, series, figures, context)]}


def gaussian_process(x: Tensor, y: Tensor, at: Tensor) -> Prediction:
    """A Gaussian process with the squared-exponential kernel, as in the paper; its length, size and noise maximize the
    evidence."""
    try:
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
    except ImportError as error:
        raise DependencyError("experiment co2 needs the package scikit-learn: pip install scikit-learn") from error
    kernel = ConstantKernel(1.0, (1e-3, 1e3)) * RBF(1.0, (1e-2, 1e2)) + WhiteKernel(0.1, (1e-5, 1e1))
    process: Any = GaussianProcessRegressor(kernel, n_restarts_optimizer=4, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about restarts that end at a bound
        process.fit(x.numpy(), y[:, 0].numpy())
    mean, std = process.predict(at.numpy(), return_std=True)
    noise = float(process.kernel_.k2.noise_level)  # subtracted below, and fitted as for the nets
    epistemic = torch.from_numpy((std**2 - noise).clip(0))[:, None]
    return Prediction("regression", 1, torch.from_numpy(mean)[:, None], epistemic, torch.zeros_like(epistemic), epistemic)


def by_delta(model: nn.Module, series: Series, at: Tensor) -> tuple[Prediction, dict[str, Any]]:
    """The variational net's mean with variances by the delta method, and the figures behind them.

    The weights that vary are those with a variance in the variational net: its relevant ones. Their prior is a normal
    distribution for each layer, whose variance maximizes the evidence on the training months (MacKay 1992; one variance for
    all layers has less evidence, and bands that are too wide). The noise is that of the months held out between the training
    months. No later month is used.
    """
    which = weights_of(model, biases=False)
    with torch.no_grad():
        mean = model(at).double()
    error = mean[series.held] - series.y[series.held].double()
    tau = 1 / float(error.square().mean())
    slopes = jacobian(model, at, which)
    own, layers = weights(model, which), groups_of(model, which)
    groups = torch.stack(list(layers.values())).int().argmax(0)
    one = Delta(slopes[series.trained], torch.ones_like(own), own)
    delta = one.by_group(groups, tau)
    variance = delta.variance(slopes, 1.0, tau)[:, None]
    found = {
        "weights": slopes.shape[1],
        "prior_variance": {name: float(delta.prior[here][0]) for name, here in layers.items()},
        "evidence": delta.evidence(1.0, tau),
        "evidence_of_one_variance": one.evidence(one.best_scale(tau), tau),
    }
    return Prediction("regression", 1, mean, variance, torch.zeros_like(variance), variance), found


def net(settings: Settings, activation: type[nn.Module], p: float = 0.0) -> nn.Sequential:
    """A net from time to value, with dropout before each layer but the first."""
    widths = [1, *[settings.width] * settings.layers, 1]
    layers: list[Any] = []
    for index, (inputs, outputs) in enumerate(pairwise(widths)):
        layers += [activation()] if index else []
        layers += [nn.Dropout(p)] if index and p else []
        layers.append(nn.Linear(inputs, outputs))
        if not index:  # kinks spread over the whole range; torch's own initialization has nearly all near 0
            nn.init.uniform_(layers[-1].bias, -settings.scale, settings.scale)
            nn.init.uniform_(layers[-1].weight, -1.5, 1.5)
    return nn.Sequential(*layers)


def sparse_net(dense: nn.Module, x: Tensor, y: Tensor, tau: float, settings: Settings, context: Context) -> nn.Module:
    """The dense net, converted and trained further with the ELBO; tau: precision of the months, in the net's units."""
    model = convert(copy.deepcopy(dense), log_sigma2=-10.0)

    def nll(output: Tensor, target: Tensor) -> Tensor:
        return 0.5 * tau * (output - target).square().mean()

    epochs = settings.sparse_epochs
    return train(
        model,
        x,
        y,
        nll,
        context,
        stage="sparse variational",
        epochs=epochs,
        batch_size=settings.batch_size,
        beta=LinearWarmup(0.05 * epochs, 0.5 * epochs, settings.beta),
    )


def judge(prediction: Prediction, series: Series) -> dict[str, float]:
    """RMSE and coverage on the training months and on those held back after them, and the mean width of the bands (standard
    deviation of the net, in ppm) within the former, within the latter, and beyond the record. Coverage: the share of months
    within the central 95% of the prediction, noise included; 0.95 if its uncertainty is right. The noise is that of the months
    held out between the training ones."""
    known, count = series.known, len(series.t)
    std = prediction.epistemic_std[:, 0] * series.std
    held, trained = series.held, series.trained
    tau = fit_tau(prediction.mean[held], prediction.epistemic[held], series.y[held])
    inside = regression_quality(prediction.mean[trained], prediction.epistemic[trained] + 1 / tau, series.y[trained])
    after = regression_quality(prediction.mean[known:count], prediction.epistemic[known:count] + 1 / tau, series.y[known:])
    return {
        "rmse_known_ppm": inside["rmse"] * series.std,
        "rmse_held_back_ppm": after["rmse"] * series.std,
        "coverage_known": inside["coverage"],
        "coverage_held_back": after["coverage"],
        "band_known_ppm": float(std[trained].mean()),
        "band_held_back_ppm": float(std[known:count].mean()),
        "band_beyond_ppm": float(std[count:].mean()),
        "noise_ppm": tau**-0.5 * series.std,
    }


def _half_square(output: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (output - target).square().mean()


def _sampled(model: nn.Module, x: Tensor, settings: Settings, context: Context) -> Prediction:
    # Members: each draw is one function of time, so that its curve is smooth.
    generator = torch.Generator().manual_seed(context.seed)
    return mc_predict(model, x, settings.samples, task="regression", generator=generator, members=True)


def _plot(predictions: dict[str, Prediction], series: Series, figures: dict[str, Any], context: Context) -> dict[str, str]:
    drawing, axes = figure(3, 3, (15, 8), sharex=True, sharey=True)
    everywhere = torch.cat([series.t, series.beyond])
    years, count = series.years(everywhere), len(series.t)
    measured = series.ppm(series.t, series.y)
    for axis, (name, prediction) in zip(axes.flat, predictions.items(), strict=True):
        mean = series.ppm(everywhere, prediction.mean)
        std = series.std * prediction.epistemic_std[:, 0].numpy()
        for width, alpha in ((2, 0.18), (1, 0.25)):
            axis.fill_between(years, mean - width * std, mean + width * std, color=BLUE, alpha=alpha, linewidth=0)
        axis.plot(years, mean, color=BLUE, linewidth=1)
        axis.plot(years[: series.known], measured[: series.known], color=RED, linewidth=1)
        axis.plot(years[series.known : count], measured[series.known :], color=RED, linewidth=1, linestyle=":")
        axis.axvline(years[series.known], color=QUIET, linewidth=0.8, linestyle="--")
        extra = f", {figures['sparsity']['compression']:.0f}x fewer weights" if name.startswith("sparse") else ""
        covered = figures["nets"][name]["coverage_held_back"]
        axis.set_title(f"{name}{extra}\n95% intervals contain {100 * covered:.0f}% of the held-out months", fontsize=9)
    low, high = measured.min(), measured.max()
    axes[0, 0].set_ylim(low - (high - low), high + 2 * (high - low))
    for axis in axes[:, 0]:
        axis.set_ylabel("CO2 (ppm)")
    for axis in axes[-1]:
        axis.set_xlabel("year")
    caption = (
        "Mean and bands of one and two standard deviations. Red: the record up to where training ends (the dashed line); from "
        "there the networks extrapolate, at first where the record is known, then beyond its end. Above each: how many of the "
        "held-out months lie within the network's 95% intervals, noise included; 95% would be right."
    )
    return save(drawing, context.out / "co2.png", "Mauna Loa CO2, extrapolated", caption)
