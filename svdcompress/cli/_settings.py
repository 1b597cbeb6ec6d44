"""From a recipe argument and options to a checked recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from svdcompress.cli._common import key_values
from svdcompress.errors import UsageError
from svdcompress.recipe import Recipe, load_recipe, shipped_recipes

MODEL, DATA, TRAINING, RUN = "Model", "Data", "Training", "Run"


def complete_recipe(incomplete: str) -> list[str]:
    """Names of shipped recipes, for the shell."""
    return [name for name in shipped_recipes() if name.startswith(incomplete)]


RecipeArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[RECIPE]", help="A YAML file, or a shipped recipe's name such as digits.", autocompletion=complete_recipe
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="package.module:factory, ./file.py:make, torchvision:NAME, timm:NAME, hf:FOLDER_OR_ID, mlp, "
        "lenet-300-100, lenet-5.",
        rich_help_panel=MODEL,
    ),
]
ModelArg = Annotated[
    list[str], typer.Option(metavar="KEY=VALUE", help="An argument of the model's factory.", rich_help_panel=MODEL)
]
Weights = Annotated[
    str | None,
    typer.Option(
        help="The trained model: .safetensors, .pt or .pth. Without it the dense model is trained first.", rich_help_panel=MODEL
    ),
]
StripPrefix = Annotated[
    str | None, typer.Option(help="Taken off the names of the weights, such as module.", rich_help_panel=MODEL)
]
DataName = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="digits, mnist:DIR, csv:FILE, parquet:FILE, npz:FILE, imagefolder:DIR, cifar10:DIR, hf:NAME_OR_DIR, "
        "package.module:factory.",
        rich_help_panel=DATA,
    ),
]
DataArg = Annotated[
    list[str], typer.Option(metavar="KEY=VALUE", help="An argument of the data's factory.", rich_help_panel=DATA)
]
Target = Annotated[str | None, typer.Option(metavar="COLUMN", help="The column to predict, for tables.", rich_help_panel=DATA)]
LossName = Annotated[
    str | None,
    typer.Option("--loss", help="cross-entropy, binary, mse, gaussian-nll, package.module:loss.", rich_help_panel=TRAINING),
]
Set = Annotated[
    list[str],
    typer.Option("--set", metavar="FIELD=VALUE", help="Any field of the recipe: train.beta.final=0.1.", rich_help_panel=RUN),
]


def settings(
    recipe: str | None,
    *,
    overrides: list[str],
    model_arg: list[str] | None = None,
    data_arg: list[str] | None = None,
    **options: Any,
) -> Recipe:
    """The recipe of a file or of the defaults, with the options that were given (dots in their names are double underscores).

    Raises UsageError where neither a recipe nor both of model and data are named.
    """
    fields = {name.replace("__", "."): value for name, value in options.items() if value is not None}
    if model_arg:
        fields["model.args"] = key_values(model_arg, "--model-arg")
    if data_arg:
        fields["data.args"] = key_values(data_arg, "--data-arg")
    found = load_recipe(recipe, overrides, fields)
    if found.experiment is None and not (found.model.name and found.data.name):
        missing = "--model" if not found.model.name else "--data"
        raise UsageError(
            f"{missing} is missing: name a recipe (svdc recipes list), or both --model and --data, "
            "as in: svdc sparsify --model ./model.py:make --weights trained.pt --data imagefolder:photos"
        )
    return found


def stem(recipe: str | None, made: Recipe) -> str:
    """A name for a run's folder."""
    if recipe is not None:
        path = Path(recipe)
        return path.name if path.is_dir() else path.stem
    name = str(made.model.name).rpartition(":")[2] if ":" in str(made.model.name) else str(made.model.name)
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name) or "run"
