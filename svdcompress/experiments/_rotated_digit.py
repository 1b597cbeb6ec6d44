"""A "1" of MNIST turned step by step: what the nets make of it, and whether they say that they do not know.

As in Gal & Ghahramani 2016 (fig. 4): LeNet with dropout before its last layer, T = 100: softmax inputs and outputs scattered
over the angle. Added to that are the dense net's confidence, the sparse variational net, the mutual information against the
angle, how well each net is calibrated on the test digits (a question that the seed leaves open), and where each is surest and
wrong.

The posterior of the sparse net is too narrow, as mean-field posteriors are. Upright digits hardly tell how wide it should be:
over a wide range of factors on its variances, their likelihood is the same within its standard error. So the net is shown as
trained, and with the largest factor that held-out digits do not rule out, by the rule of one standard error (Breiman et
al. 1984).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from svdcompress.convert import convert, convert_dropout
from svdcompress.errors import DataError
from svdcompress.experiments._common import Context, sparsity, train
from svdcompress.experiments._pictures import BLUE, GREEN, PURPLE, QUIET, figure, save
from svdcompress.layers import sampling, variational_layers
from svdcompress.objective import LinearWarmup
from svdcompress.relevance import hold, relevance
from svdcompress.sources import NETS, InMemory, open_data
from svdcompress.uncertainty import fit_temperature, mc_predict, mean_predict, quality

JUDGED = 2000
"""Test digits on which calibration is judged."""

FACTORS = tuple(2.0**power for power in range(9))
"""Factors on the variances, of which the largest that fits is taken."""

FITTED, FEW = 1000, 20
"""Numbers of held-out digits and of draws with which the factors are compared."""


@dataclass(frozen=True)
class Settings:
    """digits: how many for training, the first ones. epochs, sparse_epochs: passes over them. p: the dropout rate. samples: T.
    angles: how many, between 0 and 180 degrees. which: index of the digit among the test set's ones."""

    digits: int = 12_000
    epochs: int = 6
    sparse_epochs: int = 12
    samples: int = 100
    angles: int = 19
    p: float = 0.5
    which: int = 38  # an upright one
    beta: float = 0.1  # with a training set this small, 1 would prune nearly all weights


def run(settings: Settings, context: Context) -> dict[str, Any]:
    """Train, turn, compare; writes rotated-digit.png. Needs MNIST as the recipe's data."""
    data = open_data(context.data, "classification")
    (x, y), (test, labels), (held_out, held_labels) = (_images(part) for part in (data.train, data.test, data.validation))
    ones = test[labels == 1]
    if settings.which >= len(ones):
        raise DataError(f"experiment.settings.which: {settings.which}, but the test set has {len(ones)} ones")
    dense, dropped, sparse = _nets(x[: settings.digits], y[: settings.digits], settings, context)
    wide, factor, curve = widened(sparse, held_out[:FITTED], held_labels[:FITTED], context.seed)
    nets = (dense, dropped, sparse, wide)
    calibration = _calibration(nets, (test, labels), (held_out, held_labels), settings, context)
    degrees = torch.linspace(0, 180, settings.angles)
    turned = rotate(ones[settings.which], degrees)
    tracks = {
        "MC dropout": _track(dropped, turned, settings, context),
        "sparse variational": _track(sparse, turned, settings, context),
        "sparse, widened": _track(wide, turned, settings, context),
    }
    confidence = mean_predict(dense, turned).mean
    figures = {
        "degrees": degrees.tolist(),
        "dense": {"label": confidence.argmax(1).tolist(), "confidence": confidence.amax(1).tolist()},
        **{name: track["figures"] for name, track in tracks.items()},
    }
    return {
        "turned": figures,
        "surest_mistake": {
            name: surest_mistake(track, figures["degrees"]) for name, track in figures.items() if name != "degrees"
        },
        "calibration": calibration,
        "widened": {"factor": factor, "nll": {str(tried): nll for tried, nll in curve.items()}},
        "sparsity": sparsity(sparse),
        "pictures": [_plot(turned, degrees, tracks, figures, calibration, context)],
    }


