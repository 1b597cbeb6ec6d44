"""Measures networks for yields (R2, doubt, coverage), pitch (agreement, time of a frame) and noise (PSNR)."""

from __future__ import annotations

import argparse
import copy
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from frame import milliseconds
from models import crepe, denoise
from real_peers import macs
from torch import Tensor, nn

from svdcompress import convert_dropout, export_onnx, to_dense
from svdcompress.batch import call, main_output
from svdcompress.pipeline import OpenRun
from svdcompress.uncertainty import mc_predict, paired_means

NINETY = 1.6449
"""A normal variable is within this many deviations of its mean with probability 0.9."""

FRAMES = 2000
"""The number of tones with exact pitch, made with a seed that no other data have."""


def sizes(model: nn.Module, example: Any) -> dict[str, Any]:
    """Parameters, those that are not 0, and multiply-accumulates of one example, as counted by the package."""
    means = [p for name, p in model.named_parameters() if "log_" not in name]
    return {
        "parameters": sum(p.numel() for p in means),
        "nonzero": sum(int(p.count_nonzero()) for p in means),
        "macs": macs(model, example),
    }


def spearman(a: Tensor, b: Tensor) -> float:
    """The rank correlation; ties get their mean rank."""
    from scipy.stats import spearmanr

    found: Any = spearmanr(a.numpy(), b.numpy())
    return float(found.statistic)


def drawn(model: nn.Module, examples: Any, task: str, samples: int, device: torch.device) -> tuple[Tensor, ...]:
    """Mean, variance over draws, variance that the network itself predicts (1 if it predicts none), targets; each (N,)."""
    generator, parts = torch.Generator().manual_seed(0), []
    for x, y in examples.batches(200, device=device):
        found = mc_predict(model, x, samples, task=task, generator=generator)
        own = found.aleatoric if task == "gaussian" else torch.ones_like(found.mean)
        parts.append([each.flatten().double().cpu() for each in (found.mean, found.epistemic, own, y)])
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


def noise(mean: Tensor, variance: Tensor, own: Tensor, target: Tensor) -> float:
    """The factor of the network's own variance that, added to the draws', makes targets most likely; from a fine grid."""
    square = (target - mean).square()
    grid = square.mean() / own.mean() * torch.logspace(-4, 1, 1001, dtype=torch.double)
    total = variance + grid[:, None] * own
    return float(grid[(total.log() + square / total).mean(1).argmin()])


def doubts(model: nn.Module, opened: OpenRun, samples: int, count: int | None, device: torch.device) -> dict[str, Any]:
    """Whether the predicted deviation ranks the errors and 90% intervals keep their promise; also each example's values.

    The deviation combines draws and noise. The noise is constant if the loss is the squared error, so that the draws alone
    rank, and predicted by the network if the loss is the Gaussian likelihood; its size is fitted on validation data in either
    case.
    """
    test = opened.data.test
    if count is not None and count < len(test):  # evenly spaced, as the rows of Buchwald-Hartwig are sorted by additive
        test = test.subset(torch.linspace(0, len(test) - 1, count).long())
    task = opened.recipe.task
    factor = noise(*drawn(model, opened.data.validation, task, samples, device))
    mean, variance, own, target = drawn(model, test, task, samples, device)
    error, deviation = (target - mean).abs(), (variance + factor * own).sqrt()
    scale = (opened.data.target_scale or (0.0, 1.0))[1]
    return {
        "r2_of_draws": 1 - float(error.square().mean() / target.var(correction=0)),
        "spearman": spearman(deviation, error),
        "spearman_draws": spearman(variance, error),
        "coverage": float(inside({"error": error, "deviation": deviation}).double().mean()),
        "width": float(2 * NINETY * deviation.mean() * scale),
        "nll": float(surprise({"error": error, "deviation": deviation}).mean()) + math.log(scale),
        "doubted": len(target),
        "each": {"error": error, "deviation": deviation},
    }


def beside(ours: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, list[float]]:
    """Our figure minus another's with its 95% interval, from both's values for each test example: [difference, low, high].

    The intervals of R2, coverage and likelihood use the normal distribution, that of the rank correlation 2,000 bootstrap
    samples.
    """
    from scipy.stats import bootstrap

    found: dict[str, list[float]] = {}
    if "square" in ours and "square" in other:
        less = (other["square"] - ours["square"]) / ours["spread"]
        found["r2_ahead"] = [float(less.mean()), *paired_means(less)]
    if "error" in ours and "error" in other and len(ours["error"]) == len(other["error"]):
        less = inside(ours).double() - inside(other).double()
        found["coverage_ahead"] = [float(less.mean()), *paired_means(less)]
        less = surprise(ours) - surprise(other)
        found["nll_ahead"] = [float(less.mean()), *paired_means(less)]
        pairs = [each[key].numpy() for each in (ours, other) for key in ("deviation", "error")]
        sampled = bootstrap(pairs, ranked, n_resamples=2000, paired=True, vectorized=False, method="percentile", rng=0)
        found["spearman_ahead"] = [ranked(*pairs), *(float(edge) for edge in sampled.confidence_interval)]
    return found


