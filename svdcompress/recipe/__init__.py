"""The schema of a run: what a recipe may say, and how it is read, overridden and written."""

from typing import TYPE_CHECKING

from svdcompress.lazy import import_when_used

if TYPE_CHECKING:
    from svdcompress.recipe._auto import BY_SGD, HEADING, as_written, from_earlier, left_open
    from svdcompress.recipe._checks import LAST_RANDOM_OPSET, SHARES, TASKS
    from svdcompress.recipe._find import describe_recipe, find_recipe, recipes_folder, shipped_recipes
    from svdcompress.recipe._goal import MEASURES, MOST_LEVELS, Goal, parse_goal, smaller
    from svdcompress.recipe._load import WITHOUT_RECIPE, changed, dump_recipe, load_recipe, parse_recipe
    from svdcompress.recipe._schema import (
        BetaSchedule,
        CalibrateSection,
        ConvertSection,
        DataSection,
        DenseSection,
        Distillation,
        ExperimentSection,
        LayerRule,
        LossSection,
        LrSchedule,
        ModelSection,
        Recipe,
        RecoverSection,
        RelevanceSection,
        SearchSection,
        Training,
        TrainSection,
        in_epochs,
    )
    from svdcompress.recipe._yaml import parse_yaml

_HOMES = {
    "_auto": ("BY_SGD", "HEADING", "as_written", "from_earlier", "left_open"),
    "_checks": ("LAST_RANDOM_OPSET", "SHARES", "TASKS"),
    "_find": ("describe_recipe", "find_recipe", "recipes_folder", "shipped_recipes"),
    "_goal": ("MEASURES", "MOST_LEVELS", "Goal", "parse_goal", "smaller"),
    "_load": ("WITHOUT_RECIPE", "changed", "dump_recipe", "load_recipe", "parse_recipe"),
    "_schema": (
        "BetaSchedule",
        "CalibrateSection",
        "ConvertSection",
        "DataSection",
        "DenseSection",
        "Distillation",
        "ExperimentSection",
        "LayerRule",
        "LossSection",
        "LrSchedule",
        "ModelSection",
        "Recipe",
        "RecoverSection",
        "RelevanceSection",
        "SearchSection",
        "Training",
        "TrainSection",
        "in_epochs",
    ),
    "_yaml": ("parse_yaml",),
}

__all__ = [
    "BY_SGD",
    "HEADING",
    "LAST_RANDOM_OPSET",
    "MEASURES",
    "MOST_LEVELS",
    "SHARES",
    "TASKS",
    "WITHOUT_RECIPE",
    "BetaSchedule",
    "CalibrateSection",
    "ConvertSection",
    "DataSection",
    "DenseSection",
    "Distillation",
    "ExperimentSection",
    "Goal",
    "LayerRule",
    "LossSection",
    "LrSchedule",
    "ModelSection",
    "Recipe",
    "RecoverSection",
    "RelevanceSection",
    "SearchSection",
    "TrainSection",
    "Training",
    "as_written",
    "changed",
    "describe_recipe",
    "dump_recipe",
    "find_recipe",
    "from_earlier",
    "in_epochs",
    "left_open",
    "load_recipe",
    "parse_goal",
    "parse_recipe",
    "parse_yaml",
    "recipes_folder",
    "shipped_recipes",
    "smaller",
]

import_when_used(__name__, _HOMES)
