"""The learning rate of log sigma2 that a recipe leaves open, and what is said where the threshold is out of reach."""

from __future__ import annotations

import math

from torch import nn

from svdcompress.layers import Threshold
from svdcompress.objective import Schedule
from svdcompress.pipeline._convert import make_schedule
from svdcompress.recipe import Recipe, TrainSection
from svdcompress.train import Reach, distances, factors, rate_of_log_sigma2, reach, steps_of

MOST = 0.1
"""The largest learning rate of log sigma2 that is taken by itself: a step of it is a tenth of a variance."""


def rate_of_variances(recipe: Recipe, model: nn.Module, examples: int, final: float, world: int = 1) -> float | None:
    """train.lr_log_sigma2 in numbers (None: as the means); model: converted, before training. final: where beta ends.

    auto: as the means, or so much that log sigma2 alone can bring nine of ten weights to the threshold, at most `MOST`.
    """
    wanted = recipe.train.lr_log_sigma2
    if wanted != "auto":
        return wanted
    train, schedule = training_of(recipe, final)
    up = factors(train, steps_of(train, examples, world), schedule)[0]
    ways = [found[-1] for found in distances(model, harshest(recipe)).values()]
    if not (ways and up > 0):
        return None
    return max(rate_of_log_sigma2(recipe.train, None), min(float(f"{max(ways) / up:.2g}"), MOST))


def training_of(recipe: Recipe, final: float) -> tuple[TrainSection, Schedule]:
    """What is taken for the training of the variances, and beta in it: the recipe's; in a search without the schedules that it
    passes over (see `passed_over`), so that what does nothing there has no part in what it decides."""
    train, plain = recipe.train, TrainSection()
    if recipe.search.wanted:
        train = train.model_copy(update={"schedule": plain.schedule, "beta": plain.beta})
    return train, make_schedule(train.beta, train.epochs, final)


def reach_of(recipe: Recipe, model: nn.Module, examples: int, final: float, rate: float | None, world: int = 1) -> Reach:
    """Whether the training that a recipe asks for can bring the weights of a converted model to the threshold."""
    train, schedule = training_of(recipe, final)
    return reach(model, train, examples, schedule, lr_log_sigma2=rate, threshold=harshest(recipe), world=world)


def harshest(recipe: Recipe) -> Threshold | None:
    """The threshold by which most goes, of those that a recipe may choose; None: each layer's own. A search has no choice of
    candidates."""
    settings = recipe.relevance
    if recipe.search.wanted:
        return settings.threshold
    numbers = [limit for limit in settings.candidates if isinstance(limit, int | float)]
    return min(numbers) if numbers else settings.candidates[0] if settings.candidates else settings.threshold


def out_of_reach(recipe: Recipe, found: Reach) -> list[str]:
    """A warning where less than half of the weights can get to the threshold, with what to set; [] otherwise."""
    if found.enough or not recipe.train.epochs:
        return []
    cures = []
    if found.times is not None:
        longer = math.ceil(found.times)
        cures += [f"{longer} times the steps (--epochs {longer * recipe.train.epochs}, or smaller batches)"]
        if recipe.train.optimizer == "sgd":  # its rate is not that of log sigma2
            cures += [f"--set train.lr_log_sigma2={found.lr_log_sigma2 * found.times:.2g}"]
        else:
            cures += [f"--set train.lr={recipe.train.lr * found.times:.2g}"]
    limit = harshest(recipe)
    cures += ["a lower threshold, as --threshold 1"] if limit is None or (isinstance(limit, int | float) and limit > 1) else []
    cures += ["--set train.lr_log_sigma2=auto"] if recipe.train.lr_log_sigma2 is None else []
    return [f"training is too short for most weights to go: {found}. Try {'; or '.join(cures)}"]