def inside(each: dict[str, Tensor]) -> Tensor:
    """Which errors are within their 90% interval."""
    return each["error"] <= NINETY * each["deviation"]


def surprise(each: dict[str, Tensor]) -> Tensor:
    """Negative log likelihood of each error under a normal distribution with the predicted deviation."""
    error, deviation = each["error"], each["deviation"]
    return deviation.log() + 0.5 * (error / deviation).square() + 0.5 * math.log(2 * math.pi)


def ranked(*pairs: Any) -> float:
    """The rank correlation of the first two minus that of the last two."""
    a, b, c, d = (torch.as_tensor(part) for part in pairs)
    return spearman(a, b) - spearman(c, d)


@torch.no_grad()
def values(model: nn.Module, examples: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """(outputs, targets) of all examples, with the means of the weights."""
    parts = [(main_output(call(model, x)).double().cpu(), y.cpu()) for x, y in examples.batches(200, device=device)]
    return torch.cat([output for output, _ in parts]), torch.cat([y for _, y in parts])


def yield_figures(opened: OpenRun, model: nn.Module, options: argparse.Namespace, *, drawn: bool = False) -> dict[str, Any]:
    """R2 by the mean, and doubt by draws: of our weights, or (if `drawn` is False) by MC dropout of a dense network."""
    device = next(model.parameters()).device
    outputs, targets = values(model.eval(), opened.data.test, device)
    means = outputs[:, : targets.shape[1]]  # log variances follow them
    square, spread = (means.flatten() - targets.flatten().double()).square(), targets.double().var(correction=0)
    found: dict[str, Any] = {
        "r2": 1 - float(square.mean() / spread),
        **sizes(model, next(iter(opened.data.test.batches(2, device=device)))[0]),
    }
    if options.samples:
        doubted = model if drawn else convert_dropout(copy.deepcopy(model)).eval()
        found |= doubts(doubted, opened, options.samples, options.count, device)
    found["each"] = {"square": square, "spread": spread, **found.get("each", {})}
    return found


def pitch_figures(opened: OpenRun, model: nn.Module, options: argparse.Namespace, *, drawn: bool = False) -> dict[str, Any]:
    """Agreement with the full network on the test frames, accuracy on tones, and the time of one frame on one core."""
    device = next(model.parameters()).device
    model.eval()
    pitches = {
        key: crepe.cents(values(net, opened.data.test, device)[0])
        for key, net in (("own", model), ("full", opened.dense.to(device)))
    }
    half = len(pitches["own"]) // 2
    parts = {"agreement": slice(None), "agreement_tones": slice(half), "agreement_speech": slice(half, None)}
    found: dict[str, Any] = {key: crepe.accuracy(pitches["own"][part], pitches["full"][part]) for key, part in parts.items()}
    x, exact = crepe.tones(options.count or FRAMES, 99)
    with torch.inference_mode():
        found["accuracy_tones"] = crepe.accuracy(
            crepe.cents(torch.cat([model(each.to(device)).cpu() for each in x.split(100)])), exact
        )
    return found | sizes(model, x[:2].to(device)) | {"frame_ms": frame(model, x[:1])}


def noise_figures(opened: OpenRun, model: nn.Module, options: argparse.Namespace, *, drawn: bool = False) -> dict[str, Any]:
    """PSNR on whole images of BSD68 with noise of 25, by the means of the weights; also by image, for paired intervals."""
    device = next(model.parameters()).device
    found = denoise.psnr(model.eval(), options.dncnn / "data" / "Set68", device, options.count)
    example = next(iter(opened.data.test.batches(2, device=device)))[0]
    return {"psnr": float(found.mean()), "images": found.tolist(), **sizes(model, example)}


def frame(model: nn.Module, x: Tensor) -> float:
    """Milliseconds of one frame in onnxruntime on one core of this machine."""
    net = to_dense(copy.deepcopy(model).cpu().float()).eval()
    with TemporaryDirectory() as folder:
        return milliseconds(export_onnx(net, Path(folder) / "model.onnx", x, verify=False).path)
