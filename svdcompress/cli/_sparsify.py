"""`svdc sparsify`: the main job."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from svdcompress.cli import _settings as s
from svdcompress.cli._common import Debug, Device, Json, announce_code, err_console, out_console, print_json
from svdcompress.cli._experiment import experiment
from svdcompress.cli._threads import number_is_set
from svdcompress.errors import TrustError, UsageError, shortened

if TYPE_CHECKING:
    from svdcompress.recipe import Recipe


@s.with_settings
def sparsify(
    settings: s.Settings,
    epochs: Annotated[
        int | None,
        typer.Option(help="Epochs of fine-tuning (20).", rich_help_panel=s.TRAINING),
    ] = None,
    dense_epochs: Annotated[
        int | None,
        typer.Option(help="Epochs for the dense model if there are no --weights (20).", rich_help_panel=s.TRAINING),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(help="Drop weights with log alpha at or above this, in all layers (3).", rich_help_panel=s.TRAINING),
    ] = None,
    max_drop: Annotated[
        float | None,
        typer.Option(
            help="Find the smallest model that loses at most this many points of validation error (regression: percent of the "
            "RMSE).",
            rich_help_panel=s.SEARCH,
        ),
    ] = None,
    max_error: Annotated[
        float | None,
        typer.Option(help="The same as a limit on the error itself, in percent (regression: RMSE).", rich_help_panel=s.SEARCH),
    ] = None,
    goal: Annotated[
        str | None,
        typer.Option(
            metavar="MEASURE=SIZE",
            help="Find the best model of a size: latency=2x, macs=0.4, parameters=10x, nonzero=50x, bytes=200kB.",
            rich_help_panel=s.SEARCH,
        ),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            metavar="MEASURE",
            help="What --max-drop minimizes: parameters, macs, latency, bytes, nonzero.",
            rich_help_panel=s.SEARCH,
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            help="Models to try, at most; if not set, what 3 times the epochs of one run allow, and the best one recovers "
            "further with the rest.",
            rich_help_panel=s.SEARCH,
        ),
    ] = None,
    max_minutes: Annotated[
        float | None, typer.Option(help="Start no trial after this many minutes of searching.", rich_help_panel=s.SEARCH)
    ] = None,
    latency_command: Annotated[
        str | None,
        typer.Option(
            metavar="CMD",
            help="A command that measures latency: gets an ONNX file as its last argument, prints milliseconds.",
            rich_help_panel=s.SEARCH,
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="FORM",
            help="One more file in fewer bits: int8; int4 or float16 (stored so, run in float32); auto: int8 where it can.",
            rich_help_panel=s.RUN,
        ),
    ] = None,
    no_calibrate: Annotated[
        bool,
        typer.Option(
            "--no-calibrate", help="Fit no temperature; keep the posterior from training.", rich_help_panel=s.TRAINING
        ),
    ] = False,
    coverage: Annotated[
        float | None,
        typer.Option(
            help="How often prediction sets or intervals should contain the truth, e.g. 0.9.", rich_help_panel=s.TRAINING
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed (0).", rich_help_panel=s.RUN)] = None,
    device: Device = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder (default: a new one in runs/).", rich_help_panel=s.RUN)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.", rich_help_panel=s.RUN)] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="If --out is not empty, move it aside first.", rich_help_panel=s.RUN)
    ] = False,
    trust_code: Annotated[
        bool,
        typer.Option(
            "--trust-code", help="With --resume: allow the Python code that the folder's recipe names.", rich_help_panel=s.RUN
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the plan and estimates of time and memory; write nothing.", rich_help_panel=s.RUN
        ),
    ] = False,
    json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no table.", rich_help_panel="Output")] = False,
    debug: Debug = False,
) -> None:
    """Make a trained model smaller: convert, fine-tune, prune, recover, evaluate, export to ONNX, report.

    Takes a [bold]RECIPE[/], or --model and --data with default settings. With --max-drop or --goal it searches for the best
    model instead of using one fixed setting. Without --weights (or weights in the recipe) the dense model is trained first.
    Everything goes into one folder: model.onnx, model_mc.onnx, model.safetensors, report.html, ...

    Continue a stopped run with: svdc sparsify --resume --out FOLDER
    """
    if resume and (out is None or dry_run):
        raise UsageError("--resume needs --out FOLDER, the folder of the stopped run, and excludes --dry-run")
    recipe = settings.recipe
    source = str(out) if resume and recipe is None and out is not None and (out / "recipe.yaml").is_file() else recipe
    if resume and source is None and out is not None:
        from svdcompress import pipeline

        pipeline.prepare(out, resume=True)  # says what is wrong with the folder
    if resume and recipe is None and out is not None and source is not None:
        from svdcompress import pipeline

        pipeline.check_own_recipe(out)
    limit = None if resume else threshold  # trained layers already have their own threshold
    options: dict[str, Any] = {"train__epochs": epochs, "dense__epochs": dense_epochs, "convert__threshold": limit}
    options |= {"seed": seed, "device": device, "calibrate__coverage": coverage, "export__precision": precision}
    if no_calibrate:
        options |= {"calibrate__temperature": False, "calibrate__posterior": "variational"}
    options |= {"search__max_drop": max_drop, "search__max_error": max_error, "search__goal": goal}
    options |= {"search__trials": trials, "search__max_minutes": max_minutes, "search__latency_command": latency_command}
    options["search__objective"] = objective
    made = settings.resolved(source, **options)
    _check_search(
        made, {"objective": objective, "trials": trials, "max-minutes": max_minutes, "latency-command": latency_command}
    )
    from svdcompress import pipeline  # after the recipe: a misspelled name should not wait for torch

    if resume and recipe is None and out is not None:
        _check_code(made, out, settings.given(**options), trust_code)
    folder = out or (Path(made.out) if made.out and not resume else None) or pipeline.free_folder(s.stem(recipe, made))
    if made.experiment is not None:
        given = settings.given(**options)
        experiment(made, folder, given, resume=resume, dry_run=dry_run, overwrite=overwrite, json=json, quiet=quiet)
        return
    if threshold is not None:  # overrides the recipe and its rules for layers
        made = settings.resolved(source, **options, relevance__threshold=threshold, relevance__candidates=[])
    if dry_run:
        found = pipeline.estimate(made)
        print_json(found.to_dict()) if json else show_estimate(found, made, out_console())
        return
    from svdcompress.train import leave

    silent = quiet or json
    console = err_console()
    if not silent:
        _announce(made, folder, recipe, console)
    how: dict[str, Any] = {"console": console, "quiet": silent, "choose_threads": not number_is_set()}
    results = pipeline.run(made, folder, resume=resume, overwrite=overwrite, **how)
    if json and results:
        print_json({**results, "out": str(folder)})
    elif results and not quiet:
        _show_table(results, folder, debug)
        out_console().print(next_steps(made, folder), highlight=False, markup=False, soft_wrap=True)
    leave()


def _show_table(results: dict[str, Any], folder: Path, debug: bool) -> None:
    """Print a run's table; a failure becomes a warning, as with any figure: all files are written."""
    from svdcompress import report

    try:
        report.table(results, out_console(), folder)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
        if debug:
            err_console().print_exception()
        reason = shortened(f"{type(error).__name__}: {error}")
        told = f"warning: no table ({reason}); the files in {folder} are not affected"
        err_console().print(told, style="yellow", markup=False, highlight=False, soft_wrap=True)


