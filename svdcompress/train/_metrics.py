"""Figures of a model on examples: error in percent or RMSE, and the mean negative log likelihood in nats."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from svdcompress.errors import DataError
from svdcompress.sources import IGNORED, Examples, call, classes_second, gaussian_heads, like, main_output

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
    dim: int = 1,
) -> dict[str, float]:
    """Metrics of the deterministic model (`eval()`) on all examples.

    classification, binary: {"error": per cent, "nll"}. regression, gaussian: {"rmse", "nll"} in the target's own units.
    tau: 1 / noise variance of a regression, in the units of the loss (None: the one that fits these examples best).
    scale: mean and standard deviation that were taken off the targets.
    dim: the dimension of the output that holds the classes; positions of the class -100 do not count.
    """
    training = model.training
    model.eval()
    parts = []
    for inputs, targets in examples.batches(batch_size, device=device):
        parts.append(_sums(call(model, inputs), targets, task, dim))
    model.train(training)
    first, second, count = (sum(part[index] for part in parts) for index in range(3))
    if not count:
        raise DataError("data.target: every position has the class -100, which does not count: there is nothing to judge by")
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


def _sums(output: object, target: Tensor, task: str, dim: int) -> tuple[Tensor, Tensor, int]:
    """Sum of errors (or of squares), sum of negative log likelihoods, and how many numbers they are of."""
    if task == "classification":
        logits = classes_second(main_output(output).float(), dim)
        counts = target != IGNORED
        wrong = ((logits.argmax(1) != target) & counts).double().sum()
        nll = F.cross_entropy(logits, target, reduction="sum", ignore_index=IGNORED).double()
        return wrong, nll, int(counts.sum())
    if task == "binary":
        logits = main_output(output).float()
        target = like(target, logits).float()
        wrong = ((logits > 0) != (target > 0.5)).double().sum()
        return wrong, F.binary_cross_entropy_with_logits(logits, target, reduction="sum").double(), target.numel()
    if task == "gaussian":
        mean, log_variance = gaussian_heads(output, dim)
        square = (like(target, mean) - mean).double().square()
        nll = 0.5 * (log_variance.double() + square * torch.exp(-log_variance.double()) + math.log(2 * math.pi))
        return square.sum(), nll.sum(), mean.numel()
    mean = main_output(output)
    square = (like(target, mean) - mean).double().square().sum()
    return square, square, mean.numel()


def score(metrics: dict[str, float]) -> tuple[float, float]:
    """What epochs and thresholds are chosen by, smaller is better: error (or RMSE), then NLL."""
    return metrics.get("error", metrics.get("rmse", math.inf)), metrics["nll"]
