"""Runs an experiment by name, from its settings to its folder."""

from __future__ import annotations

import dataclasses
import importlib
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from svdcompress import report
from svdcompress.errors import RecipeError, UsageError
from svdcompress.experiments._common import Context, read_settings
from svdcompress.experiments._takes import DATA, check_recipe
from svdcompress.pipeline import prepare, versions
from svdcompress.recipe import Recipe, dump_recipe
from svdcompress.train import find_place, seed_everything

EXPERIMENTS = {
    "bayes-linear": "_bayes_linear",
    "co2": "_co2",
    "flow": "_flow",
    "leak": "_leak",
    "rotated-digit": "_rotated_digit",
    "vae": "_vae",
}
"""The module of each experiment, which has `Settings` and `run(settings, context)`."""


def run(
    name: str, settings: Mapping[str, Any], context: Context, *, overwrite: bool = False, more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Run an experiment; its pictures, report.json and report.html go into the context's folder, which is created.

    context: its device as in a recipe (auto, cpu, cuda, cuda:1, mps). overwrite: move aside what the folder holds.
    more: further entries of the report, such as its description.

    Returns what report.json holds: "experiment", "settings", "seed", "device", "versions", "seconds" of each stage, "pictures",
    and the experiment's own figures. Raises RecipeError for an unknown experiment or setting, UsageError for a device that is
    not available or a launch of several processes, OutputError for a folder that is not empty.
    """
    module, chosen = _chosen(name, settings)
    place = find_place(context.device)
    if place.world > 1:
        raise UsageError(f"the experiment {name} runs in one process; start it without accelerate or torchrun")
    context = dataclasses.replace(context, device=str(place.device), seconds={})
    if moved := prepare(context.out, overwrite=overwrite):
        context.say(moved)
    shutil.rmtree(context.out / "state")  # only for runs that can be resumed
    seed_everything(context.seed, name)
    start = time.monotonic()
    try:
        found = module.run(chosen, context)
    except BaseException:
        if not any(context.out.iterdir()):
            context.out.rmdir()  # the name is free again
        raise
    rest = time.monotonic() - start - sum(context.seconds.values())
    results = {
        "name": context.out.name,
        **(more or {}),
        "experiment": name,
        "settings": dict(vars(chosen)),
        "seed": context.seed,
        "device": context.device,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": {stage: round(value, 1) for stage, value in {**context.seconds, "figures": rest}.items()},
        "versions": versions(),
        **found,
    }
    results = report.plain(report.stamped(results, context.out))
    report.write(context.out, results)
    return results


def run_recipe(
    recipe: Recipe, out: Path, say: Callable[[str], None] = lambda line: None, *, overwrite: bool = False
) -> dict[str, Any]:
    """Run the experiment that a recipe names; recipe.yaml goes into the folder too. See `run`.

    Raises RecipeError for fields of the recipe that have no effect on an experiment.
    """
    if recipe.experiment is None:
        raise RecipeError("experiment: the recipe names none")
    check(recipe)
    text = dump_recipe(recipe.model_copy(update={"out": None}))
    context = Context(out, recipe.seed, recipe.device, recipe.data, say)
    more = {"description": recipe.description.strip(), "recipe": text}
    results = run(recipe.experiment.name, recipe.experiment.settings, context, overwrite=overwrite, more=more)
    report.write_text(out / "recipe.yaml", text)
    return results


def check(recipe: Recipe, given: Iterable[str] = ()) -> None:
    """Refuse fields that have no effect: those that the recipe's experiment does not read, and that differ from their default
    or were set (`given`: dotted names). Raises RecipeError, which lists what the experiment takes."""
    if recipe.experiment is None:
        raise RecipeError("experiment: the recipe names none")
    module, _ = _chosen(recipe.experiment.name, {})
    check_recipe(recipe, [field.name for field in dataclasses.fields(module.Settings)], given)


def outline(recipe: Recipe) -> dict[str, Any]:
    """What `run_recipe` would do: "experiment", "about" (its description), "settings" (all of them), "data" (None: it makes
    its own), "seed" and "device". Nothing is read or written. Raises what `run_recipe` raises for a recipe and a device."""
    if recipe.experiment is None:
        raise RecipeError("experiment: the recipe names none")
    name = recipe.experiment.name
    check(recipe)
    module, chosen = _chosen(name, recipe.experiment.settings)
    about = recipe.description.strip() or (module.__doc__ or "").partition("\n")[0]
    data = recipe.data.name if name in DATA else None
    return {
        "experiment": name,
        "about": about,
        "settings": dict(vars(chosen)),
        "data": data,
        "seed": recipe.seed,
        "device": str(find_place(recipe.device).device),
    }


def _chosen(name: str, settings: Mapping[str, Any]) -> tuple[Any, Any]:
    """An experiment's module, and its settings."""
    if name not in EXPERIMENTS:
        raise RecipeError(f"experiment: unknown {name!r}; one of {', '.join(EXPERIMENTS)}")
    module = importlib.import_module(f"svdcompress.experiments.{EXPERIMENTS[name]}")
    return module, read_settings(module.Settings, settings, name)
