"""Sparsification with Hugging Face's Trainer: one callback, nothing to change in the model."""

from __future__ import annotations

import math
import warnings
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from svdcompress.batch import in_eval
from svdcompress.convert import warn_of_half_precision
from svdcompress.errors import UsageError
from svdcompress.interop._decay import DECAYED, WithoutDecay, decays
from svdcompress.interop._noise import own_noise
from svdcompress.interop._schedule import Penalty
from svdcompress.layers import WHOLE, check_whole, variance_parameters, variational_layers
from svdcompress.objective import LinearWarmup, Schedule
from svdcompress.train import refuse_sharding

IGNORED = -100
"""The label that transformers' losses leave out."""

IN_FLOAT32 = "load the model in float32 (dtype=torch.float32), and train it with TrainingArguments(bf16=True)"
"""The remedy for a model in half precision."""

ITEMS = "num_items_in_batch"
MEAN, LABELS, SHIFTED = "mean", "labels", "shifted labels"
"""Kinds of loss: the mean of its batch, or a sum over the labels (or all but each row's first), divided by ITEMS."""


class SparsifyCallback(TrainerCallback):
    """Convert the model of a Trainer and train it with the annealed ELBO.

    The model is converted in place when the Trainer is made, before its optimizer, and `beta KL / N` is added to the loss
    that the model returns in `train()`, so that their relative weight does not depend on how many batches a step
    accumulates. Weight decay leaves the log variances out. In several processes (DDP), each draws its own noise.

    num_examples: N, over all processes; None: the length of the training set. schedule: beta by epoch, or a constant.
    options: arguments of `svdcompress.convert`; exclude embeddings' projections and heads as you would there.

    The loss has to be the model's own (labels in the batch). With `label_smoothing_factor` or a `compute_loss_func` the
    Trainer computes it elsewhere: wrap that loss in svdcompress.ELBO (see recipes/examples/hf_trainer_callback.py).

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
        self._loss: str | None = None
        self._spared: WithoutDecay | None = None
        self._noise = ExitStack()  # closed at the end of a step: between steps, all processes draw alike

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Convert the model; the Trainer makes its optimizer later."""
        _refuse_sharding(args)
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
        """Find N, check that the optimizer knows the variances and can train them, and add the KL to the model's loss."""
        self._leave(model)  # on_train_end does not run after Ctrl-C or an exception
        _refuse_sharding(args)
        self.penalty.convert(model)  # for a callback that was added after the Trainer was made
        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
        _check_optimizer(model, optimizer)
        if args.label_smoothing_factor:
            raise UsageError(
                "label_smoothing_factor: the Trainer computes this loss outside of the model, where SparsifyCallback cannot "
                "add the KL; leave it out, or use svdcompress.ELBO as compute_loss_func"
            )
        check_whole(model)
        self.penalty.count(train_dataloader)
        warn_of_half_precision(list(variational_layers(model)), stacklevel=3, remedy=IN_FLOAT32)
        self._loss = None
        model.register_forward_hook(self._add, with_kwargs=True)
        self._spare(model, optimizer)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Set beta for this point of the training; from here to the end of the step, each process draws its own noise."""
        self.penalty.set_epoch(state.epoch or 0.0)
        self._noise.close()
        self._noise.enter_context(own_noise(args.process_index, args.world_size, state.global_step, args.device))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Let processes draw alike again: data loaders may rely on it."""
        self._noise.close()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Restore the model's forward pass and the optimizer."""
        self._leave(model)

    def _leave(self, model: nn.Module) -> None:
        self._noise.close()
        _remove_hooks(model)
        if self._spared is not None:
            self._spared.remove()
            self._spared = None

    def _spare(self, model: nn.Module, optimizer: Any) -> None:
        """Exempt the variances from weight decay; the Trainer applies it to all parameters but biases and norms."""
        variances = variance_parameters(model)
        if isinstance(optimizer, torch.optim.Optimizer):
            self._spared = WithoutDecay(optimizer, variances)
        elif optimizer is not None and decays(optimizer, variances):
            warnings.warn(DECAYED, stacklevel=2)

    def _add(self, model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """The forward hook: adds the KL's share of this batch to the model's loss."""
        if not model.training:
            return None
        loss = _loss_of(output)
        if not isinstance(loss, Tensor):
            raise UsageError(
                f"{type(model).__name__} returned no loss: SparsifyCallback adds the KL to the model's own, so batches need "
                "labels and the Trainer must not have a compute_loss_func; otherwise wrap your loss in svdcompress.ELBO"
            )
        output["loss"] = loss + self._share(model, args, kwargs) * self.penalty.of(model)
        return output

    def _share(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> float | Tensor:
        """The share of a step that a batch makes up, in the units of its loss.

        A loss that divides its sum by the items of all batches of the step adds up over these batches. A mean counts fully:
        the Trainer divides it and the KL by the number of batches, unless the model was given ITEMS and ignored them.
        """
        items, labels = kwargs.get(ITEMS), kwargs.get("labels")
        if kwargs.get("shift_labels") is not None:
            labels = kwargs["shift_labels"]
        if items is None or not isinstance(labels, Tensor):
            return 1.0
        self._loss = self._loss or _kind_of_loss(model, args, kwargs, labels)
        return 1.0 if self._loss == MEAN else _count(labels, self._loss or LABELS) / items


def _refuse_sharding(args: TrainingArguments) -> None:
    """Weights that the Trainer divides among processes, by its arguments or accelerate's."""
    for name in ("fsdp", "deepspeed"):
        if getattr(args, name, None):
            raise UsageError(
                f"{name}: it divides weights among processes, but the KL and relevance need whole layers; leave it out, and "
                f"{WHOLE} (torchrun)"
            )
    refuse_sharding()


def _kind_of_loss(model: nn.Module, args: tuple, kwargs: dict[str, Any], labels: Tensor) -> str | None:
    """How the loss of a model that takes ITEMS uses them, found by a pass with a given number of them and one without; None
    if this batch cannot tell."""
    plain = {name: value for name, value in kwargs.items() if name != ITEMS}
    number = 2 * labels.numel()
    items = torch.full_like(torch.as_tensor(kwargs[ITEMS]), number)
    devices = [labels.device] if labels.is_cuda else []
    with in_eval(model), torch.no_grad(), torch.random.fork_rng(devices):
        try:
            mean, part = (float(_loss_of(model(*args, **given))) for given in (plain, {**plain, ITEMS: items}))
        except Exception:  # a custom model that cannot do without ITEMS
            return LABELS
    if mean == 0 or not math.isfinite(part / mean):
        return None
    counts = {LABELS: float(_count(labels, LABELS)), SHIFTED: float(_count(labels, SHIFTED)), MEAN: float(number)}
    return min(counts, key=lambda kind: abs(counts[kind] - number * part / mean))


def _count(labels: Tensor, kind: str) -> Tensor:
    return ((labels[..., 1:] if kind == SHIFTED and labels.dim() > 1 else labels) != IGNORED).sum()


def _loss_of(output: Any) -> Any:
    return output.get("loss") if isinstance(output, dict) else None


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
            "the optimizer was made before the model was converted and does not know log_sigma2: give SparsifyCallback to the "
            "Trainer as callbacks=[...] instead of adding it later, or make your optimizer after svdcompress.convert(model)"
        )
