"""What a run will do and cost, without doing it: for `--dry-run`."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import nn

from svdcompress import cost
from svdcompress.batch import call
from svdcompress.calibrate import LOOKS, looked_at
from svdcompress.convert import PlanEntry
from svdcompress.errors import PruneError
from svdcompress.layers import variance_parameters, variational_layers
from svdcompress.likelihoods import make_loss
from svdcompress.objective import ELBO
from svdcompress.pipeline._advice import advice, precision_taken, slow_precision, unpromised
from svdcompress.pipeline._choose_masks import compared_on
from svdcompress.pipeline._convert import converted, final_beta, planned
from svdcompress.pipeline._dense import check_model, dense_model
from svdcompress.pipeline._figures import macs_of
from svdcompress.pipeline._label import check_label
from svdcompress.pipeline._levels import COOLING_EPOCHS, LEVEL_EPOCHS, epochs_of
from svdcompress.pipeline._passed_over import passed_over
from svdcompress.pipeline._reach import about_frozen, out_of_reach, rate_of_variances, reach_of
from svdcompress.pipeline._recovery import for_recovery
from svdcompress.pipeline._search_cost import left_for, no_path, objective_of
from svdcompress.pipeline._search_start import check_epochs, for_objective, levels_and_trials
from svdcompress.pipeline._search_trials import ABOVE
from svdcompress.pipeline._search_words import below_least
from svdcompress.pipeline._stays import that_stay
from svdcompress.pipeline._trainer import taught
from svdcompress.pipeline._uncertainty import seconds_for
from svdcompress.pipeline._unit_ways import FEWEST
from svdcompress.pipeline._way import pruning_of
from svdcompress.recipe import Distillation, Recipe, Training, parse_goal
from svdcompress.search import CLOSE
from svdcompress.selection import Ranking, rule
from svdcompress.sources import Data, example_inputs, open_data
from svdcompress.train import Reach, asks_once, computing, find_place, make_optimizer, resolved_precision

TRIAL_STEPS = 5

REST_SECONDS = 15.0
"""Seconds for pruning, export, measuring and the report, with a small model."""

CHOSEN = 10
"""Passes over the examples that a trial compares ways of cutting on: four ways, others on a part, all reconstructed."""

JUDGED = 4
"""Passes over the test and validation data: dense and small model, before and after the files are written."""


@dataclass
class Estimate:
    """The expected plan and cost of a run.

    seconds: of each training stage, and of the rest. memory: bytes of weights, gradients and optimizer state, at most. beta:
    its final value. reach: how far log alpha starts from the threshold, and how far training can move it (with random weights
    if the dense model is yet to be trained).
    """

    plan: list[PlanEntry]
    examples: dict[str, int]
    parameters: int
    converted: int
    seconds: dict[str, float]
    memory: int
    device: str
    beta: float
    reach: Reach
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def estimate(recipe: Recipe) -> Estimate:
    """Read the data, make the model, time a few steps of each kind; nothing is written. Raises what a run's start raises."""
    check_epochs(recipe)
    data = open_data(recipe.data, recipe.task)
    place = find_place(recipe.device)
    dense, trained = dense_model(recipe, data.notes)
    if recipe.data.unlabelled:
        check_label(data, trained)
    inputs = example_inputs(data.train, 2)
    check_model(dense, recipe, data, inputs)
    recipe, recovers = for_recovery(recipe, dense)
    recipe, shares = for_objective(recipe)
    entries = planned(dense, recipe, inputs)
    told = [*data.notes, precision_taken(recipe, place.device, trained), recovers, shares]
    told += passed_over(recipe)
    warned = [
        *data.warnings,
        *advice(recipe, dense, len(data.train), inputs=inputs),
        *unpromised(recipe, data),
        *slow_precision(recipe, place.device, trained),
    ]
    model = converted(copy.deepcopy(dense), recipe, inputs)
    final = final_beta(recipe, dense, len(data.train), inputs)
    rate = rate_of_variances(recipe, model, len(data.train), final)
    found = reach_of(recipe, model, len(data.train), final, rate)
    warned += [*about_frozen(recipe, model), *(out_of_reach(recipe, found) if trained else [])]
    warned += _goal_out_of_reach(recipe, dense, model, inputs)
    macs = macs_of(dense, inputs)  # before the models go to the device, where the inputs are not
    seconds = _seconds(recipe, data, dense, model, trained, place.device, macs)
    return Estimate(
        plan=entries,
        examples={name: len(getattr(data, name)) for name in ("train", "validation", "test")},
        parameters=sum(p.numel() for p in dense.parameters()),
        converted=sum(layer.weight.numel() for _, layer in variational_layers(model)),
        seconds=seconds,
        memory=_state_bytes(model, recipe.train),
        device=str(place.device),
        beta=final,
        reach=found,
        warnings=warned,
        notes=[line for line in told if line],
    )