def widened(
    sparse: nn.Module, x: Tensor, y: Tensor, seed: int, factors: Sequence[float] = FACTORS
) -> tuple[nn.Module, float, dict[float, float]]:
    """A copy with all variances multiplied by the largest factor whose NLL on held-out digits is within one standard error of
    the lowest; that factor, and the NLL of each that was tried. Masks are frozen, so that no weight is dropped or comes back.

    The standard error is that of the lowest NLL itself, as in CART's rule for the size of a tree."""
    losses = {}
    for factor in factors:
        prediction = mc_predict(_scaled(sparse, factor), x, FEW, generator=torch.Generator().manual_seed(seed))
        losses[factor] = -prediction.mean.gather(1, y[:, None])[:, 0].clamp_min(1e-300).log()
    best = min(losses, key=lambda factor: float(losses[factor].mean()))
    allowed = float(losses[best].mean() + losses[best].std() / len(y) ** 0.5)
    chosen = max(factor for factor, loss in losses.items() if float(loss.mean()) <= allowed)
    return _scaled(sparse, chosen), chosen, {factor: float(loss.mean()) for factor, loss in losses.items()}


def _scaled(sparse: nn.Module, factor: float) -> nn.Module:
    model = copy.deepcopy(sparse)
    hold(model, relevance(model))
    with torch.no_grad():
        for _, layer in variational_layers(model):
            layer.log_sigma2.add_(math.log(factor))
    return model


def surest_mistake(track: dict[str, Any], degrees: list[float]) -> dict[str, float]:
    """Where a net is surest that the digit is not a 1: at which angle, which digit it sees, and how sure it is of that."""
    wrong = [place for place, label in enumerate(track["label"]) if label != 1]
    if not wrong:
        return {}
    place = max(wrong, key=lambda index: track["confidence"][index])
    return {"degrees": degrees[place], "label": track["label"][place], "confidence": track["confidence"][place]}


def _nets(x: Tensor, y: Tensor, settings: Settings, context: Context) -> tuple[nn.Module, nn.Module, nn.Module]:
    """The dense LeNet-5, the one with dropout before the last layer, and the sparse variational one made from the dense one."""
    torch.manual_seed(context.seed)
    dense = train(NETS["lenet-5"](), x, y, F.cross_entropy, context, stage="dense", epochs=settings.epochs)
    dropped = NETS["lenet-5"]()
    dropped.fc2 = nn.Sequential(nn.Dropout(settings.p), dropped.fc2)
    train(dropped, x, y, F.cross_entropy, context, stage="dropout", epochs=settings.epochs)
    epochs = settings.sparse_epochs
    sparse = train(
        convert(copy.deepcopy(dense), log_sigma2=-10.0),
        x,
        y,
        F.cross_entropy,
        context,
        stage="sparse variational",
        epochs=epochs,
        beta=LinearWarmup(0.1 * epochs, 0.6 * epochs, settings.beta),
    )
    return dense, convert_dropout(dropped), sparse


def rotate(image: Tensor, degrees: Tensor) -> Tensor:
    """An image (C, H, W) rotated counterclockwise by each of N angles, with bilinear interpolation: (N, C, H, W)."""
    angle = torch.deg2rad(degrees)
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    matrix = torch.stack([torch.stack([cos, -sin, zero], 1), torch.stack([sin, cos, zero], 1)], 1)
    images = image.expand(len(degrees), -1, -1, -1)
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def _track(model: nn.Module, turned: Tensor, settings: Settings, context: Context) -> dict[str, Any]:
    """Draws of the logits for each angle, and the figures of the prediction: label, confidence and uncertainties."""
    generator = torch.Generator().manual_seed(context.seed)
    with torch.no_grad(), sampling(model, generator=generator):
        logits = torch.stack([model(turned) for _ in range(settings.samples)])
    prediction: Any = mc_predict(model, turned, settings.samples, generator=torch.Generator().manual_seed(context.seed))
    return {
        "logits": logits,
        "figures": {
            "label": prediction.mean.argmax(1).tolist(),
            "confidence": prediction.mean.amax(1).tolist(),
            "entropy": prediction.entropy.tolist(),
            "mutual_information": prediction.mutual_information.tolist(),
        },
    }