def next_steps(made: Recipe, folder: Path) -> str:
    """What to do with a finished run: commands that work as they stand."""
    from svdcompress.sources import run_argument

    run = run_argument(folder, made)
    steps = [f"svdc evaluate {run}  (uncertainty, compared)", f"svdc predict {run} --input FILE"]
    if made.report.html:
        steps.insert(0, f"open {shlex.quote(str(folder / 'report.html'))}")
    return "\nnext: " + "\n      ".join(steps)


def _check_search(made: Recipe, given: dict[str, Any]) -> None:
    """Raises UsageError for options of a search that would have no effect. given: {name: value}; None: not given."""
    from svdcompress.recipe import parse_goal

    named = [f"--{name}" for name, value in given.items() if value is not None]
    if named and not made.search.wanted:
        told = f"{', '.join(named[:-1])} and {named[-1]} need" if named[1:] else f"{named[0]} needs"
        raise UsageError(f"{told} --max-drop, --max-error or --goal: without one of them there is no search")
    goal = made.search.goal
    if given["latency-command"] is not None and "latency" not in (made.search.objective, goal and parse_goal(goal).measure):
        raise UsageError(
            "--latency-command needs --goal latency=... or --objective latency: otherwise no latency is searched for"
        )


def _check_code(made: Recipe, folder: Path, given: list[str], trust_code: bool) -> None:
    """Raises TrustError for code that the recipe in a run's folder names and that no option names again."""
    from svdcompress.pipeline import untrusted
    from svdcompress.sources import code_of_run

    own = [f"{name}.name" if name in ("model", "data", "loss") else name for name in given]  # --data leaves transforms in
    named = {field: name for field, name in code_of_run(made).items() if not any(f"{field}.".startswith(f"{o}.") for o in own)}
    if named and not trust_code:
        raise TrustError(untrusted(folder, named))
    announce_code(folder, named)


