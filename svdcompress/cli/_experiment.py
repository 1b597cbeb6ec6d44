"""`svdc sparsify` on a recipe that names an experiment, which has stages of its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from svdcompress.cli._common import err_console, out_console, print_json
from svdcompress.errors import UsageError

if TYPE_CHECKING:
    from svdcompress.recipe import Recipe


def experiment(
    made: Recipe,
    folder: Path,
    given: list[str],
    *,
    resume: bool = False,
    dry_run: bool = False,
    overwrite: bool = False,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Run an experiment in place of the usual stages, or print what it would do. given: names of fields set by options."""
    from svdcompress import experiments, report

    assert made.experiment is not None
    if resume:
        raise UsageError(f"the experiment {made.experiment.name} takes minutes and starts over each time: leave out --resume")
    experiments.check(made, given)
    if dry_run:
        found = experiments.outline(made)
        print_json({**found, "out": str(folder)}) if json else _show(found, folder, out_console())
        return
    say = (lambda line: None) if quiet or json else partial(err_console().print, markup=False)
    results = experiments.run_recipe(made, folder, say, overwrite=overwrite)
    if json:
        print_json({**results, "out": str(folder)})
    elif not quiet:
        report.table(results, out_console(), folder)


def _show(found: dict[str, Any], folder: Path, console: Console) -> None:
    console.print(f"[bold]{found['experiment']}[/]  {escape(found['about'])}\n")
    console.print("settings (--set experiment.settings.NAME=VALUE):")
    for name, value in found["settings"].items():
        console.print(f"  {name} = {value}", markup=False, highlight=False)
    data = f"data {found['data']}" if found["data"] else "data of its own"
    console.print(f"\n{data}, seed {found['seed']}, on {found['device']}", markup=False, highlight=False)
    console.print(
        f"It trains its nets, compares them and writes report.html, report.json, recipe.yaml and pictures to {folder}/",
        markup=False,
        highlight=False,
    )
