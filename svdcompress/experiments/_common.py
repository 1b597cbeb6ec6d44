"""What the experiments share: where they run, and how they train."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from svdcompress.errors import RecipeError, TrainingError, nearest
from svdcompress.objective import ELBO, Schedule
from svdcompress.recipe import DataSection
from svdcompress.relevance import relevance

SettingsT = TypeVar("SettingsT")


@dataclass
class Context:
    """Where an experiment runs: its folder, seed and device (as torch names it), the data that the recipe names, the function
    that reports progress, and the seconds that each training took."""

    out: Path
    seed: int = 0
    device: str = "cpu"
    data: DataSection = field(default_factory=lambda: DataSection())
    say: Callable[[str], None] = lambda line: None
    seconds: dict[str, float] = field(default_factory=dict)


def read_settings(kind: type[SettingsT], given: Mapping[str, Any], name: str) -> SettingsT:
    """Settings of an experiment from what the recipe says. Raises RecipeError for an unknown field or a wrong kind of value."""
    known = {entry.name: entry for entry in dataclasses.fields(cast(Any, kind))}
    for key, value in given.items():
        where = f"experiment.settings.{key}"
        if key not in known:
            near = nearest(key, known)
            hint = f"did you mean {near}?" if near else f"{name} has {', '.join(known)}"
            raise RecipeError(f"{where}: unknown field; {hint}")
        default = known[key].default
        whole = isinstance(default, int) and not isinstance(default, bool)
        fits = isinstance(value, int) if whole else isinstance(value, int | float) if isinstance(default, float) else True
        if not fits or isinstance(value, bool) or (whole and value < 0):
            raise RecipeError(f"{where}: should be a {'whole ' if whole else ''}number like {default!r} (got {value!r})")
    return kind(**given)


def train(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Callable[[Any, Tensor], Tensor],
    context: Context,
    *,
    stage: str,
    epochs: int,
    batch_size: int = 100,
    lr: float = 1e-3,
    lr_log_sigma2: float | None = None,
    weight_decay: float = 0.0,
    beta: Schedule | None = None,
) -> nn.Module:
    """Train in place with Adam; the learning rate falls to 0 over the second half. The model ends on the CPU in `eval()`.

    A plain loop: with a few hundred examples, what the main loop does to be resumable would cost more than the steps.
    loss: mean negative log likelihood of (output, targets). beta: schedule of the ELBO; None: the loss alone.
    Raises TrainingError if the last loss is not finite.
    """
    context.say(f"{stage}: {epochs} epochs")
    started, device = time.monotonic(), torch.device(context.device)
    model, x, y = model.to(device).train(), x.to(device), y.to(device)
    objective = loss if beta is None else ELBO(model, loss, len(x), beta)
    optimizer = torch.optim.Adam(_groups(model, lr, lr_log_sigma2 or lr, weight_decay))
    order = torch.Generator().manual_seed(context.seed)
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: min(1.0, 2 * (1 - epoch / epochs)))
    value = torch.zeros(())
    for epoch in range(epochs):
        if isinstance(objective, ELBO):
            objective.set_epoch(epoch)
        for index in torch.randperm(len(x), generator=order).split(batch_size):
            index = index.to(device)
            optimizer.zero_grad()
            value = objective(model(x[index]), y[index])
            value.backward()
            optimizer.step()
        falling.step()
    if not bool(value.isfinite()):
        raise TrainingError(f"{stage}: the loss is not finite; lower the learning rate")
    context.seconds[stage] = time.monotonic() - started
    return model.cpu().eval()


def _groups(model: nn.Module, lr: float, lr_log_sigma2: float, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: means with weight decay, log variances without."""
    means = [p for name, p in model.named_parameters() if not name.endswith("log_sigma2")]
    spreads = [p for name, p in model.named_parameters() if name.endswith("log_sigma2")]
    return [{"params": means, "lr": lr, "weight_decay": weight_decay}, {"params": spreads, "lr": lr_log_sigma2}]


def sparsity(model: nn.Module) -> dict[str, Any]:
    """How many of a variational model's weights are kept."""
    masks = relevance(model)
    return {"weights": masks.total, "kept": masks.kept, "compression": round(masks.total / max(masks.kept, 1), 1)}
