"""Optimizers with a separate group for log_sigma2, and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.errors import ModelError
from svdcompress.layers import variance_parameters
from svdcompress.recipe import LrSchedule, Training, in_epochs

VARIANCE_LR = 1e-3
"""The highest learning rate of log variances if SGD trains the means and none is set: SGD's is far too large for Adam."""


def rate_of_log_sigma2(settings: Training, wanted: float | None) -> float:
    """The learning rate of log sigma2: `wanted`, or if None that of the means (with SGD at most VARIANCE_LR)."""
    return wanted or (min(settings.lr, VARIANCE_LR) if settings.optimizer == "sgd" else settings.lr)


def make_optimizer(model: nn.Module, settings: Training, lr_log_sigma2: float | None = None) -> torch.optim.Optimizer:
    """The optimizer that a recipe names, fused if torch can; log_sigma2 has its own learning rate and no weight decay.

    sgd: for the means; log_sigma2 has Adam, as its gradients (beta / 2N from the KL) would hardly move it with SGD. Raises
    ModelError if all parameters are frozen.
    """
    noise = {id(own): own for own in variance_parameters(model)}
    means = [p for p in model.parameters() if p.requires_grad and id(p) not in noise]
    spreads = [p for p in noise.values() if p.requires_grad]
    if not means and not spreads:
        raise ModelError(
            "model: all its parameters are frozen (requires_grad is False), so nothing can be trained; unfreeze some in the "
            "factory that makes it"
        )
    rate = rate_of_log_sigma2(settings, lr_log_sigma2)
    groups = [{"params": means, "weight_decay": settings.weight_decay}] if means else []
    variances = [{"params": spreads, "lr": rate, "weight_decay": 0.0}] if spreads else []
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in means + spreads)
    if settings.optimizer == "sgd":
        parts: list[torch.optim.Optimizer] = []
        if groups:
            parts.append(torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, fused=fused))
        if variances:
            parts.append(_counted(torch.optim.Adam(variances, fused=fused), spreads))
        return parts[0] if len(parts) == 1 else _Together(parts)
    kind = torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam
    return _counted(kind(groups + variances, lr=settings.lr, fused=fused), spreads)


def _counted(optimizer: torch.optim.Optimizer, spreads: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Count each step as a change of the log variances, which torch's fused steps do not do, so that they are known to be
    trained even if a step is too small to change them."""

    def count(*_: Any) -> None:
        torch.autograd.graph.increment_version(spreads)

    optimizer.register_step_post_hook(count)
    return optimizer


class _Together(torch.optim.Optimizer):
    """Several optimizers that step as one; its groups are theirs, one after another."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = parts
        self._link()

    def _link(self) -> None:
        """Take over the groups that the parts have now, so that a learning rate set in them has an effect."""
        self.param_groups = [group for part in self._parts for group in part.param_groups]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step with each optimizer."""
        for part in self._parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """The state of each optimizer."""
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a saved state."""
        for part, state in zip(self._parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._link()


def lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer's state the memory layout of its parameters: fused steps go through both in memory order, and a state
    may come from a device with another layout."""
    for part in getattr(optimizer, "_parts", [optimizer]):
        for parameter, state in part.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                    state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


class LrFactor:
    """The factor on all learning rates as a function of the epoch, fractions allowed."""

    def __init__(self, schedule: LrSchedule, epochs: int) -> None:
        self.name = schedule.name
        self.epochs = epochs
        self.start = in_epochs(schedule.start, epochs)
        self.warmup = in_epochs(schedule.warmup, epochs)
        self.end = schedule.end

    def __call__(self, epoch: float) -> float:
        if epoch < self.warmup:
            return epoch / self.warmup
        if self.name == "constant" or epoch <= self.start or self.start >= self.epochs:
            return 1.0
        fallen = min((epoch - self.start) / (self.epochs - self.start), 1.0)
        left = 1 - fallen if self.name == "linear" else 0.5 * (1 + math.cos(math.pi * fallen))
        return self.end + (1 - self.end) * left
