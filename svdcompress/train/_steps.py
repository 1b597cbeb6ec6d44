"""Optimizer steps: the optimizer, its learning rates over the epochs, and the gradient scaler of fp16."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from svdcompress.train._optim import LrFactor, lay_out, make_optimizer
from svdcompress.train._work import Work


class Steps:
    """An optimizer for the parameters that a model has when it is made; after shrinking, another one is needed."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._optimizer = make_optimizer(work.model, work.settings, work.lr_log_sigma2)
        self._optimizer.zero_grad(set_to_none=True)  # drop gradients left by the user's own training
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        self._factor = LrFactor(work.settings.schedule, work.settings.epochs)
        self._scaler = work.accelerator.scaler
        if self._scaler is not None:  # accelerate unscales for all optimizers it was ever given, shared parameters repeatedly
            work.accelerator._optimizers.clear()
        self._scaled = work.accelerator.prepare_optimizer(self._optimizer) if self._scaler is not None else self._optimizer

    @property
    def lr(self) -> float:
        """The learning rate of the last step."""
        return self._optimizer.param_groups[0]["lr"]

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a batch's loss."""
        if self._scaler is not None:
            self._work.accelerator.backward(loss)
        else:
            loss.backward()

    def step(self, where: float, batches: int) -> None:
        """Take one step from the accumulated gradients.

        where: the position in training, in epochs. batches: how many were accumulated, fewer at the end of an epoch.
        """
        work, settings = self._work, self._work.settings
        if batches < settings.accumulate:
            for parameter in work.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(settings.accumulate / batches)
        factor = self._factor(where)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        if settings.clip is not None:
            work.accelerator.clip_grad_norm_(work.model.parameters(), settings.clip)
        self._scaled.step()
        self._optimizer.zero_grad(set_to_none=True)

    def lay_out(self) -> None:
        """Give the optimizer's state the memory layout of the parameters, if that has changed since the state was loaded."""
        lay_out(self._optimizer)

    def state(self) -> dict[str, Any]:
        """What a later fit needs to continue as this one would."""
        scaler = self._scaler.state_dict() if self._scaler is not None else None
        return {"optimizer": self._optimizer.state_dict(), "scaler": scaler}

    def take(self, saved: dict[str, Any]) -> None:
        """Restore a saved state."""
        self._optimizer.load_state_dict(saved["optimizer"])
        self.lay_out()
        if saved["scaler"] is not None and self._scaler is not None:
            self._scaler.load_state_dict(saved["scaler"])
