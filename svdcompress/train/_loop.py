"""The loop: batches, objective, steps, figures of each epoch, and a state to go on from."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.batch import call, to_device
from svdcompress.errors import CheckpointError, DataError, Interrupted, SvdcError, TrainingError, shortened
from svdcompress.layers import variational_layers
from svdcompress.likelihoods import Loss, score
from svdcompress.objective import ELBO, kl_divergence
from svdcompress.recipe import Training
from svdcompress.relevance import relevance
from svdcompress.sources import Examples
from svdcompress.train._distill import Teacher
from svdcompress.train._failed import explained_failure
from svdcompress.train._gradients import nothing
from svdcompress.train._nonfinite import explain
from svdcompress.train._optim import LrFactor, make_optimizer
from svdcompress.train._progress import Bars
from svdcompress.train._shrink import reshape
from svdcompress.train._state import StateFile, mix, seed_everything

CHECK_EVERY = 20
"""Steps between looks at the loss on an accelerator, where each look waits for the device; on a CPU each step is looked at."""


@dataclass
class Fit:
    """What a fit reports: a dict per epoch, and which epoch's weights the model now has."""

    history: list[dict[str, Any]] = field(default_factory=list)
    kept_epoch: int = 0
    seconds: float = 0.0


class _Late(Exception):
    """A loss that is not finite, seen after some more steps."""


@dataclass
class _Best:
    score: tuple[float, float] = (math.inf, math.inf)
    epoch: int = 0
    weights: dict[str, Tensor] | None = None


