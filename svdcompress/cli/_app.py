"""The application: its help, its commands, and how errors become one line and an exit code."""

from __future__ import annotations

from typing import Annotated

import typer

from svdcompress import errors
from svdcompress.cli import _bench, _compare, _inspect, _pack, _recipes, _runs, _sparsify, _verify
from svdcompress.cli._common import command
from svdcompress.cli._threads import wait_passively

EXIT_CODES = (
    ("0", "done (figures that could not be made are warnings, and `failed` in report.json: the files are there)"),
    ("1", "an error of the program itself (please report it, with --debug)"),
    *(
        (str(kind.exit_code), (kind.__doc__ or "").strip().partition("\n")[0].rstrip("."))
        for kind in (
            errors.UsageError,
            errors.RecipeError,
            errors.ModelError,
            errors.CheckpointError,
            errors.DataError,
            errors.OutputError,
            errors.TrainingError,
            errors.PruneError,
            errors.ExportError,
            errors.DependencyError,
            errors.TrustError,
            errors.VerifyError,
            errors.Interrupted,
        )
    ),
)
"""Exit codes and what each means, as the help lists them."""

HELP = """
Makes a trained network smaller by asking, of each weight, whether the data still need it; what is left still says how sure
it is.

[bold]A first run[/] (scikit-learn's digits, no download, about a minute):

  svdc sparsify digits

[bold]Your own model:[/]

  svdc inspect  --model ./model.py:make --data imagefolder:photos

  svdc sparsify --model ./model.py:make --weights trained.pt --data imagefolder:photos --out runs/photos

[bold]What came of it:[/] open runs/photos/report.html; then

  svdc evaluate runs/photos --trust-code        dense and sparse, with and without uncertainty

  svdc predict runs/photos --input x.npy --model ./model.py:make

(the folder names your Python code, and a folder can come from anybody: your word is needed to run it)

[bold]Recipes[/] are YAML files that hold all settings: `svdc recipes list`, `svdc recipes copy digits`. Each field can
be set with --set, as in --set train.beta.final=0.1.

[bold]Tab completion[/] of commands, options and recipes: `svdc --install-completion`, then open a new shell.
"""

app = typer.Typer(
    name="svdc",
    help=HELP,
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="[bold]Exit codes:[/] " + "; ".join(f"[bold]{code}[/] {meaning}" for code, meaning in EXIT_CODES),
)


def _version(wanted: bool) -> None:
    if wanted:
        from svdcompress.version import __version__

        print(__version__)
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


MAIN, AFTER = "Make a model smaller", "With a run's folder"

app.command(rich_help_panel=MAIN)(command(_sparsify.sparsify))
app.command(rich_help_panel=MAIN)(command(_inspect.inspect))
app.command(rich_help_panel=MAIN)(command(_compare.sweep))
app.add_typer(_recipes.app, name="recipes", rich_help_panel=MAIN)
_PACKING = (_pack.pack, _pack.unpack)
for _work in (
    _runs.evaluate,
    _runs.predict,
    _runs.export,
    _bench.bench,
    _runs.report,
    _compare.compare,
    _verify.verify,
    *_PACKING,
):
    app.command(rich_help_panel=AFTER)(command(_work))


def main() -> None:
    """The entry point of `svdc`."""
    wait_passively()
    app()