def _goal_out_of_reach(recipe: Recipe, dense: nn.Module, model: nn.Module, inputs: Any) -> list[str]:
    """The search's warning about a goal below the size of one unit in each layer; only for measures that need no file."""
    measure = objective_of(recipe)
    if recipe.search.goal is None or measure not in ("parameters", "macs"):
        return []
    masks = rule(model, recipe.relevance, inputs)(recipe.relevance.threshold)
    goal, size = parse_goal(recipe.search.goal), float(getattr(cost.measure(dense, inputs), measure))
    pruning = pruning_of(recipe)
    try:
        pruning["protect"] = [*pruning["protect"], *that_stay(model, inputs, masks, pruning, recipe.prune.time_budget)]
        least = min(float(getattr(Ranking(model, inputs, masks, **pruning).at({measure: FEWEST}), measure)), size)
    except PruneError:  # the search reports it
        return []
    if goal.target(size) * (1 + CLOSE) >= least:
        return []
    return [below_least(goal, measure, size, least, min(least * ABOVE, size), {})]


def _seconds(
    recipe: Recipe, data: Data, dense: nn.Module, model: nn.Module, trained: bool, device: torch.device, macs: int
) -> dict[str, float]:
    """Seconds of each stage, validation after its epochs included; moves both models to the device. macs: of one example."""
    loss, settings = make_loss(recipe.loss, dim=data.dim), recipe.search
    if isinstance(loss, nn.Module):  # it may hold class weights
        loss.to(device)
    each = _forward_seconds(dense, data, recipe, device)
    validating = each * len(data.validation)

    def once(distill: Distillation) -> bool:
        """Whether the teacher is asked only once, for all epochs of all stages that ask in the same way."""
        return asks_once(data.train, taught(recipe, distill))

    def each_step(distill: Distillation) -> bool:
        return taught(recipe, distill).wanted and not once(distill)

    def epoch(trained: nn.Module, stage: Training, distill: Distillation | None = None, **more: Any) -> float:
        teacher = dense if distill is not None and each_step(distill) else None
        return _epoch_seconds(trained, data.train, loss, stage, device, teacher=teacher, **more) + validating

    train, recover = recipe.train, recipe.recover
    seconds = {} if trained else {"dense": epoch(dense, recipe.dense) * recipe.dense.epochs}
    trains = epoch(model, train, train.distill)
    recovers = epoch(model, recover, recover.distill, noise=recover.noise)
    if settings.wanted:  # in place of one training: the path, and trials at the full size
        measure, (levels, trials) = objective_of(recipe), levels_and_trials(recipe)
        shares = () if no_path(recipe, measure) else (LEVEL_EPOCHS, COOLING_EPOCHS)
        level, cooling = [epochs_of(train, share) for share in shares] or (0, 0)
        lower = resolved_precision(recover.precision, device)
        passed = each if lower == "no" else _forward_seconds(dense, data, recipe, device, lower)
        choosing = CHOSEN * passed * compared_on(len(data.train), epochs_of(train, COOLING_EPOCHS))
        trial = cooling * trains + recover.epochs * recovers + (choosing if settings.mixture == "auto" else 0.0)
        shared = each_step(recover.distill) and not recover.distill.layers  # the first trial's answers serve the others, too
        spared = (trials - 1) * recover.epochs * passed * len(data.train) if shared else 0.0
        last = recovers * left_for(recipe, levels * level + trials * (cooling + recover.epochs))
        seconds["search"] = levels * level * trains + trials * trial + last - spared
        if settings.max_minutes is not None:
            seconds["search"] = min(seconds["search"], 60 * settings.max_minutes + max(trial, last))
    else:
        seconds |= {"train": train.epochs * trains, "recover": recover.epochs * recovers}
    asked = [stage for stage in (train, recover) if stage.epochs and once(stage.distill)]
    answers = each * len(data.train) * len({(stage.batch_size, stage.precision, stage.compile) for stage in asked})
    seconds["rest"] = REST_SECONDS + answers + JUDGED * each * (len(data.validation) + len(data.test))
    if recipe.calibrate.temperature or recipe.calibrate.posterior != "variational":
        count, samples = looked_at(len(data.validation), macs)
        seconds["rest"] += LOOKS[recipe.calibrate.posterior] * count * samples * each
    if recipe.uncertainty.samples:
        budget = seconds_for(recipe.uncertainty.budget, sum(seconds.values()) - seconds["rest"])
        draws = recipe.uncertainty.samples * each * len(data.test)
        seconds["rest"] += draws if budget is None else min(draws, budget)
    return seconds