@dataclass
class Loop:
    """One fit on its way: what it works with, where it stands, and what an epoch does."""

    model: nn.Module
    examples: Examples
    loss: Loss
    settings: Training
    accelerator: Any
    _: KW_ONLY
    stage: str
    elbo: ELBO | None
    teacher: Teacher | None
    lr_log_sigma2: float | None
    noise: bool
    total: int | None
    seed: int
    compiled: bool
    bars: Bars | None
    stop: Callable[[], bool]
    file: StateFile

    def run(
        self,
        validate: Callable[[nn.Module], dict[str, float]] | None,
        shrink_from: float,
        shrink: Callable[[nn.Module], bool] | None,
        on_epoch: Callable[[dict[str, Any]], None] | None,
    ) -> Fit:
        started = time.monotonic()
        model, epochs, file = self.model, self.settings.epochs, self.file
        self.device = self.accelerator.device
        self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes
        model.to(self.device)
        if self.teacher is not None:
            self.teacher.model.to(self.device).eval()
        self._optimize()
        self.factor = LrFactor(self.settings.schedule, epochs)
        self.steps = 0
        result, best, first = Fit(), _Best(), 0
        if shrink_from < epochs:
            self.total = self.total or relevance(model).total
        if (saved := file.load()) is not None:
            first = self._restore(saved, result, best)
        elif self.rank == 0:
            file.save(self._state(0, result, best))
        self.kept = f"The state before it is kept in {file.path}." if file.path else "The model has its last good weights."
        self.synced = self.accelerator.prepare_model(model) if self.world > 1 else model
        self._compile()
        if self.bars is not None:
            self.bars.start(self.stage, epochs, first)
        self.look_each_step, self.saves = self.device.type == "cpu", file.path is not None
        try:
            epoch = first
            while epoch < epochs:
                self._mode()
                try:
                    row = self._epoch(epoch)
                except _Late:  # go back and look at each step, so that step and layer are the right ones
                    self.look_each_step = True
                    result.history.clear()
                    saved = file.load()
                    assert saved is not None  # each epoch is saved where steps are looked at late
                    epoch = self._restore(saved, result, best)
                    continue
                model.eval()
                self._figures(row, validate, best)
                result.history.append(row)
                if on_epoch is not None:
                    on_epoch(row)
                if self.bars is not None:
                    self.bars.epoch(row)
                epoch += 1
                shrunk = shrink is not None and shrink_from <= epoch < epochs and self.world == 1 and shrink(model)
                if shrunk:
                    self._optimize()
                    if self.compiled:
                        torch.compiler.reset()  # after eight networks of other shapes torch would compile no more
                    self._compile()
                    best.score, best.weights = _Best().score, None  # those of another shape
                if self.rank == 0 and (shrunk or epoch == epochs or file.due()):
                    file.save(self._state(epoch, result, best))
        except (SvdcError, KeyboardInterrupt):
            raise
        except Exception as error:  # whatever the user's model, data or machine raises
            found = explained_failure(error, self.stage, self.settings.batch_size, self.kept)
            if found is None:
                raise
            raise found from error
        finally:
            self._unwrap()
            model.eval()
        result.kept_epoch = epochs
        if best.weights is not None:
            model.load_state_dict(best.weights)
            result.kept_epoch = best.epoch
        result.seconds = time.monotonic() - started
        return result

    def _compile(self) -> None:
        self.network: Any = self.synced
        if self.compiled:
            self.network = torch.compile(self.synced)
            if self.elbo is not None:
                self.elbo.divergence = torch.compile(kl_divergence)

    def _optimize(self) -> None:
        """An optimizer for the parameters as they are now."""
        self.optimizer = make_optimizer(self.model, self.settings, self.lr_log_sigma2)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        scaled = self.accelerator.scaler is not None
        self.scaled = self.accelerator.prepare_optimizer(self.optimizer) if scaled else self.optimizer

    def _mode(self) -> None:
        self.model.train()
        if not self.noise:
            for _, layer in variational_layers(self.model):
                layer.eval()

    def _epoch(self, epoch: int) -> dict[str, Any]:
        seed_everything(self.seed, self.stage, epoch, "noise", self.rank)
        settings, device = self.settings, self.device
        order = mix(self.seed, self.stage, epoch, "order")
        losses, nlls, kls = [], [], []
        per_step = settings.batch_size * self.world
        batches = max(1, math.ceil(len(self.examples) / per_step))
        group = 0  # batches since the last step
        stream = self.examples.batches(settings.batch_size, shuffle=order, rank=self.rank, world=self.world, device=device)
        told = _final_known(stream) if settings.accumulate > 1 else ((batch, True) for batch in stream)
        for index, ((x, y), final) in enumerate(told):
            where = epoch + index / batches
            group += 1
            last = final or group == settings.accumulate
            # Both ways within no_sync: it is the forward pass that prepares DDP to average the gradients.
            with nullcontext() if last or self.world == 1 else self.accelerator.no_sync(self.synced):
                loss, nll, kl = self._forward(x, y, where)
                if (self.look_each_step or index % CHECK_EVERY == 0) and not math.isfinite(value := loss.item()):
                    raise self._not_finite(x, epoch, value)
                self._backward(loss / settings.accumulate if settings.accumulate > 1 else loss)
            if last:
                self._step(where, group)
                group = 0
            losses.append(loss.detach())
            nlls.append(nll)
            if kl is not None:
                kls.append(kl)
            self.steps += 1
            if self.bars is not None:
                self.bars.step(where, loss.item)
            if self.stop():
                raise Interrupted(f"stopped in {self.stage}, epoch {epoch + 1} of {settings.epochs}. {self.kept}")
        if not losses:
            raise DataError(f"{self.stage}.batch_size: {per_step} is more than the {len(self.examples)} training examples")
        mean = torch.stack([torch.stack(losses).mean(), torch.stack(nlls).mean()])
        loss_mean, nll_mean = (_mean_of_ranks(mean) if self.world > 1 else mean).tolist()
        if not math.isfinite(loss_mean):
            raise self._not_finite(x, epoch, loss_mean)
        return {
            "stage": self.stage,
            "epoch": epoch + 1,
            "loss": loss_mean,
            "nll": nll_mean,
            "kl": float(torch.stack(kls).mean()) if kls else None,
            "beta": self.elbo.beta if self.elbo is not None else None,
            "lr": self.optimizer.param_groups[0]["lr"],
        }

    def _not_finite(self, x: Any, epoch: int, value: float) -> Exception:
        if not self.look_each_step and self.saves and self.world == 1:
            return _Late()
        return explain(self.model, x, self.stage, self.steps, epoch, value, self.kept, self._autocast())

    def _autocast(self) -> AbstractContextManager[Any]:
        return self.accelerator.autocast() if self.accelerator.native_amp else nullcontext()

    def _forward(self, x: Any, y: Tensor, where: float) -> tuple[Tensor, Tensor, Tensor | None]:
        """Loss, and its detached parts: negative log likelihood and KL (None where it has no weight)."""
        with self._autocast():
            output = call(self.network, x)
            loss = self.loss(output, y)
            if self.teacher is not None:
                loss = self.teacher.mix(loss, output, x)
        nll, kl = loss.detach(), None
        if self.elbo is not None:
            self.elbo.set_epoch(where)
            loss = self.elbo(loss)
            kl = self.elbo.last_kl
        return (loss + nothing(self.model) if self.world > 1 else loss), nll, kl

    def _backward(self, loss: Tensor) -> None:
        if self.accelerator.scaler is not None:
            self.accelerator.backward(loss)
        else:
            loss.backward()

    def _step(self, where: float, batches: int) -> None:
        """One step from the gradients of so many batches, fewer than are accumulated at the end of an epoch."""
        if batches < self.settings.accumulate:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(self.settings.accumulate / batches)
        factor = self.factor(where)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        if self.settings.clip is not None:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.scaled.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _figures(self, row: dict[str, Any], validate: Callable | None, best: _Best) -> None:
        if next(variational_layers(self.model), None) is not None:
            masks = relevance(self.model)
            row["sparsity"] = 1 - masks.kept / (self.total or masks.total)
        if validate is None:
            return
        metrics = validate(self.model)
        row.update({f"val_{name}": value for name, value in metrics.items()})
        if self.settings.keep == "best" and score(metrics) < best.score:
            best.score, best.epoch = score(metrics), row["epoch"]
            best.weights = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}

    def _unwrap(self) -> None:
        if self.synced is not self.model:
            self.accelerator.unwrap_model(self.synced, keep_fp32_wrapper=False)
            self.model.__dict__.pop("forward", None)  # what accelerate's mixed precision leaves on the instance

    def _state(self, epoch: int, result: Fit, best: _Best) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "epoch": epoch,
            "steps": self.steps,
            "model": self.model.state_dict(),
            "surgery": getattr(self.model, "surgery", None) or {},
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.accelerator.scaler.state_dict() if self.accelerator.scaler is not None else None,
            "history": result.history,
            "best": {"score": list(best.score), "epoch": best.epoch, "weights": best.weights},
        }

    def _restore(self, saved: dict[str, Any], result: Fit, best: _Best) -> int:
        try:
            return self._taken(saved, result, best)
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            reason = shortened(f"{type(error).__name__}: {error}")
            raise CheckpointError(
                f"{self.file.path}: damaged, or of another model ({reason}); remove it to start this stage again"
            ) from error

    def _taken(self, saved: dict[str, Any], result: Fit, best: _Best) -> int:
        if saved["stage"] != self.stage:
            raise TrainingError(f"the saved state belongs to the stage {saved['stage']}, not to {self.stage}")
        if saved.get("surgery"):
            reshape(self.model, saved["surgery"], saved["model"])
            self._optimize()
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if saved["scaler"] is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(saved["scaler"])
        self.steps = saved["steps"]
        result.history.extend(saved["history"])
        best.score, best.epoch = tuple(saved["best"]["score"]), saved["best"]["epoch"]
        best.weights = saved["best"]["weights"]
        if best.weights is not None:
            best.weights = to_device(best.weights, self.device)
        return saved["epoch"]


def _final_known(batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Each batch, and whether it is the last one: read one ahead."""
    stream = iter(batches)
    waiting = list(islice(stream, 1))
    for batch in stream:
        yield waiting.pop(), False
        waiting.append(batch)
    yield from ((batch, True) for batch in waiting)


def _mean_of_ranks(values: Tensor) -> Tensor:
    """The mean over all processes."""
    torch.distributed.all_reduce(values)
    return values / torch.distributed.get_world_size()
