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
    each = losses(model, examples, task, device=device, batch_size=batch_size, dim=dim)
    first, second, count = (part.sum() for part in each)
    if not count:
        raise DataError("data.target: every position has the class -100, which does not count: there is nothing to judge by")
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
    dim: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """What each example adds to the metrics of the deterministic model, (N,) each, on the CPU: wrong answers or squares,
    negative log likelihoods (a regression's: squares again, as its noise is not known here), and of how many numbers.

    dim: as for `evaluate`; an example whose positions all have the class -100 is of 0 numbers.
    """
    training = model.training
    model.eval()
    parts = []
    for inputs, targets in examples.batches(batch_size, device=device):
        each = _each(call(model, inputs), targets, task, dim)
        parts.append([part.reshape(len(part), -1).sum(1, dtype=torch.float64).cpu() for part in each])
    model.train(training)
    first, second, count = (torch.cat(column) for column in zip(*parts, strict=True))
    return first, second, count


def _each(output: object, target: Tensor, task: str, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Errors (or squares) and negative log likelihoods of each number, and whether it counts."""
    if task == "classification":
        logits = classes_second(main_output(output).float(), dim)
        counts = target != IGNORED
        nll = F.cross_entropy(logits, target, reduction="none", ignore_index=IGNORED)
        return (logits.argmax(1) != target) & counts, nll, counts
    if task == "binary":
        logits = main_output(output).float()
        target = like(target, logits).float()
        nll = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        return (logits > 0) != (target > 0.5), nll, torch.ones_like(nll)
    if task == "gaussian":
        mean, log_variance = gaussian_heads(output, dim)
        square = (like(target, mean) - mean).double().square()
        nll = 0.5 * (log_variance.double() + square * torch.exp(-log_variance.double()) + math.log(2 * math.pi))
        return square, nll, torch.ones_like(square)
    mean = main_output(output)
    square = (like(target, mean) - mean).double().square()
    return square, square, torch.ones_like(square)


def score(metrics: dict[str, float]) -> tuple[float, float]:
    """What epochs and thresholds are chosen by, smaller is better: error (or RMSE), then NLL."""
    return metrics.get("error", metrics.get("rmse", math.inf)), metrics["nll"]
