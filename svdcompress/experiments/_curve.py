"""A curve with a gap in its data, as predicted by a deep ensemble, the delta method, MC dropout and the sparse net.

The lecture's two classical methods, the delta method (the inverse Hessian of the loss, to first order) and deep ensembles, are
compared with the variational ones where the truth is known: y = sin(1.5 x) + noise, x from -4 to -1 and from 1 to 4.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.convert import convert, convert_dropout
from svdcompress.experiments._common import Context, sparsity, train
from svdcompress.experiments._delta import Delta, ard_variance, jacobian, weights, weights_of
from svdcompress.experiments._pictures import BLUE, INK, RED, figure, save
from svdcompress.objective import LinearWarmup
from svdcompress.uncertainty import Prediction, ensemble_predict, mc_predict

NOISE = 0.1
GAP, END, FAR = 1.0, 4.0, 6.0
WIDTH = 32
MEMBERS = 5
"""Size of the deep ensemble."""

PLACES = {"where the data are": (GAP, END), "in the gap": (0.0, GAP), "beyond": (END, FAR)}
"""Ranges of |x|."""


@dataclass(frozen=True)
class Curve:
    """Training data, (N, 1) each. at: where the curve is predicted, (M, 1)."""

    x: Tensor
    y: Tensor
    at: Tensor


def truth(x: Tensor) -> Tensor:
    """The curve."""
    return torch.sin(1.5 * x)


def data(examples: int, generator: torch.Generator) -> Curve:
    """Noisy observations on both sides of the gap."""
    size = GAP + (END - GAP) * torch.rand(examples, 1, generator=generator)
    x = size * (2 * torch.randint(0, 2, (examples, 1), generator=generator) - 1)
    return Curve(x, truth(x) + NOISE * torch.randn(x.shape, generator=generator), torch.linspace(-FAR, FAR, 241)[:, None])


def net(p: float = 0.0) -> nn.Sequential:
    """Two hidden layers of tanh."""
    drop = [nn.Dropout(p)] if p else []
    return nn.Sequential(
        nn.Linear(1, WIDTH), nn.Tanh(), *drop, nn.Linear(WIDTH, WIDTH), nn.Tanh(), *copy.deepcopy(drop), nn.Linear(WIDTH, 1)
    )


def run(examples: int, epochs: int, samples: int, context: Context) -> dict[str, Any]:
    """Fit all nets; writes curve.png. Returns "curve" (figures by net), "curve_sparsity" and "pictures"."""
    found = data(examples, torch.Generator().manual_seed(context.seed))
    tau = NOISE**-2

    def nll(output: Tensor, y: Tensor) -> Tensor:
        return 0.5 * tau * (output - y).square().mean()

    def fit(model: nn.Module, stage: str, **more: Any) -> nn.Module:
        options: dict[str, Any] = {"epochs": epochs, "batch_size": examples, "lr": 1e-2, **more}
        return train(model, found.x, found.y, nll, context, stage=stage, **options)

    members = []
    for number in range(MEMBERS):
        torch.manual_seed(1000 * number + context.seed)
        members.append(fit(net(), f"member {number + 1}"))
    torch.manual_seed(context.seed)
    dropped = convert_dropout(fit(net(0.05), "dropout"))
    sparse = fit(
        convert(copy.deepcopy(members[0]), log_sigma2=-8.0),
        "sparse",
        epochs=2 * epochs,
        beta=LinearWarmup(0.1 * epochs, 0.8 * epochs, 1.0),
    )
    draws = lambda model: mc_predict(  # noqa: E731
        model, found.at, samples, task="regression", members=True, generator=torch.Generator().manual_seed(context.seed)
    )
    predictions = {
        f"deep ensemble of {MEMBERS}": ensemble_predict(members, found.at, task="regression"),
        "delta method, dense": _delta(members[0], found, tau, ard=False),
        "MC dropout 0.05": draws(dropped),
        "sparse variational": draws(sparse),
        "delta method, sparse": _delta(sparse, found, tau, ard=True),
    }
    figures = {name: judge(prediction, found) for name, prediction in predictions.items()}
    return {"curve": figures, "curve_sparsity": sparsity(sparse), "pictures": [_plot(predictions, found, context)]}


def _delta(model: nn.Module, found: Curve, tau: float, ard: bool) -> Prediction:
    """The net's own output with variances by the delta method; the prior's scale maximizes the evidence."""
    which = weights_of(model)
    own = weights(model, which)
    prior = ard_variance(model, which) if ard else torch.ones_like(own)
    delta = Delta(jacobian(model, found.x, which), prior, own)
    with torch.no_grad():
        mean = model(found.at).double()
    variance = delta.variance(jacobian(model, found.at, which), delta.best_scale(tau), tau)[:, None]
    return Prediction("regression", 1, mean, variance, torch.zeros_like(variance), variance)


def judge(prediction: Prediction, found: Curve) -> dict[str, float]:
    """For each of `PLACES`: the share of the curve within the net's 95% band (without noise), and the band's mean width (one
    standard deviation)."""
    std = prediction.epistemic_std[:, 0]
    off = (prediction.mean - truth(found.at).double())[:, 0].abs()
    figures = {}
    for place, (low, high) in PLACES.items():
        here = (found.at[:, 0].abs() >= low) & (found.at[:, 0].abs() <= high)
        figures[f"coverage, {place}"] = float((off <= 1.959964 * std)[here].double().mean())
        figures[f"band, {place}"] = float(std[here].mean())
    return figures


def _plot(predictions: dict[str, Prediction], found: Curve, context: Context) -> dict[str, str]:
    drawing, axes = figure(1, len(predictions), (3.2 * len(predictions), 3.2), sharex=True, sharey=True)
    at = found.at[:, 0]
    for axis, (name, prediction) in zip(axes[0], predictions.items(), strict=True):
        mean, std = prediction.mean[:, 0], prediction.epistemic_std[:, 0]
        axis.fill_between(at, mean - 2 * std, mean + 2 * std, color=BLUE, alpha=0.25, linewidth=0)
        axis.plot(at, mean, color=BLUE, linewidth=1.2)
        axis.plot(at, truth(at), color=RED, linewidth=0.9, linestyle="--")
        axis.scatter(found.x, found.y, s=4, color=INK, linewidths=0)
        axis.set(title=name, ylim=(-3, 3), xlabel="x")
        axis.title.set_fontsize(9)
    caption = (
        "Dots: data. Dashed: the curve that they were drawn from. Mean and two standard deviations of the net, without noise."
    )
    return save(drawing, context.out / "curve.png", "A curve with a gap", caption)
