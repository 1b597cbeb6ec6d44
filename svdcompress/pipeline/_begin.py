"""The stages up to a trained variational model: data, dense, convert, train."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from torch import Tensor, nn

from svdcompress.layers import variational_layers
from svdcompress.pipeline import _figures
from svdcompress.pipeline._advice import advice, precision_taken, slow_precision, unpromised
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._convert import converted, final_beta, make_schedule, shrinking, while_training
from svdcompress.pipeline._dense import check_model, dense_model, tried
from svdcompress.pipeline._label import label
from svdcompress.pipeline._log import check_tensorboard
from svdcompress.pipeline._loss import class_weights
from svdcompress.pipeline._passes import Passes
from svdcompress.pipeline._processes import check_data, first_examples, one_model
from svdcompress.pipeline._reach import about_frozen, out_of_reach, rate_of_variances, reach_of
from svdcompress.pipeline._recovery import for_recovery, steady
from svdcompress.pipeline._resume import FILES
from svdcompress.pipeline._same_data import check_same, seen
from svdcompress.pipeline._same_start import check_start
from svdcompress.pipeline._skill import no_skill
from svdcompress.pipeline._trainer import Trainer
from svdcompress.sources import Data, check_types, open_data, save_weights
from svdcompress.train import in_all, on_first, write_atomically

EXAMPLES = 2
"""The number of examples with which graphs are traced."""


@dataclass(frozen=True)
class Opened:
    """The opened data. inputs: a few training examples, with which graphs are traced."""

    data: Data
    inputs: Any


@dataclass(frozen=True)
class Dense:
    """The trained dense model. trainer: trains all later stages. beta: the weight of the KL at the end of training. given:
    whether the weights were trained before this run."""

    model: nn.Module
    trainer: Trainer
    beta: float
    given: bool = False


@dataclass(frozen=True)
class Variational:
    """A converted model. shapes: of its layers' weights, by layer name. rate: the learning rate of its log variances."""

    model: nn.Module
    shapes: dict[str, tuple[int, ...]]
    rate: float | None


def open_stage(context: Context) -> Opened:
    """Open the data, and compare them with those that a stopped run has seen."""
    recipe = context.recipe
    if recipe.report.tensorboard:
        check_tensorboard()
    data = in_all(lambda: open_data(recipe.data, recipe.task))
    now = seen(data)
    check_data(now)
    made = any((context.state.folder / name).exists() for name in FILES)
    if made and (before := context.state.facts.get("data")):
        if other := check_same(before, now, context.out):
            context.warn(other)
    else:
        context.state.put(data=now)
    return Opened(data, first_examples(context, data, EXAMPLES))


def dense_stage(context: Context, opened: Opened) -> Dense:
    """Load or train the dense model; it is tried on the data before any training and judged afterwards."""
    recipe, data, inputs = context.recipe, opened.data, opened.inputs
    model, trained = in_all(lambda: dense_model(recipe, data.notes))
    one_model(context, model)
    if recipe.data.unlabelled:
        tried(model, recipe, data, inputs)
        with context.bars.working("labeling", stays=False):
            label(data, model, trained, context.place.device)
        context.note("unlabelled data: the dense model's answers are the targets, and every error is disagreement with it")
    check_types({name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)})
    check_start(context, model, trained, check_model(model, recipe, data, inputs))
    context.recipe, recovers = for_recovery(recipe, model)
    context.steady = steady(recipe, context.recipe)
    recipe = context.recipe
    beta = final_beta(recipe, model, len(data.train), inputs)
    for line in data.notes:
        context.note(line)
    device = context.place.device
    warned = [*advice(recipe, model, len(data.train), context.place.world, inputs), *unpromised(recipe, data)]
    warned += slow_precision(recipe, device, trained)
    for line in [*data.warnings, *warned]:
        context.warn(line)
    for line in (precision_taken(recipe, device, trained), recovers):
        if line:
            context.note(line)
    _tell_phases(context, trained)
    trainer = Trainer(context, data, model, class_weights(recipe.loss, data, model, inputs))
    if not trained:
        context.history += trainer.fit(model, "dense", recipe.dense).history
    model.eval()
    with _figures.there(context.place.device, model):
        trainer = trainer.with_tau(Passes(model, data).noise_precision)

    def keep() -> None:
        with _figures.there(context.place.device, model):
            found = None if recipe.loss.class_weights else no_skill(model, data, context.place.device)
        if found:
            context.warn(found)
        write_atomically(context.out / "dense.safetensors", lambda path: save_weights(model, path))

    on_first(context.place, keep)
    return Dense(model, trainer, beta, trained)


def convert_stage(context: Context, opened: Opened, dense: Dense) -> Variational:
    """Convert a copy of the dense model, and check whether training can bring it to the threshold."""
    recipe, world, count = context.recipe, context.place.world, len(opened.data.train)
    model = converted(copy.deepcopy(dense.model).cpu(), recipe, opened.inputs)
    shapes = {name: tuple(layer.weight.shape) for name, layer in variational_layers(model)}
    rate = rate_of_variances(recipe, model, count, dense.beta, world)
    found = reach_of(recipe, model, count, dense.beta, rate, world)
    context.results.reach = found
    for line in [*about_frozen(recipe, model), *out_of_reach(recipe, found)]:
        context.warn(line)
    return Variational(model, shapes, rate)


def train_stage(context: Context, opened: Opened, dense: Dense, variational: Variational) -> None:
    """Fine-tune the converted model, in place, with the annealed ELBO."""
    train = context.recipe.train
    fit = dense.trainer.fit(
        variational.model,
        "train",
        train,
        schedule=make_schedule(train.beta, train.epochs, dense.beta),
        lr_log_sigma2=variational.rate,
        distill=train.distill,
        masks=while_training(context.recipe, opened.inputs),
        **shrinking(context.recipe, opened.inputs),
    )
    context.history += fit.history


def _tell_phases(context: Context, trained: bool) -> None:
    """Tell the user how many epochs each phase of training has, and which option sets them."""
    recipe = context.recipe
    phases = [] if trained else [f"the dense model {recipe.dense.epochs} epochs (--dense-epochs; trained --weights skip this)"]
    phases.append(f"fine-tuning {recipe.train.epochs} (--epochs)")
    phases.append(f"recovery {recipe.recover.epochs} (--set recover.epochs=...)")
    context.say(f"[dim]training: {escape(', '.join(phases))}[/]")
