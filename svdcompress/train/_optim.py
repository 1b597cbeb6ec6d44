"""Optimizers with a group of their own for log_sigma2, and learning-rate schedules."""

from __future__ import annotations

import math

import torch
from torch import nn

from svdcompress.errors import ModelError
from svdcompress.layers import variance_parameters
from svdcompress.recipe import LrSchedule, Training, in_epochs


def make_optimizer(model: nn.Module, settings: Training, lr_log_sigma2: float | None = None) -> torch.optim.Optimizer:
    """The optimizer that a recipe names, fused where torch can; log_sigma2 has its own learning rate and no weight decay."""
    noise = {id(own): own for own in variance_parameters(model)}
    means = [p for p in model.parameters() if p.requires_grad and id(p) not in noise]
    spreads = [p for p in noise.values() if p.requires_grad]
    if not means and not spreads:
        raise ModelError(
            "model: all its parameters are frozen (requires_grad is False): nothing can be trained; leave some free, "
            "in the factory that makes it"
        )
    groups = [{"params": means, "weight_decay": settings.weight_decay}] if means else []
    if spreads:
        groups.append({"params": spreads, "lr": lr_log_sigma2 or settings.lr, "weight_decay": 0.0})
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in means + spreads)
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, fused=fused)
    kind = torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=settings.lr, fused=fused)


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
