"""An evaluation of a run's folder: the contenders, the data, and the notes that a reader of the figures needs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from svdcompress.errors import DependencyError, ModelError, OutputError, RecipeError, UsageError
from svdcompress.evaluation import _magnitude
from svdcompress.evaluation._laplace import last_layer_laplace
from svdcompress.evaluation._members import ensemble_members
from svdcompress.likelihoods import likelihood_for, own_likelihood
from svdcompress.pipeline import OpenRun
from svdcompress.sources import Examples
from svdcompress.train import Bars
from svdcompress.uncertainty import Batches, Contender, compare, ensemble_contender, mean_contender, outside, shifts

Say = Callable[[str], None]

SHIFTED = 2000
"""The most test inputs that are corrupted, or turned into inputs unlike the data."""

SOON = 120.0
"""The magnitude-pruned control is made by default if the run's own fine-tuning, which costs twice as much, took at most this
many seconds."""


@dataclass(frozen=True)
class Wanted:
    """The options of an evaluation.

    samples: draws. members: of a deep ensemble; 0: none. magnitude, laplace: whether these controls are made; None: the former
    if it takes a minute or less (or is made already), the latter if laplace-torch is installed. shift: also use corrupted test
    data. device: as torch names it. batch: inputs that go through a model at once.
    """

    samples: int = 100
    seed: int = 0
    members: int = 0
    magnitude: bool | None = None
    laplace: bool | None = None
    shift: bool = False
    device: str = "cpu"
    batch: int = 500


def evaluate_run(
    opened: OpenRun,
    wanted: Wanted,
    *,
    elsewhere: Mapping[str, Batches] | None = None,
    bars: Bars | None = None,
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """The result of `compare` for a run's model and its baselines on the run's test data, with "inputs", the number of test
    inputs, and "notes", what was left out and why.

    elsewhere: further inputs from outside of the data's distribution, by name. say: called with progress and each note.
    Raises UsageError for an ensemble of one, and what training and predicting raise.
    """
    if wanted.members == 1 or wanted.members < 0:
        raise UsageError(f"members: {wanted.members}; an ensemble needs two or more (0: no ensemble)")
    notes: list[str] = []

    def note(line: str) -> None:
        notes.append(line)
        say(line)

    data = opened.data
    dense, sparse = opened.dense.to(wanted.device), opened.model.to(wanted.device)
    more = [
        *_ensemble(opened, wanted, bars, say, note),
        *_laplace(opened, wanted, note),
        *_pruned(opened, wanted, bars, say, note),
    ]
    dense.to(wanted.device)  # training may have moved it off the device
    mixed, shape = _mixed(data.test, wanted.batch, SHIFTED), opened.preprocessing.get("input_shape")
    shifted = shifts(mixed, wanted.seed, SHIFTED, shape) if wanted.shift else {}
    if wanted.shift and not shifted:
        note("shift: these inputs cannot be corrupted gradually; supported are images, columns of numbers and token ids")
    found = compare(
        dense,
        sparse,
        lambda: data.test.batches(wanted.batch),
        _mixed(data.validation, wanted.batch),
        task=own_likelihood(opened.model, data.task, data.dim),
        ood={**outside(mixed, wanted.seed), **(elsewhere or {})},
        shifts=shifted,
        more=more,
        samples=wanted.samples,
        seed=wanted.seed,
        scale=1.0 if data.target_scale is None else data.target_scale[1],
    )
    return {**found, "inputs": len(data.test), "notes": notes}


def _mixed(examples: Examples, batch: int, most: int | None = None) -> Batches:
    """At most `most` of the examples, in an order drawn with a fixed seed: in files sorted by class, the first ones lack
    classes."""
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))
    mixed = examples.subset(order[:most])
    return lambda: mixed.batches(batch)


def _ensemble(opened: OpenRun, wanted: Wanted, bars: Bars | None, say: Say, note: Say) -> list[Contender]:
    if not wanted.members:
        return []
    members = ensemble_members(opened, wanted.members, device=wanted.device, bars=bars, say=say, note=note)
    about = f"dense networks of other seeds, {opened.recipe.dense.epochs} epochs each (Lakshminarayanan et al. 2017)"
    models = [copy.deepcopy(member).to(wanted.device) for member in members]
    return [ensemble_contender(models, likelihood_for(opened.data.task, opened.data.dim), about)]


def _laplace(opened: OpenRun, wanted: Wanted, note: Say) -> list[Contender]:
    if wanted.laplace is False:
        return []
    likelihood = likelihood_for(opened.data.task, opened.data.dim)
    dense = copy.deepcopy(opened.dense).to(wanted.device)
    try:
        return [last_layer_laplace(dense, opened.data.train, likelihood, samples=wanted.samples, seed=wanted.seed)]
    except (DependencyError, ModelError) as error:
        if wanted.laplace:
            raise
        note(f"left out: {error}")
        return []


def _pruned(opened: OpenRun, wanted: Wanted, bars: Bars | None, say: Say, note: Say) -> list[Contender]:
    if wanted.magnitude is False:
        return []
    try:
        took = _took(opened.results)
        ready = _magnitude.is_made(opened)
    except (ModelError, OutputError, RecipeError) as error:
        if wanted.magnitude:
            raise
        note(f"left out: magnitude pruning: {error}")
        return []
    if wanted.magnitude is None and took > SOON and not ready:
        note(f"left out: magnitude pruning, whose training takes about {took / 2:.0f} s; --magnitude includes it")
        return []
    if not ready:
        say(f"magnitude pruning: training {opened.recipe.train.epochs} + {_magnitude.recovery(opened).epochs} epochs")
    try:
        model = _magnitude.magnitude_pruned(opened, device=wanted.device, bars=bars)
    except (ModelError, RecipeError) as error:  # such as a loss that was passed in Python
        if wanted.magnitude:
            raise
        note(f"left out: magnitude pruning: {error}")
        return []
    likelihood = likelihood_for(opened.data.task, opened.data.dim)
    return [mean_contender("magnitude, as many weights", model.to(wanted.device), likelihood, about=_magnitude.about(opened))]


def _took(results: Mapping[str, Any]) -> float:
    """Seconds of a run's training and recovery; for a search, the seconds of as many epochs as one run has."""
    seconds, epochs = results.get("seconds") or {}, (results.get("search") or {}).get("epochs")
    took = sum(float(seconds.get(stage, 0.0)) for stage in ("train", "recover"))
    if epochs:
        took += float(seconds.get("search", 0.0)) * epochs["one_run"] / max(epochs["search"], 1)
    return took
