"""Notes on settings of a recipe that have no effect in its run, as the user must have set them for a reason."""

from __future__ import annotations

from functools import reduce
from typing import Any

from svdcompress.pipeline._search_cost import no_path, objective_of
from svdcompress.recipe import MEASURES, DenseSection, Recipe

DENSE = tuple(f"dense.{name}" for name in DenseSection.model_fields)

OF_ONE_TRAINING = (
    *("train.schedule", "train.keep", "train.shrink", "train.beta.name", "train.beta.start", "train.beta.stop"),
    *("train.beta.step", "relevance.candidates", "relevance.tolerance"),
)
"""Fields that only a run without a search uses: a search has schedules of its own for its path and trials, and its own choice
of masks."""

OF_A_SEARCH = (
    *("objective", "confidence", "trials", "max_minutes", "levels", "cuts"),
    *("latency_command", "latency_batch", "mixture", "reconstruct"),
)

OF_MONTE_CARLO = ("compact_monte_carlo", "monte_carlo_dtype")
OF_FILES = ("precision", "compact", *OF_MONTE_CARLO, "sets", "dynamic_axes")

REFITS = ("auto", "refit")
"""Values of calibrate.posterior with which the variances are trained again."""


def passed_over(recipe: Recipe) -> list[str]:
    """Notes on fields that differ from their defaults but have no effect in the run."""
    if recipe.experiment is not None:
        return []
    return [*_of_training(recipe), *_of_stages(recipe), *_of_search(recipe)]


def _of_training(recipe: Recipe) -> list[str]:
    """Notes on fields of the dense training, of fine-tuning and of recovery."""
    lines: list[str] = []

    def told(why: str, *names: str) -> None:
        lines.extend(_idle(recipe, why, *names))

    weights, trains = recipe.weights, ["train", "recover"]
    if weights.trained or (weights.file and weights.trained is None):
        told("the weights are trained already, so there is no dense training", *DENSE)
    else:
        trains.append("dense")
    for stage in trains:
        if (optimizer := getattr(recipe, stage).optimizer) in ("adam", "adamw"):
            told(f"{optimizer} ({stage}.optimizer) has no momentum to set", f"{stage}.momentum")
    if recipe.train.distill.weight == 0:
        told("the dense model's answers are not learned (train.distill.weight=0)", "train.distill.temperature")
    beta = recipe.train.beta.name
    if not recipe.search.wanted:  # it has a schedule of its own, and names these itself
        if beta in ("constant", "additive"):
            told(f"the schedule of beta is {beta}", "train.beta.start", "train.beta.stop")
        if beta != "additive":
            told(f"the schedule of beta is {beta}, not additive", "train.beta.step")
    if recipe.uncertainty.samples == 0:
        told("uncertainty.samples=0 draws nothing", "uncertainty.budget")
    return lines


def _of_stages(recipe: Recipe) -> list[str]:
    """Notes on fields of conversion, relevance, recovery, calibration and export that other fields leave without effect."""
    lines: list[str] = []

    def told(why: str, *names: str) -> None:
        lines.extend(_idle(recipe, why, *names))

    if recipe.convert.log_alpha is not None:
        told("convert.log_alpha sets where log variances start", "convert.log_sigma2")
    if not recipe.search.wanted and not recipe.relevance.candidates:
        told("relevance.candidates is empty, so there is one threshold and no choice", "relevance.tolerance")
    if not recipe.recover.noise:
        told(
            "recovery without noise (recover.noise) has no KL and trains no variances", "recover.beta", "recover.lr_log_sigma2"
        )
    if recipe.calibrate.posterior not in REFITS:
        told(f"calibrate.posterior={recipe.calibrate.posterior} trains no variances", "calibrate.epochs", "calibrate.beta")
    if not recipe.export.onnx:
        told("no ONNX file is written (export.onnx)", *(f"export.{name}" for name in OF_FILES))
    elif not recipe.export.monte_carlo:
        told("no Monte-Carlo file is written (export.monte_carlo)", *(f"export.{name}" for name in OF_MONTE_CARLO))
    return lines


def _of_search(recipe: Recipe) -> list[str]:
    if not recipe.search.wanted:
        ask = "without search.max_drop, search.max_error or search.goal there is no search"
        return _idle(recipe, ask, *(f"search.{name}" for name in OF_A_SEARCH))
    lines = []
    if recipe.search.max_drop is None and recipe.search.max_error is None:
        why = "a goal without a budget (search.max_drop, search.max_error) has no bound to be sure of"
        lines += _idle(recipe, why, "search.confidence")
    if named := _set(recipe, OF_ONE_TRAINING):
        lines.append(f"a search trains and chooses in its own way (docs/search.md), and ignores {', '.join(named)}")
    measure = objective_of(recipe)
    if recipe.search.latency_command is not None and measure != "latency":
        lines.append(f"search.latency_command is not used, as the search is for {MEASURES[measure]}")
    if measure == "nonzero":
        lines += _idle(
            recipe, "single weights are removed at once, and nothing is reconstructed", "search.cuts", "search.reconstruct"
        )
    if measure == "bytes":
        lines += _idle(recipe, "a search for bytes reconstructs nothing", "search.reconstruct")
    if no_path(recipe, measure):
        lines += _idle(recipe, "without epochs of training (train.epochs) there are no levels", "search.levels")
    return lines


def _idle(recipe: Recipe, why: str, *names: str) -> list[str]:
    """A line that lists those of the names that are set, with the reason; none if no name is set."""
    named = _set(recipe, names)
    return [f"{why}: {', '.join(named)} {'do' if named[1:] else 'does'} nothing"] if named else []


def _set(recipe: Recipe, names: Any) -> list[str]:
    plain = Recipe()
    return [name for name in names if _value(recipe, name) != _value(plain, name)]


def _value(recipe: Recipe, name: str) -> Any:
    return reduce(getattr, name.split("."), recipe)
