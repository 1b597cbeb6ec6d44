"""The start of a search: checks of its recipe, the shares for its objective, and doubts about its budget."""

from __future__ import annotations

from typing import Any

import torch

from svdcompress.errors import RecipeError, counted
from svdcompress.likelihoods import likelihood_for
from svdcompress.pipeline._begin import Dense, Opened
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._figures import there
from svdcompress.pipeline._judged import judged
from svdcompress.pipeline._search_cost import asks_units, levels_of, no_path, objective_of, reconstructs, trials_of
from svdcompress.pipeline._skill import EXAMPLES
from svdcompress.pipeline._some import some
from svdcompress.recipe import MEASURES, Recipe
from svdcompress.search import Budget, Losses
from svdcompress.sources import fitting

UNITS = {"weight": 0.8, "input": 0.1, "output": 0.1}
"""Shares for a search for smaller shapes if the recipe judges single weights only."""


BY_HEART, ALIKE = 0.1, 1.25
"""A regression may have memorized the validation examples if its RMSE on them is below BY_HEART times the targets' standard
deviation (so a hundredth of their variance is left) and at most ALIKE times that on training examples (with a hundred of
each, chance alone accounts for a tenth)."""


OWN = 1e-5
"""A regression's targets are its model's own answers if its RMSE is below this fraction of their standard deviation."""


def check_epochs(recipe: Recipe) -> None:
    """Raises RecipeError for a search without epochs of training that needs them: they train the variances that it cuts by,
    unless everything goes in one cut and what stays is reconstructed."""
    measure = objective_of(recipe)
    if recipe.train.epochs or not recipe.search.wanted or reconstructs(recipe, measure):
        return
    unit = MEASURES[measure]
    if measure in ("nonzero", "bytes"):
        why = "these train the variances that decide which weights go. Without training, only units can go: --objective macs"
    else:
        why = "without training, layers have to be reconstructed after the cut (search.reconstruct: auto, search.cuts above 1)"
    raise RecipeError(f"train.epochs: 0: a search for {unit} needs 1 or more, as {why}")


def chosen_by_time(recipe: Recipe) -> bool:
    """Whether the faster of two files of the same model is used; a search for bytes uses the smaller one."""
    return recipe.report.latency and not (recipe.search.wanted and objective_of(recipe) == "bytes")


def levels_and_trials(recipe: Recipe) -> tuple[int, int]:
    """The most levels of the path and the most trials that a search makes."""
    measure = objective_of(recipe)
    return 0 if no_path(recipe, measure) else levels_of(recipe, measure), trials_of(recipe, measure)


def for_objective(recipe: Recipe) -> tuple[Recipe, str | None]:
    """The recipe for a search for smaller shapes, which also judges the relevance of units, and a note about it or None.

    If only single weights are judged, hardly any unit loses all of its weights, and living units would have to go instead.
    """
    measure = objective_of(recipe)
    if not recipe.search.wanted or measure in ("nonzero", "bytes") or asks_units(recipe):
        return recipe, None
    convert = recipe.convert.model_copy(update={"share": dict(UNITS)})
    parts = ", ".join(f"{name} {part:g}" for name, part in UNITS.items())
    note = f"{MEASURES[measure]} follow the shapes, so whole units are judged, too (convert.share: {parts})"
    return recipe.model_copy(update={"convert": convert}), note


def doubts(context: Context, opened: Opened, dense: Dense, budget: Budget, found: Losses) -> list[str]:
    """Warnings about why a budget may mean less than it seems to. found: the dense model's losses on the validation data.

    Raises RecipeError for a budget that the dense model itself misses.
    """
    allowed, unit = budget.allowed(found.error, found.probabilities), "%" if found.probabilities else ""
    if allowed < 0:
        raise RecipeError(
            f"search.max_error: {budget.max_error:g}: the dense model itself has {found.error:.4g}{unit} on the validation "
            "data; allow more, or start from a better model"
        )
    if budget.max_drop is not None and not found.probabilities and found.error < OWN * _spread(opened.data):
        raise RecipeError(
            f"search.max_drop: the dense model's RMSE on the validation data is next to 0 ({found.error:.2g}), of which a "
            "percentage says nothing (are the targets its own answers?). Say how far the small model may be from them, in the "
            "targets' units, with --max-error, or how small it should be, with --goal"
        )
    lines = []
    count, needed = len(found.parts), budget.needed(found)
    if budget.given and count < needed:
        drop = f"{allowed:.3g} points" if found.probabilities else f"{allowed:.3g}% of the RMSE"
        about = f"about {needed:,} would" if needed < 10**9 else "no number of them could"
        whose = "validation" if found.nll is None or len(found.nll) == count else "validation and training"
        by_nll = f"The drop is estimated from the NLL of {whose} examples, which is no more than a guess"
        bound = found.probabilities and found.graded  # then the bound decides, even if it is wide
        told = "The upper bound on it decides nevertheless, so less may go than could" if bound else "The measured drop decides"
        decides = told if found.nll is None else by_nll
        lines.append(
            f"{counted(count, 'validation example')} {'may not' if bound else 'cannot'} tell a drop of {drop} from chance: "
            f"{about}. {decides}; {'set data.validation, or ' if needed < 10**9 else ''}allow more"
        )
    if (line := _seen(context, opened.data, dense, found)) is not None:
        lines.append(line)
    return lines


def _seen(context: Context, data: Any, dense: Dense, found: Losses) -> str | None:
    """A warning if weights that were trained before this run seem to have memorized the validation examples: they get hardly
    any of them wrong, and no more than of the training examples."""
    recipe, device, model = context.recipe, context.place.device, dense.model
    if not dense.given or isinstance(recipe.data.validation, str) or recipe.data.unlabelled or _unsure(data, found):
        return None
    with there(device, model):
        trained = judged(model, some(data.train, len(data.validation)), data, device, errors_alone=True)
    alike = max(1.5 * trained.error, trained.error + 0.2) if found.probabilities else ALIKE * trained.error
    if found.error > alike:
        return None
    unit = "% error" if found.probabilities else ""
    told = [f"{'' if unit else 'an RMSE of '}{losses.error:.2g}{unit}" for losses in (trained, found)]
    return (
        f"the weights have {told[0]} on training and {told[1]} on validation examples: they were "
        "probably trained on both, and a drop on such examples says little. Use others: --validation SOURCE, or "
        "--validation test:50% for a part of the test data"
    )


def _unsure(data: Any, found: Losses) -> bool:
    """Whether the error on the validation examples is too large for them to have been memorized."""
    if found.probabilities:
        return found.error >= 1.0
    return found.error >= BY_HEART * _spread(data)


def _spread(data: Any) -> float:
    """The standard deviation of a regression's targets on the validation data, 0 if it is not known."""
    try:
        seen = some(data.validation, EXAMPLES)
        targets = torch.cat([t.reshape(len(t), -1) for _, t in seen.batches(fitting(None, seen, EXAMPLES))])
    except RuntimeError:  # targets of different shapes
        return 0.0
    scale = 1.0 if data.target_scale is None else data.target_scale[1]
    return likelihood_for(data.task, data.dim).blind(targets, scale)["rmse"]
