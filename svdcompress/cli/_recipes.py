"""`svdc recipes`: the bundled recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.syntax import Syntax
from rich.table import Table

from svdcompress.cli._command import Command, Group
from svdcompress.cli._common import Debug, Json, command, out_console, print_json
from svdcompress.cli._settings import complete_recipe
from svdcompress.errors import OutputError
from svdcompress.recipe import describe_recipe, find_recipe, shipped_recipes

app = typer.Typer(cls=Group, invoke_without_command=True, help="List, show or copy the bundled recipes (alone: list them).")

Name = Annotated[str, typer.Argument(metavar="NAME", help="A recipe's name.", autocompletion=complete_recipe)]


@app.callback()
@command
def _alone(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_()


@app.command(name="list", cls=Command)
@command
def list_(json: Json = False, debug: Debug = False) -> None:
    """List the recipes and what each one shows."""
    found = {name: describe_recipe(path) for name, path in shipped_recipes().items()}
    if json:
        print_json(found)
        return
    table = Table.grid(padding=(0, 2))
    for name, text in found.items():
        table.add_row(f"[bold]{name}[/]", text)
    out_console().print(table)


@app.command(cls=Command)
@command
def show(name: Name, debug: Debug = False) -> None:
    """Print a recipe."""
    text = find_recipe(name).read_text(encoding="utf-8")
    console = out_console()
    if console.is_terminal:
        console.print(Syntax(text, "yaml", background_color="default"))
    else:
        print(text, end="")


@app.command(cls=Command)
@command
def copy(
    name: Name,
    to: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="The file to write (NAME.yaml).")] = None,
    debug: Debug = False,
) -> None:
    """Copy a recipe to a file of your own, to edit it."""
    source = find_recipe(name)
    target = to or Path(f"{source.stem}.yaml")
    if target.is_dir():
        target = target / f"{source.stem}.yaml"
    if target.exists():
        raise OutputError(f"{target}: exists already; name another file")
    try:
        target.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{target}: cannot be written ({error.strerror})") from error
    out_console().print(f"{target}: edit it, then run: svdc sparsify {target}", markup=False, highlight=False)
