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
    training = model.training
    model.eval()
    parts = []
    for inputs, targets in examples.batches(batch_size, device=device):
        parts.append(_sums(call(model, inputs), targets, task))
    model.train(training)
    first, second, count = (sum(part[index] for part in parts) for index in range(3))
    if task in ("classification", "binary"):
        return {"error": 100 * float(first) / count, "nll": float(second) / count}
    std = 1.0 if scale is None else scale[1]
    mean_square = float(first) / count
    if task == "gaussian":
        nll = float(second) / count
    else:
        precision = tau if tau is not None else 1 / max(mean_square, 1e-12)
        nll = 0.5 * (precision * mean_square + math.log(2 * math.pi / precision))
    return {"rmse": std * math.sqrt(mean_square), "nll": nll + math.log(std)}


def _sums(output: object, target: Tensor, task: str) -> tuple[Tensor, Tensor, int]:
    """Sum of errors (or of squares), sum of negative log likelihoods, and how many numbers they are of."""
    if task == "classification":
        logits = main_output(output).float()
        wrong = (logits.argmax(1) != target).double().sum()
        return wrong, F.cross_entropy(logits, target, reduction="sum").double(), target.numel()
    if task == "binary":
        logits = main_output(output).float()
        target = target.view_as(logits).float()
        wrong = ((logits > 0) != (target > 0.5)).double().sum()
        return wrong, F.binary_cross_entropy_with_logits(logits, target, reduction="sum").double(), target.numel()
    if task == "gaussian":
        mean, log_variance = gaussian_heads(output)
        square = (target.view_as(mean) - mean).double().square()
        nll = 0.5 * (log_variance.double() + square * torch.exp(-log_variance.double()) + math.log(2 * math.pi))
        return square.sum(), nll.sum(), mean.numel()
    mean = main_output(output)
    square = (target.view_as(mean) - mean).double().square().sum()
    return square, square, mean.numel()


def score(metrics: dict[str, float]) -> tuple[float, float]:
    """What epochs and thresholds are chosen by, smaller is better: error (or RMSE), then NLL."""
    return metrics.get("error", metrics.get("rmse", math.inf)), metrics["nll"]
