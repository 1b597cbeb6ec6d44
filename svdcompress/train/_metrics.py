"""Figures of a model on examples: error in percent or RMSE, and the mean negative log likelihood in nats."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from svdcompress.sources import Examples, call, gaussian_heads, main_output

EVALUATION_BATCH = 1000


@torch.no_grad()
def evaluate(
    model: nn.Module,
    examples: Examples,
    task: str,
    *,
    device: torch.device | str = "cpu",
    batch_size: int = EVALUATION_BATCH,
    tau: float | None = None,
    scale: tuple[float, float] | None = None,
) -> dict[str, float]:
    """Metrics of the deterministic model (`eval()`) on all examples.

    classification, binary: {"error": per cent, "nll"}. regression, gaussian: {"rmse", "nll"} in the target's own units.
    tau: 1 / noise variance of a regression, in the units of the loss (None: the one that fits these examples best).
    scale: mean and standard deviation that were taken off the targets.
    """
    first, second, count = (part.sum() for part in losses(model, examples, task, device=device, batch_size=batch_size))
    if task in ("classification", "binary"):
        return {"error": 100 * float(first) / float(count), "nll": float(second) / float(count)}
    std = 1.0 if scale is None else scale[1]
    mean_square = float(first) / float(count)
    if task == "gaussian":
        nll = float(second) / float(count)
    else:
        precision = tau if tau is not None else 1 / max(mean_square, 1e-12)
        nll = 0.5 * (precision * mean_square + math.log(2 * math.pi / precision))
    return {"rmse": std * math.sqrt(mean_square), "nll": nll + math.log(std)}


@torch.no_grad()
def losses(
    model: nn.Module,
    examples: Examples,
    task: str,
    *,
    device: torch.device | str = "cpu",
    batch_size: int = EVALUATION_BATCH,
) -> tuple[Tensor, Tensor, Tensor]:
    """What each example adds to the metrics of the deterministic model, (N,) each, on the CPU: wrong answers or squares,
    negative log likelihoods (a regression's: squares again, as its noise is not known here), and of how many numbers.
    """
    training = model.training
    model.eval()
    parts = []
    for inputs, targets in examples.batches(batch_size, device=device):
        each = _each(call(model, inputs), targets, task)
        parts.append([part.reshape(len(part), -1).sum(1).cpu().double() for part in each])
    model.train(training)
    first, second, count = (torch.cat(column) for column in zip(*parts, strict=True))
    return first, second, count


def _each(output: object, target: Tensor, task: str) -> tuple[Tensor, Tensor, Tensor]:
    """Errors (or squares) and negative log likelihoods of each number, and ones."""
    if task == "classification":
        logits = main_output(output).float()
        nll = F.cross_entropy(logits, target, reduction="none")
        return logits.argmax(1) != target, nll, torch.ones_like(nll)
    if task == "binary":
        logits = main_output(output).float()
        target = target.view_as(logits).float()
        nll = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        return (logits > 0) != (target > 0.5), nll, torch.ones_like(nll)
    if task == "gaussian":
        mean, log_variance = gaussian_heads(output)
        square = (target.view_as(mean) - mean).double().square()
        nll = 0.5 * (log_variance.double() + square * torch.exp(-log_variance.double()) + math.log(2 * math.pi))
        return square, nll, torch.ones_like(square)
    mean = main_output(output)
    square = (target.view_as(mean) - mean).double().square()
    return square, square, torch.ones_like(square)


def score(metrics: dict[str, float]) -> tuple[float, float]:
    """What epochs and thresholds are chosen by, smaller is better: error (or RMSE), then NLL."""
    return metrics.get("error", metrics.get("rmse", math.inf)), metrics["nll"]
