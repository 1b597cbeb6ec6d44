"""`run`: carries out a recipe in a folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from svdcompress.errors import DataError, Interrupted, OutputError, RecipeError, SvdcError, TrainingError, out_of_memory
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._folder import (
    STATE,
    RunState,
    discard,
    free_folder,
    has_trained,
    locked,
    prepare,
    resume_command,
    signals,
)
from svdcompress.pipeline._own_recipe import recipe_used
from svdcompress.pipeline._processes import check_number, remember_number
from svdcompress.pipeline._results import RunResults
from svdcompress.pipeline._resume import outdated
from svdcompress.pipeline._search_start import check_epochs
from svdcompress.pipeline._stages import run_stages
from svdcompress.pipeline._threads import Threads, first_training, same_threads
from svdcompress.recipe import Recipe
from svdcompress.train import Bars, NotFinite, Place, broadcast, find_place, on_first


def run(
    recipe: Recipe,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
    quiet: bool = True,
    choose_threads: bool = False,
) -> dict[str, Any]:
    """Run all stages of a recipe and write the run's folder; returns the contents of `report.json`.

    out: the folder (None: the recipe's, else a new one in `runs`).
    resume: continue the stopped run in this folder. The recipe may differ in settings that nothing was made with yet: the
        sections of stages that have done no epoch (such as relevance, after a run that pruned too much), and learning rates,
        clip and precision of the stage under way (as after a loss that is not finite).
    overwrite: move the contents of the folder aside; they are moved back if the run fails before it has trained anything.
    console, quiet: where progress is shown; with `quiet`, not at all.
    choose_threads: before the first epoch, measure with how many of PyTorch's threads training is fastest here and now, up to
        the number that is set, and keep that number (False: the number that is set). The last bits of results depend on it.

    SIGINT and SIGTERM stop the run cleanly with Interrupted, which says how to resume. Raises OutputError for a folder that
    holds something else, and whatever the stages raise.
    """
    console = console or Console(stderr=True)
    place = find_place(recipe.device)
    folder = Path(broadcast(str(out or recipe.out or free_folder("run"))))  # each process might find another free name
    for stage in ("dense", "train", "recover"):
        if getattr(recipe, stage).precision == "fp16" and place.device.type != "cuda":
            raise RecipeError(f"{stage}.precision: fp16 needs a CUDA device, but this is {place.device}; use bf16 or no")
    check_epochs(recipe)
    if recipe.search.wanted and place.world > 1:
        raise RecipeError("search: works in one process only; start it without accelerate launch or torchrun")
    tell = partial(console.print, soft_wrap=not console.is_terminal)  # no wrapping of lines in files
    say: Callable[[str], None] = tell if place.first and not quiet else (lambda text: None)
    with ExitStack() as stack:

        def begin() -> None:
            begun = resume and (folder / "recipe.yaml").is_file() and (folder / STATE).is_dir()
            if begun:
                stack.enter_context(locked(folder))  # before anything is changed
                check_number(folder, recipe, place.world)
                for file in outdated(recipe_used(folder), recipe, folder):
                    file.unlink(missing_ok=True)
            if moved := prepare(folder, resume=resume, overwrite=overwrite):
                say(escape(moved))
            if not begun:
                stack.enter_context(locked(folder))

        on_first(place, begin)
        with same_threads(folder, place.first, say, choose_threads) as threads:
            return _stages(recipe, folder, place, console, say, threads, resume=resume, quiet=quiet)


def _stages(
    recipe: Recipe,
    folder: Path,
    place: Place,
    console: Console,
    say: Callable[[str], None],
    threads: Threads,
    *,
    resume: bool,
    quiet: bool,
) -> dict[str, Any]:
    recipe = recipe.model_copy(update={"out": None})  # the stored recipe must run again, elsewhere
    again = resume_command(folder, recipe)
    context: Context | None = None
    with signals() as stop, Bars(console, quiet or not place.first) as bars:
        try:
            state = RunState(folder, writer=place.first)
            remember_number(state, place.world)
            results = RunResults(seconds=dict(state.facts.get("seconds", {})))
            with first_training(threads, state, results, say):
                context = Context(recipe, folder, place, bars, stop, say, state, results)
                return run_stages(context)
        except Interrupted as error:
            raise Interrupted(f"{error} Continue with: {again}") from None
        except NotFinite as error:
            raise TrainingError(
                f"{error} Continue from there with: {resume_command(folder, recipe, f'--set {error.section}.lr=...')} "
                f"(or {error.section}.clip=..., {error.section}.precision=no)"
            ) from error
        except KeyboardInterrupt:
            raise Interrupted(f"stopped at once. Continue with: {again}") from None
        except Exception as error:
            back = discard(folder) if place.first and not resume else ""
            if back:
                say(escape(back))
            left = not back and (resume or has_trained(folder))  # another process may be about to discard it
            kept = left and os.path.isfile(folder / "recipe.yaml")
            mend = f". Once that is fixed, continue with: {again}" if kept else ""
            if isinstance(error, SvdcError) and mend and (error.resumable or isinstance(error, OutputError | DataError)):
                raise type(error)(f"{str(error).rstrip('.')}{mend}") from error
            if out_of_memory(error):
                raise TrainingError(
                    f"out of memory{_for_memory('' if context is None else context.stage_now)}, or use a machine or device "
                    f"with more.{f' What was trained is kept: {again}' if kept else ''}"
                ) from error
            if isinstance(error, OSError):
                where = f"{error.filename}: " if error.filename else ""
                raise OutputError(f"{where}{error.strerror or error}{mend}") from error
            raise


BATCHES = "lower {}.batch_size (accumulate makes up for it)"

LESS = {
    "dense": BATCHES.format("dense"),
    "search": f"{BATCHES.format('train')} and recover.batch_size, or set search.reconstruct=off",
    "train": BATCHES.format("train"),
    "recover": BATCHES.format("recover"),
    "calibrate": "set calibrate.posterior=variational and calibrate.temperature=false, or use fewer validation examples "
    "(data.validation)",
    "figures": "lower uncertainty.samples, or use fewer test examples (data.limit)",
}
"""What takes less memory, by the stage that ran out of it. Stages that are not here have nothing to lower."""


def _for_memory(stage: str) -> str:
    """The stage that ran out of memory, and what helps there."""
    said = f" in the stage {stage}" if stage else ""
    return f"{said}: {LESS.get(stage, 'use smaller inputs (data.transform), or fewer of them (data.limit)')}"
