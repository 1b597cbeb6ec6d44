"""What a run will do and cost, without doing it: for `--dry-run`."""

from __future__ import annotations

import copy
import time
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import nn

from svdcompress.batch import call
from svdcompress.convert import PlanEntry
from svdcompress.layers import arranged_convolutions, variance_parameters, variational_layers
from svdcompress.likelihoods import make_loss
from svdcompress.objective import ELBO
from svdcompress.pipeline._advice import advice, slow_precision
from svdcompress.pipeline._convert import converted, final_beta, planned
from svdcompress.pipeline._dense import check_model, dense_model
from svdcompress.pipeline._path import COOLING_EPOCHS, LEVEL_EPOCHS, epochs_of
from svdcompress.pipeline._reach import out_of_reach, rate_of_variances, reach_of
from svdcompress.pipeline._search_cost import left_for, levels_of, trials_of
from svdcompress.pipeline._search_start import objective_of
from svdcompress.recipe import Recipe, Training
from svdcompress.sources import example_inputs, open_data
from svdcompress.train import Reach, find_place, make_optimizer, resolved_precision

TRIAL_STEPS = 5
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}

REST_SECONDS = 15.0
"""Pruning, export, measuring and the report, for a small model."""


@dataclass
class Estimate:
    """What a run will be.

    seconds: of each stage of training. memory: bytes of weights, gradients and optimizer, at most. beta: at its end. reach: how
    far it is from where log alpha starts to the threshold, and how far training goes (of weights drawn anew, where the dense
    model is yet to be trained).
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

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def estimate(recipe: Recipe) -> Estimate:
    """Read the data, make the model, try a few steps of each kind; nothing is written. Raises what a run's start raises."""
    data = open_data(recipe.data, recipe.task)
    place = find_place(recipe.device)
    dense, trained = dense_model(recipe)
    inputs = example_inputs(data.train, 2)
    check_model(dense, recipe, data, inputs)
    entries = planned(dense, recipe, inputs)
    warned = [
        *data.notes,
        *data.warnings,
        *advice(recipe, dense, len(data.train), inputs=inputs),
        *slow_precision(recipe, place.device, trained),
    ]
    model = converted(copy.deepcopy(dense), recipe, inputs)
    final = final_beta(recipe, dense, len(data.train), inputs)
    rate = rate_of_variances(recipe, model, len(data.train), final)
    found = reach_of(recipe, model, len(data.train), final, rate)
    warned += out_of_reach(recipe, found) if trained else []
    seconds = {}
    loss = make_loss(recipe.loss, dim=data.dim)
    if not trained:
        seconds["dense"] = _stage_seconds(dense, data.train, loss, recipe.dense, place.device)
    seconds["train"] = _stage_seconds(model, data.train, loss, recipe.train, place.device)
    step = seconds["train"] / max(recipe.train.epochs, 1)
    seconds["recover"] = step * recipe.recover.epochs
    if recipe.search.wanted:  # in place of one training: the path, and trials at the full size
        settings = recipe.search
        del seconds["train"]
        level, cooling = (step * epochs_of(recipe.train, share) for share in (LEVEL_EPOCHS, COOLING_EPOCHS))
        trial = cooling + seconds.pop("recover")
        measure = objective_of(recipe)
        levels, trials = levels_of(recipe, measure), trials_of(recipe, measure)
        spent = sum(
            count * epochs_of(recipe.train, share) for count, share in ((levels, LEVEL_EPOCHS), (trials, COOLING_EPOCHS))
        )
        spent += trials * recipe.recover.epochs
        last = step * left_for(recipe, spent)
        seconds["search"] = levels * level + trials * trial + last
        if settings.max_minutes is not None:
            seconds["search"] = min(seconds["search"], 60 * settings.max_minutes + max(trial, last))
    seconds["rest"] = REST_SECONDS
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
    )


def _stage_seconds(model: nn.Module, examples: Any, loss: Any, settings: Training, device: torch.device) -> float:
    """Seconds of a stage, from the time of a few steps of the real kind on the real data."""
    model = model.to(device).train()
    optimizer = make_optimizer(model, settings)
    variational = next(variational_layers(model), None) is not None
    elbo = ELBO(model, lambda value: value, len(examples)) if variational else (lambda value: value)
    times, precision = [], resolved_precision(settings.precision, device)
    right = arranged_convolutions([model] if precision in AUTOCAST and device.type == "cpu" else [])
    for x, y in islice(examples.batches(settings.batch_size, shuffle=0, device=device), TRIAL_STEPS):
        started = time.perf_counter()
        with torch.autocast(device.type, AUTOCAST.get(precision), enabled=precision in AUTOCAST), right:
            output = elbo(loss(call(model, x), y))
        output.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    steps = -(-len(examples) // settings.batch_size)
    return sorted(times)[len(times) // 2] * steps * settings.epochs


def _state_bytes(model: nn.Module, settings: Training) -> int:
    """Each trained number with its gradient and what the optimizer keeps of it."""
    variances = {id(own) for own in variance_parameters(model)}
    copies = {"adam": 4, "adamw": 4, "sgd": 3}[settings.optimizer]
    return sum(
        (4 if id(p) in variances else copies) * p.numel() * p.element_size() for p in model.parameters() if p.requires_grad
    )