def _announce(made: Recipe, folder: Path, recipe: str | None, console: Console) -> None:
    if not console.is_terminal or os.environ.get("RANK", "0") != "0":
        return
    text = made.description.strip().partition("\n")[0]
    console.print(f"[bold]{escape(s.stem(recipe, made))}[/]  {escape(text)}")
    start = f", weights {made.weights.file}" if made.weights.file else ""
    console.print(
        f"model {made.model.name}{start}, data {made.data.name}; results go to {folder}/\n", markup=False, highlight=False
    )


def show_estimate(found: Any, made: Recipe, console: Console) -> None:
    """Print the plan of a run in readable form."""
    console.print(plan_table(found.plan))
    counts = ", ".join(f"{name} {count:,}" for name, count in found.examples.items())
    console.print(f"\nexamples: {counts}", highlight=False)
    console.print(f"weights to be converted: {found.converted:,} of {found.parameters:,} parameters", highlight=False)
    console.print(f"beta ends at {found.beta:g} (train.beta.final: {made.train.beta.final})", highlight=False)
    share = made.convert.share
    parts = ", ".join(f"{n} {part:g}" for n, part in share.items()) if isinstance(share, dict) else str(share)
    console.print(f"judged together: {parts} (convert.share)", highlight=False)
    console.print(f"way to the threshold: {found.reach}", highlight=False)
    console.print(
        f"memory for weights, gradients and optimizer: {found.memory / 1e6:,.1f} MB, plus activations", highlight=False
    )
    parts = ", ".join(f"{name} {_minutes(value)}" for name, value in found.seconds.items())
    console.print(f"time on {found.device}, at most about {_minutes(sum(found.seconds.values()))} ({parts}):", highlight=False)
    if made.search.wanted:
        from svdcompress.pipeline import levels_and_trials

        levels, trials = levels_and_trials(made)
        shown = [f"{number} {noun}{'' if number == 1 else 's'}" for number, noun in ((trials, "trial"), (levels, "level"))]
        where = f"on {shown[1]} of pressure" if levels else "cut from the dense weights at once, as train.epochs is 0"
        console.print(f"a search: at most {shown[0]} {where} (--trials)", highlight=False)
        if made.search.trials is None and made.recover.epochs:
            console.print(
                "  the best of them recovers further, with what may be left of three times the epochs of one run",
                highlight=False,
            )
    counted = "train and recover are counted" if made.train.shrink is not None else "recover is counted"
    console.print(f"{counted} at full size, an upper bound: units that are removed on the way save time", highlight=False)
    for line in found.notes:
        console.print(f"[dim]note:[/] {escape(line)}")
    for line in found.warnings:
        console.print(f"[yellow]warning:[/] {escape(line)}")


def plan_table(entries: Any) -> Table:
    """Which layers are converted, and why the others are not."""
    table = Table(show_edge=False, pad_edge=False)
    for heading in ("layer", "type"):
        table.add_column(heading, no_wrap=True)
    table.add_column("weights", justify="right", no_wrap=True)
    table.add_column("")
    for entry in entries:
        what = what_is_done(entry.converted, entry.kind, entry.reason, entry.note)
        table.add_row(escape(entry.name), entry.kind, f"{entry.parameters:,}", what)
    return table


def what_is_done(converted: bool, kind: str, reason: str, note: str = "") -> str:
    """What conversion does with a layer, in a word and a color."""
    if converted:
        return f"[green]converted[/], {escape(note)}" if note else "[green]converted[/]"
    return f"[dim]left: {escape(reason.removesuffix(f': {kind}'))}[/]"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
