"""Whether the dense model knows anything: one that answers as if it had seen no input is compressed to nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from svdcompress.sources import Data
from svdcompress.train import evaluate

EXAMPLES = 2000
"""At most so many of the validation data are looked at: they may have to be read from files."""


def no_skill(model: nn.Module, data: Data, device: torch.device | str = "cpu") -> str | None:
    """A warning if a model is no better than one and the same answer to all inputs, on some of the validation data; else None.

    That answer is the commonest class, or the targets' mean, of the very examples that are looked at. A classifier has to be
    no better by its NLL either: where one class is rare, its probabilities may tell more than its answers.
    """
    count = len(data.validation)
    chosen = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:EXAMPLES].sort().values
    some = data.validation if count <= EXAMPLES else data.validation.subset(chosen)
    try:
        targets = torch.cat([targets.reshape(len(targets), -1) for _, targets in some.batches(EXAMPLES)])
        blind = _blind(targets, data)
    except RuntimeError:  # targets of several shapes, say: there is no one answer to all
        return None
    metrics = evaluate(model, some, data.task, device=device, scale=data.target_scale)
    if any(metrics[name] < value or not value for name, value in blind.items()):
        return None
    said = " and ".join(f"{name} {metrics[name]:.4g} (one and the same answer to all: {blind[name]:.4g})" for name in blind)
    return (
        f"the dense model has learned nothing that could be kept: on the validation data {said}. Do its weights fit it, and is "
        "the data prepared as in its training (data.transform)? Does it need more dense.epochs, or another dense.lr?"
    )


def _blind(targets: Tensor, data: Data) -> dict[str, float]:
    """Figures of the one answer that fits best, from targets (N, numbers)."""
    if data.task == "classification":
        share = torch.bincount(targets.long().flatten()).double() / targets.numel()
        return {"error": 100 * (1 - float(share.max())), "nll": float(torch.special.entr(share).sum())}
    if data.task == "binary":
        share = targets.double().mean(0)
        entropy = torch.special.entr(share) + torch.special.entr(1 - share)
        return {"error": 100 * float(torch.minimum(share, 1 - share).mean()), "nll": float(entropy.mean())}
    values = targets.double()
    scale = 1.0 if data.target_scale is None else data.target_scale[1]
    return {"rmse": scale * float((values - values.mean(0)).square().mean().sqrt())}
