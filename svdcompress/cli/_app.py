"""The application: its help, its commands, and how errors become one line and an exit code."""

from __future__ import annotations

from typing import Annotated

import typer

from svdcompress import errors
from svdcompress.cli import _bench, _compare, _evaluate, _inspect, _pack, _recipes, _runs, _sparsify, _verify
from svdcompress.cli._command import SETTINGS, Command, Group
from svdcompress.cli._common import command
from svdcompress.cli._threads import wait_passively

EXIT_CODES = (
    ("0", "done; figures that could not be made are warnings"),
    ("1", "a bug: please report it, with --debug"),
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
Make a trained network smaller by dropping the weights the data doesn't support. What is left still knows how sure it is.

[bold]Try it[/] (scikit-learn's digits, nothing to download, about a minute):

  svdc sparsify digits

[bold]Your own model:[/]

  svdc inspect  --model ./model.py:make --data imagefolder:photos

  svdc sparsify --model ./model.py:make --weights trained.pt --data imagefolder:photos --max-drop 0.5

[bold]Then[/] open the run's report.html, and:

  svdc evaluate RUN                    dense vs. sparse, with and without uncertainty

  svdc predict RUN --input x.npy       predictions, and how sure each one is

[bold]Recipes[/] are YAML files with all settings: `svdc recipes`, `svdc recipes copy digits`. Any field can be set with
--set, as in --set train.beta.final=0.1.

[bold]Tab completion:[/] `svdc --install-completion`, then open a new shell.
"""

app = typer.Typer(
    name="svdc",
    help=HELP,
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    cls=Group,
    context_settings=SETTINGS,
    epilog="\b\n" + "\n".join(["[bold]Exit codes[/]", *(f"[bold]{code:>3}[/]  {meaning}" for code, meaning in EXIT_CODES)]),
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

app.command(cls=Command, rich_help_panel=MAIN)(command(_sparsify.sparsify))
app.command(cls=Command, rich_help_panel=MAIN)(command(_inspect.inspect))
app.command(cls=Command, rich_help_panel=MAIN)(command(_compare.sweep))
app.add_typer(_recipes.app, name="recipes", rich_help_panel=MAIN)
_PACKING = (_pack.pack, _pack.unpack)
for _work in (
    _evaluate.evaluate,
    _runs.predict,
    _runs.export,
    _bench.bench,
    _runs.report,
    _compare.compare,
    _verify.verify,
    *_PACKING,
):
    app.command(cls=Command, rich_help_panel=AFTER)(command(_work))


def main() -> None:
    """The entry point of `svdc`."""
    wait_passively()
    app()