def _step_seconds(batches: Iterable[tuple[Any, Any]], step: Callable[[Any, Any], Any], device: torch.device) -> float:
    """Median seconds of the first few steps."""
    times = []
    for x, y in islice(batches, TRIAL_STEPS):
        started = time.perf_counter()
        step(x, y)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]


@torch.no_grad()
def _forward_seconds(model: nn.Module, data: Data, recipe: Recipe, device: torch.device, precision: str = "no") -> float:
    """Seconds of a forward pass per example, in batches as large as those of training."""
    model, size = model.to(device).eval(), recipe.train.batch_size
    with computing(precision, device, [model]):
        seconds = _step_seconds(data.train.batches(size, device=device), lambda x, y: call(model, x), device)
    return seconds / min(size, len(data.train))


def _epoch_seconds(
    model: nn.Module,
    examples: Any,
    loss: Any,
    settings: Training,
    device: torch.device,
    *,
    teacher: nn.Module | None = None,
    noise: bool = True,
) -> float:
    """Seconds of an epoch, from timing a few real steps on the real data.

    noise: False trains only the means of a converted model, without their KL. teacher: a model whose answers are targets, too.
    """
    model = model.to(device).train()
    layers = [layer for _, layer in variational_layers(model)]
    for layer in layers if not noise else ():
        layer.eval()
    optimizer = make_optimizer(model, settings)
    elbo = ELBO(model, lambda value: value, len(examples)) if layers and noise else (lambda value: value)
    precision = resolved_precision(settings.precision, device)
    called = [model] if teacher is None else [model, teacher.to(device).eval()]

    def step(x: Any, y: Any) -> None:
        with computing(precision, device, called):
            output = elbo(loss(call(model, x), y))
            if teacher is not None:
                with torch.no_grad():
                    call(teacher, x)
        output.backward()
        optimizer.step()
        optimizer.zero_grad()

    batches = examples.batches(settings.batch_size, shuffle=0, device=device)
    return _step_seconds(batches, step, device) * -(-len(examples) // settings.batch_size)


def _state_bytes(model: nn.Module, settings: Training) -> int:
    """Bytes of all trained numbers, with their gradients and the optimizer's state."""
    variances = {id(own) for own in variance_parameters(model)}
    copies = {"adam": 4, "adamw": 4, "sgd": 3}[settings.optimizer]
    return sum(
        (4 if id(p) in variances else copies) * p.numel() * p.element_size() for p in model.parameters() if p.requires_grad
    )