def _calibration(
    nets: tuple[nn.Module, nn.Module, nn.Module, nn.Module],
    test: tuple[Tensor, Tensor],
    held_out: tuple[Tensor, Tensor],
    settings: Settings,
    context: Context,
) -> dict[str, dict[str, float]]:
    """Scores of each net on the first test digits; the temperature is fitted on the digits held out of training."""
    (x, y), (validation, labels) = (test[0][:JUDGED], test[1][:JUDGED]), held_out
    dense, dropped, sparse, wide = nets
    # A "regression" passes the logits through unchanged.
    logits = mean_predict(dense, validation, task="regression").mean
    generator = torch.Generator().manual_seed(context.seed)
    predictions = {
        "dense": mean_predict(dense, x),
        "dense, temperature": mean_predict(dense, x, temperature=fit_temperature(logits, labels)),
        "MC dropout": mc_predict(dropped, x, settings.samples, generator=generator),
        "sparse, mean": mean_predict(sparse, x),
        "sparse, samples": mc_predict(sparse, x, settings.samples, generator=generator),
        "sparse, widened": mc_predict(wide, x, settings.samples, generator=generator),
    }
    return {name: quality(prediction.mean, y) for name, prediction in predictions.items()}


def _images(examples: Any) -> tuple[Tensor, Tensor]:
    assert isinstance(examples, InMemory)
    return examples.inputs.reshape(-1, 1, 28, 28).float(), examples.targets


def _plot(
    turned: Tensor, degrees: Tensor, tracks: dict[str, Any], figures: dict[str, Any], calibration: dict, context: Context
) -> dict[str, str]:
    drawing, axes = figure(3, 2, (11, 9))
    for column, name in enumerate(("MC dropout", "sparse, widened")):
        track = tracks[name]
        _scatter(axes[0, column], degrees, track["logits"], f"{name}: softmax inputs")
        _scatter(axes[1, column], degrees, track["logits"].softmax(2), f"{name}: softmax outputs")
    axes[0, 0].legend(frameon=False, fontsize=7, ncols=5, markerscale=1.5)
    axis = axes[2, 0]
    for name, colour in (("MC dropout", PURPLE), ("sparse variational", BLUE), ("sparse, widened", GREEN)):
        axis.plot(degrees, figures[name]["mutual_information"], color=colour, label=f"MI, {name} (nats)")
    axis.plot(degrees, figures["dense"]["confidence"], color=QUIET, linestyle="--", label="confidence, dense")
    axis.set(xlabel="degrees", ylim=(0, None), title="what they say of their doubts")
    axis.legend(frameon=False, fontsize=8)
    for place in range(0, len(degrees), max(1, len(degrees) // 9)):
        inset = axis.inset_axes([degrees[place] - 7, -0.46, 14, 0.22], transform=axis.get_xaxis_transform())
        inset.imshow(turned[place, 0].numpy(), cmap="gray_r")
        inset.set_axis_off()
    axis = axes[2, 1]
    names = list(calibration)
    axis.barh(names, [calibration[name]["ece"] for name in names], color=BLUE)
    for place, name in enumerate(names):
        scores = calibration[name]
        text = f" NLL {scores['nll']:.3f}, error {scores['error']:.2f}%"
        axis.text(scores["ece"], place, text, va="center", fontsize=7)
    axis.invert_yaxis()
    axis.set(xlabel="calibration error on the test digits", xlim=(0, 1.9 * max(calibration[name]["ece"] for name in names)))
    axis.tick_params(labelsize=8)
    caption = (
        "One dot for each draw, in the color of its class. Below: mutual information (MI) against the angle, and how well "
        "each net is calibrated on the digits as they are."
    )
    return save(drawing, context.out / "rotated-digit.png", 'A "1" turned step by step', caption)


def _scatter(axis: Any, degrees: Tensor, values: Tensor, title: str) -> None:
    """Plot up to six classes, those predicted at some angle and the five highest on average, with draws side by side."""
    front = values.mean(0).argmax(1)
    classes = sorted(set(front.tolist()) | set(values.mean((0, 1)).topk(5).indices.tolist()))[:6]
    step = float(degrees[1] - degrees[0]) if len(degrees) > 1 else 1.0
    jitter = torch.linspace(-0.35, 0.35, len(values)) * step
    for number in classes:
        x = (degrees[None] + jitter[:, None]).flatten()
        axis.scatter(x, values[:, :, number].flatten(), s=2, color=f"C{number}", label=str(number), linewidths=0)
    axis.set_title(title, fontsize=10)
