"""An experiment by name, from its settings to its folder."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from svdcompress.errors import OutputError, RecipeError
from svdcompress.experiments._common import Context, read_settings
from svdcompress.recipe import Recipe, dump_recipe
from svdcompress.train import seed_everything, write_atomically

EXPERIMENTS = {
    "bayes-linear": "_bayes_linear",
    "co2": "_co2",
    "leak": "_leak",
    "rotated-digit": "_rotated_digit",
    "vae": "_vae",
}
"""The module of each experiment; it has `Settings` and `run(settings, context)`."""


def run(name: str, settings: Mapping[str, Any], context: Context) -> dict[str, Any]:
    """Run an experiment; its pictures and report.json go into the context's folder, which is made.

    Returns a JSON-able dict: "experiment", "settings", "seed", "seconds", "plots" (names of files) and the experiment's own
    figures. Raises RecipeError for an unknown experiment or setting, OutputError for a folder that holds something.
    """
    if name not in EXPERIMENTS:
        raise RecipeError(f"experiment: unknown {name!r}; one of {', '.join(EXPERIMENTS)}")
    module = importlib.import_module(f"svdcompress.experiments.{EXPERIMENTS[name]}")
    chosen = read_settings(module.Settings, settings, name)
    _prepare(context.out)
    seed_everything(context.seed, name)
    start = time.perf_counter()
    found = module.run(chosen, context)
    results = {
        "experiment": name,
        "settings": dict(vars(chosen)),
        "seed": context.seed,
        "seconds": round(time.perf_counter() - start, 1),
        **found,
    }
    write_atomically(context.out / "report.json", lambda path: path.write_text(json.dumps(results, indent=1) + "\n"))
    return results


def run_recipe(recipe: Recipe, out: Path, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Run the experiment that a recipe names; recipe.yaml goes into the folder too. See `run`."""
    if recipe.experiment is None:
        raise RecipeError("experiment: the recipe names none")
    context = Context(out, recipe.seed, recipe.device, recipe.data, say)
    results = run(recipe.experiment.name, recipe.experiment.settings, context)
    write_atomically(out / "recipe.yaml", lambda path: path.write_text(dump_recipe(recipe), encoding="utf-8"))
    return results


def _prepare(out: Path) -> None:
    if out.is_dir() and any(out.iterdir()):
        raise OutputError(f"{out}: holds something already; choose another folder with --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{out}: cannot be made ({error})") from error
