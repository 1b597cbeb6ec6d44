"""`run`: a recipe into a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from svdcompress.errors import Interrupted, OutputError, RecipeError
from svdcompress.pipeline._folder import STATE, discard, free_folder, prepare, signals, stored_recipe
from svdcompress.pipeline._stages import Stages
from svdcompress.recipe import Recipe
from svdcompress.train import Bars, find_place, wait


def run(
    recipe: Recipe,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
    quiet: bool = True,
) -> dict[str, Any]:
    """Do all stages of a recipe and write the run's folder; returns what `report.json` holds.

    out: the folder (None: the recipe's, else a new one below `runs`).
    resume: go on with the run that this folder holds, which was stopped; the recipe must be the same, but for the sections
        of stages that have not begun (such as relevance, after a run that pruned too much).
    overwrite: move aside what the folder holds.
    console, quiet: where progress is shown, and whether not at all.

    SIGINT and SIGTERM stop in good order: Interrupted says how to go on. Raises OutputError for a folder that holds something
    else, and what the stages raise.
    """
    console = console or Console(stderr=True)
    folder = Path(out or recipe.out or free_folder("run"))
    place = find_place(recipe.device)
    say: Callable[[str], None] = console.print if place.first and not quiet else (lambda text: None)
    if resume and (folder / "recipe.yaml").is_file():
        _same(stored_recipe(folder), recipe, folder)
    if place.first and (moved := prepare(folder, resume=resume, overwrite=overwrite)):
        say(moved)
    wait()
    recipe = recipe.model_copy(update={"out": None})  # the stored recipe must run again, elsewhere
    with signals() as stop, Bars(console, quiet or not place.first) as bars:
        try:
            return Stages(recipe, folder, place, bars, stop, say).run()
        except Interrupted as error:
            raise Interrupted(f"{error} Go on with: svdc sparsify --resume --out {folder}") from None
        except KeyboardInterrupt:
            raise Interrupted(f"stopped at once. Go on with: svdc sparsify --resume --out {folder}") from None
        except Exception as error:
            if place.first and not resume:
                discard(folder)
            if isinstance(error, OSError):
                where = f"{error.filename}: " if error.filename else ""
                raise OutputError(f"{where}{error.strerror or error}") from error
            raise


LATER = {"relevance": "pruned.safetensors", "prune": "pruned.safetensors", "recover": "recover.pt"}
"""Sections that a resumed run may have otherwise, until this file of `state/` exists."""

ALWAYS = ("out", "device", "export", "uncertainty", "report", "description")
"""Sections that tell only how a run is carried out and what is written at its end."""


def _same(stored: Recipe, given: Recipe, folder: Path) -> None:
    left, right = stored.model_dump(exclude=set(ALWAYS)), given.model_dump(exclude=set(ALWAYS))
    changed = [name for name in left if left[name] != right[name]]
    changed = [name for name in changed if name not in LATER or (folder / STATE / LATER[name]).exists()]
    if changed:
        raise RecipeError(
            f"--resume: {folder}/recipe.yaml and the given recipe differ in {', '.join(changed)}; "
            "resume with the run's own recipe (give none), or start another run with another --out"
        )
