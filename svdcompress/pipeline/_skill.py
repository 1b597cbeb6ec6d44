"""Whether the dense model knows anything: one that answers as if it had seen no input is compressed to nothing."""

from __future__ import annotations

import torch

from svdcompress.pipeline._loss import all_targets
from svdcompress.sources import Data


def no_skill(metrics: dict[str, float], data: Data) -> str | None:
    """A warning if a model's validation figures are no better than those of one and the same answer to all; else None.

    metrics: as `evaluate` gives them for the validation data. That answer is the commonest class, or the targets' mean.
    """
    targets = all_targets(data.validation)
    if data.task == "classification":
        name, unit, answer = "error", " %", "the commonest class"
        blind = 100 * (1 - float(torch.bincount(targets.long().flatten()).max()) / targets.numel())
    elif data.task == "binary":
        name, unit, answer = "error", " %", "the commoner of both answers"
        share = targets.double().reshape(len(targets), -1).mean(0)
        blind = 100 * float(torch.minimum(share, 1 - share).mean())
    else:
        name, unit, answer = "rmse", "", "the mean"
        columns = targets.double().reshape(len(targets), -1)
        blind = float((columns - columns.mean(0)).square().mean().sqrt()) * (data.target_scale or (0.0, 1.0))[1]
    if metrics[name] < blind or blind == 0:
        return None
    return (
        f"on the validation data the dense model's {name} is {metrics[name]:.4g}{unit}, and that of always answering {answer} "
        f"{blind:.4g}{unit}: it has learned nothing that could be kept. Do its weights fit it, and is the data prepared as in "
        "its training (data.transform)? Does it need more dense.epochs, or another dense.lr?"
    )
