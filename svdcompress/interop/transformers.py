"""Sparsification with Hugging Face's Trainer: one callback, nothing to change in the model."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from svdcompress.errors import UsageError
from svdcompress.interop._decay import DECAYED, WithoutDecay, decays
from svdcompress.interop._schedule import Penalty
from svdcompress.layers import variance_parameters
from svdcompress.objective import LinearWarmup, Schedule

IGNORED = -100
"""The label that transformers' losses leave out."""


class SparsifyCallback(TrainerCallback):
    """Convert the model of a Trainer and train it with the annealed ELBO.

    The model is converted in place when the Trainer is made, ahead of its optimizer, and `beta KL / N` is added to the loss
    that the model returns in `train()`, once for each optimizer step however many batches are accumulated. Weight decay leaves
    the log variances out.

    num_examples: N; None: the length of the training set. schedule: of beta by epoch, or a constant.
    options: of `svdcompress.convert`; exclude embeddings' projections and heads as you would there.

    The loss has to be the model's own (labels in the batch). With `label_smoothing_factor` or a `compute_loss_func` the
    Trainer computes it elsewhere: wrap that in svdcompress.ELBO (see recipes/examples/hf_trainer_callback.py).

    Example:
        >>> from svdcompress.interop.transformers import SparsifyCallback
        >>> callback = SparsifyCallback(num_examples=1000, exclude=["classifier"])
        >>> callback.penalty.num_examples
        1000
    """

    def __init__(
        self,
        *,
        num_examples: int | None = None,
        schedule: Schedule | float = LinearWarmup(start=1, stop=3),  # noqa: B008
        **options: Any,
    ) -> None:
        self.penalty = Penalty(num_examples, schedule, options)
        self._accumulated = 1
        self._spared: WithoutDecay | None = None

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Convert the model; the Trainer makes its optimizer later."""
        self.penalty.convert(model)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        """Find N, and see to it that the optimizer knows the variances and the model's loss the KL."""
        self._leave(model)  # on_train_end does not run after Ctrl-C or an exception
        self.penalty.convert(model)  # a callback that was added after the Trainer was made
        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
        _check_optimizer(model, optimizer)
        if args.label_smoothing_factor:
            raise UsageError(
                "label_smoothing_factor: the Trainer computes this loss outside of the model, where SparsifyCallback cannot "
                "add the KL; leave it out, or use svdcompress.ELBO as compute_loss_func"
            )
        self.penalty.count(train_dataloader)
        self._accumulated = args.gradient_accumulation_steps
        model.register_forward_hook(self._add, with_kwargs=True)
        self._spare(model, optimizer)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Beta at this point of the training."""
        self.penalty.set_epoch(state.epoch or 0.0)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Leave the model's forward pass and the optimizer as they were."""
        self._leave(model)

    def _leave(self, model: nn.Module) -> None:
        _remove_hooks(model)
        if self._spared is not None:
            self._spared.remove()
            self._spared = None

    def _spare(self, model: nn.Module, optimizer: Any) -> None:
        """Take the variances out of the weight decay; the Trainer lets all parameters decay but for biases and norms."""
        variances = variance_parameters(model)
        if isinstance(optimizer, torch.optim.Optimizer):
            self._spared = WithoutDecay(optimizer, variances)
        elif optimizer is not None and decays(optimizer, variances):
            warnings.warn(DECAYED, stacklevel=2)

    def _add(self, model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """The forward hook: the model's loss, and the KL's share of this batch."""
        if not model.training:
            return None
        loss = output.get("loss") if isinstance(output, dict) else None
        if not isinstance(loss, Tensor):
            raise UsageError(
                f"{type(model).__name__} returned no loss: SparsifyCallback adds the KL to the model's own, so the batches "
                "need labels and the Trainer no compute_loss_func; else wrap your loss in svdcompress.ELBO"
            )
        output["loss"] = loss + self._share(kwargs) * self.penalty.of(model)
        return output

    def _share(self, kwargs: dict[str, Any]) -> float | Tensor:
        """What part of a step a batch is, in the units of its loss.

        Models that are told `num_items_in_batch` divide their sum by the items of all batches of the step, so that the losses
        add up; of the others the Trainer divides each mean by the number of batches.
        """
        items, labels = kwargs.get("num_items_in_batch"), kwargs.get("labels")
        if items is None or labels is None:
            return 1.0
        return (labels != IGNORED).sum() / items


def _remove_hooks(model: nn.Module) -> None:
    """Remove the hooks of every SparsifyCallback: with two of them the KL would count twice."""
    for key, hook in list(model._forward_hooks.items()):
        if isinstance(getattr(hook, "__self__", None), SparsifyCallback):
            del model._forward_hooks[key]
            model._forward_hooks_with_kwargs.pop(key, None)


def _check_optimizer(model: nn.Module, optimizer: Any) -> None:
    if optimizer is None:
        return
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(own) in known for own in variance_parameters(model)):
        raise UsageError(
            "the optimizer was made before the model was converted and knows no log_sigma2: give SparsifyCallback to the "
            "Trainer as callbacks=[...] instead of adding it later, or make your optimizer after svdcompress.convert(model)"
        )
