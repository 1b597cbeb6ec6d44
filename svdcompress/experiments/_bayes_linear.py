"""Bayesian linear regression, where the exact posterior is known: the variational posterior compared with it.

Data y = X w + noise of precision tau; prior N(0, lambda_j^2) for each weight, lambda learned. With XᵀX = N I and a = tau N, a
weight with the least-squares value m and z^2 = a m^2 has at the ELBO's maximum r = z^2 - 1, mean m r / (1 + r) and variance
r / (a (1 + r)), so log alpha = -log(z^2 - 1); below z^2 = 1 it vanishes. For any X the exact posterior at the learned lambda is
normal with covariance (tau XᵀX + diag(1 / lambda^2))^-1: the variational mean agrees with it, and the variances are those of
one weight with all others known.

A second part is a nonlinear regression, on a curve with a gap: a deep ensemble, the delta method, MC dropout and the sparse
net (`_curve.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.convert import convert
from svdcompress.experiments import _curve
from svdcompress.experiments._common import Context, train
from svdcompress.experiments._pictures import GREEN, QUIET, RED, figure, save
from svdcompress.objective import Constant


@dataclass(frozen=True)
class Settings:
    """examples: N. noise: standard deviation of the observations. correlation: between neighboring features of the second
    design. epochs: steps with all data. curve_epochs: for each net on the curve, twice as many for the sparse one. samples:
    draws."""

    examples: int = 200
    noise: float = 0.5
    correlation: float = 0.7
    epochs: int = 2000
    curve_epochs: int = 1500
    samples: int = 100


WEIGHTS = (2.0, -1.0, 0.5, 0.25, 0.12, 0.06, 0.0, 0.0)
"""The true weights: from clearly visible down to 0."""


def run(settings: Settings, context: Context) -> dict[str, Any]:
    """Fit both designs, and the curve; writes bayes-linear.png and curve.png."""
    generator = torch.Generator().manual_seed(context.seed)
    plain = torch.randn(settings.examples, len(WEIGHTS), generator=generator)
    orthogonal = torch.linalg.qr(plain)[0] * settings.examples**0.5
    mixing = settings.correlation ** (torch.arange(8)[:, None] - torch.arange(8)).abs().float()
    correlated = orthogonal @ torch.linalg.cholesky(mixing).T
    results = {}
    for name, x in (("orthogonal", orthogonal), ("correlated", correlated)):
        y = x @ torch.tensor(WEIGHTS) + settings.noise * torch.randn(settings.examples, generator=generator)
        results[name] = _fit(x, y, settings, context, name)
    pictures = [_plot(results, settings, context)]
    worst = results["orthogonal"]
    shift = max(abs(a - b) / s**0.5 for a, b, s in zip(worst["mean"], worst["best_mean"], worst["exact_variance"], strict=True))
    found = _curve.run(settings.examples, settings.curve_epochs, settings.samples, context)
    pictures += found.pop("pictures")
    return {"designs": results, "largest_shift_in_std": shift, **found, "pictures": pictures}


def _fit(x: Tensor, y: Tensor, settings: Settings, context: Context, name: str) -> dict[str, Any]:
    tau = settings.noise**-2
    torch.manual_seed(context.seed)
    model = convert(nn.Linear(len(WEIGHTS), 1, bias=False), log_sigma2=-6.0)

    def nll(output: Tensor, target: Tensor) -> Tensor:
        return 0.5 * tau * (output[:, 0] - target).square().mean()

    train(
        model,
        x,
        y,
        nll,
        context,
        stage=name,
        epochs=settings.epochs,
        batch_size=settings.examples,
        lr=0.02,
        lr_log_sigma2=0.05,
        beta=Constant(1.0),
    )
    layer: Any = model
    with torch.no_grad():
        mean, variance = layer.weight[0].double(), layer.log_sigma2[0].exp().double()
    x, y = x.double(), y.double()
    precision = tau * x.T @ x + torch.diag(1 / (mean.square() + variance))
    exact = torch.linalg.inv(precision)
    least_squares = torch.linalg.lstsq(x, y[:, None])[0][:, 0]
    z2 = tau * settings.examples * least_squares.square()
    r = (z2 - 1).clamp_min(0)
    return {
        "true": list(WEIGHTS),
        "mean": mean.tolist(),
        "variance": variance.tolist(),
        "exact_mean": (exact @ x.T @ y * tau).tolist(),
        "exact_variance": exact.diagonal().tolist(),
        "conditional_variance": (1 / precision.diagonal()).tolist(),
        "log_alpha": layer.log_alpha()[0].tolist(),
        "kept": layer.relevant()[0].tolist(),
        "z2": z2.tolist(),
        "best_mean": (least_squares * r / (1 + r)).tolist(),  # for the orthogonal design
        "best_variance": (r / (1 + r) / (tau * settings.examples)).tolist(),
    }


def _plot(results: dict[str, Any], settings: Settings, context: Context) -> dict[str, str]:
    drawing, axes = figure(1, 3, (11, 3.4))
    places = torch.arange(len(WEIGHTS))
    for axis, (name, result) in zip(axes[0], results.items(), strict=False):
        for shift, who, colour in ((-0.15, "exact", QUIET), (0.15, "variational", GREEN)):
            key = "exact_" if who == "exact" else ""
            error = 2 * torch.tensor(result[f"{key}variance"]).sqrt()
            axis.errorbar(places + shift, result[f"{key}mean"], error, fmt="o", ms=4, color=colour, label=who, capsize=2)
        axis.plot(places, WEIGHTS, "_", color=RED, ms=14, label="true")
        axis.set(title=f"{name} design", xlabel="weight", ylim=(-0.35, 0.75))
        axis.text(0.02, 0.02, "the two largest lie outside", transform=axis.transAxes, fontsize=7, color=QUIET)
    axes[0, 0].set_ylabel("mean, and two standard deviations")
    axes[0, 1].legend(frameon=False, fontsize=8)
    axis, result = axes[0, 2], results["orthogonal"]
    curve = torch.logspace(-2, 5, 200)
    axis.plot(1 + curve, -curve.log(), color=QUIET, label="-log(z² - 1)")
    axis.scatter(result["z2"], result["log_alpha"], color=GREEN, zorder=3, label="learned")
    axis.axhline(3, color=RED, linewidth=0.8, linestyle="--", label="threshold")
    axis.set(xscale="log", xlabel="z² of the least-squares weight", ylabel="log alpha", ylim=(-10, 14), title="relevance")
    axis.legend(frameon=False, fontsize=8)
    caption = (
        "Mean and two standard deviations of each weight, of the variational and the exact posterior; right, log alpha "
        "as learned and in closed form."
    )
    return save(drawing, context.out / "bayes-linear.png", "Variational vs. exact", caption)
