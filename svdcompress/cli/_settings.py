"""Turns the recipe argument and the options into a checked recipe."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from svdcompress.cli._common import key_values
from svdcompress.errors import UsageError
from svdcompress.recipe import shipped_recipes

if TYPE_CHECKING:
    from svdcompress.recipe import Recipe

MODEL, DATA, TRAINING, SEARCH, RUN = "Model", "Data", "Training", "Search", "Run"


def complete_recipe(incomplete: str) -> list[str]:
    """Names of shipped recipes, the caller's own YAML files, and folders on the way to them, for the shell."""
    names = [name for name in shipped_recipes() if name.startswith(incomplete)]
    start = incomplete.rpartition("/")[2]
    prefix = incomplete.removesuffix(start)
    try:
        entries = sorted(Path(prefix or ".").expanduser().iterdir())
    except OSError:
        return names
    fitting = [path for path in entries if path.name.startswith(start) and (start or not path.name.startswith("."))]
    own = [f"{prefix}{path.name}" for path in fitting if path.suffix in (".yaml", ".yml") and path.is_file()]
    return [*names, *own, *(f"{prefix}{path.name}/" for path in fitting if path.is_dir())]


RecipeArgument = Annotated[
    str | None,
    typer.Argument(metavar="[RECIPE]", help="A YAML file, or a bundled recipe such as digits.", autocompletion=complete_recipe),
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
    list[str],
    typer.Option(
        metavar="KEY=VALUE", help="An argument for the model's factory, besides those of the recipe.", rich_help_panel=MODEL
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        help="Trained weights: .safetensors, .pt or .pth. Without them the dense model is trained first.", rich_help_panel=MODEL
    ),
]
Trained = Annotated[
    bool | None,
    typer.Option(
        "--trained/--untrained",
        help="The factory returns a trained model: don't train it first (automatic for hf: folders). "
        "--untrained with --weights: start from them (a pretrained encoder, a new head), and train the dense model first.",
        rich_help_panel=MODEL,
    ),
]
StripPrefix = Annotated[
    str | None, typer.Option(help="Prefix to remove from the names of the weights, such as module.", rich_help_panel=MODEL)
]
DataName = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="digits, mnist:DIR, csv:FILE, parquet:FILE, npz:FILE, imagefolder:DIR, cifar10:DIR, cifar100:DIR, hf:NAME_OR_DIR, "
        "package.module:factory.",
        rich_help_panel=DATA,
    ),
]
DataArg = Annotated[
    list[str],
    typer.Option(
        metavar="KEY=VALUE", help="An argument for the data's factory, besides those of the recipe.", rich_help_panel=DATA
    ),
]
Target = Annotated[
    str | None, typer.Option(metavar="COLUMN", help="The column to predict, for tables; several as A,B.", rich_help_panel=DATA)
]
Validation = Annotated[
    str | None,
    typer.Option(
        metavar="SHARE|SOURCE",
        help="Validation data: a share or number of the training data (0.1), test:50% of the test data, or another source. "
        "Use one of the last two if the weights have seen the training data.",
        rich_help_panel=DATA,
    ),
]
Unlabelled = Annotated[
    bool | None,
    typer.Option(
        "--unlabelled/--labelled",
        help="Use no targets: learn from the dense model's answers; errors are disagreement with it.",
        rich_help_panel=DATA,
    ),
]
LossName = Annotated[
    str | None,
    typer.Option("--loss", help="cross-entropy, binary, mse, gaussian-nll, package.module:loss.", rich_help_panel=TRAINING),
]
Set = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="FIELD=VALUE", help="Any field of the recipe, e.g. train.beta.final=0.1.", rich_help_panel=RUN
    ),
]


FIELDS = {
    "weights": "weights",
    "strip_prefix": "weights.strip_prefix",
    "trained": "weights.trained",
    "target": "data.target",
    "validation": "data.validation",
    "unlabelled": "data.unlabelled",
}
"""The recipe's field that each of these options sets."""

NAMES = {"model.name": "model", "data.name": "data", "loss.name": "loss", "weights.file": "weights"}
"""Full names of fields that options set by the name of the section."""

OPTIONS = {
    "dense.epochs": "--dense-epochs",
    "calibrate.temperature": "--no-calibrate",
    "calibrate.posterior": "--no-calibrate",
    "weights.strip_prefix": "--strip-prefix",
    "weights.trained": {True: "--trained", False: "--untrained"},
    "data.unlabelled": {True: "--unlabelled", False: "--labelled"},
}
"""Options that are not named after the last part of the field that they set."""


@dataclass(frozen=True)
class Settings:
    """The recipe argument and the options that `inspect`, `sparsify` and `sweep` share, as they were given."""

    recipe: RecipeArgument = None
    model: Model = None
    model_arg: ModelArg = field(default_factory=list)
    weights: Weights = None
    strip_prefix: StripPrefix = None
    trained: Trained = None
    data: DataName = None
    data_arg: DataArg = field(default_factory=list)
    target: Target = None
    validation: Validation = None
    unlabelled: Unlabelled = None
    loss: LossName = None
    set_: Set = field(default_factory=list)

    def resolved(self, source: str | None = None, needs_data: bool = True, **more: Any) -> Recipe:
        """The recipe from a file, or from the defaults and WITHOUT_RECIPE, with the options that were given.

        source: a recipe in place of the argument's. more: further fields, double underscores for dots; None: not given.
        Raises UsageError if neither a recipe nor both a model and data (or the model, if that is enough) are named, and if
        --set contradicts an option.
        """
        from svdcompress.recipe import WITHOUT_RECIPE, load_recipe  # importing pydantic takes 0.25 s

        source = source or self.recipe
        options = self._options(more)
        found = load_recipe(source, self.set_, {**(WITHOUT_RECIPE if source is None else {}), **options})
        _check_set(self.set_, options)
        if found.experiment is None and not (found.model.name and (found.data.name or not needs_data)):
            missing = "--model" if not found.model.name else "--data"
            raise UsageError(
                f"{missing} is missing: name a recipe (svdc recipes list), or both --model and --data, "
                "as in: svdc sparsify --model ./model.py:make --weights trained.pt --data imagefolder:photos"
            )
        return found

    def given(self, **more: Any) -> list[str]:
        """Names of the recipe's fields that options and --set set; `more` as in `resolved`."""
        return [*self._options(more), *(pair.partition("=")[0].strip() for pair in self.set_)]

    def _options(self, more: dict[str, Any]) -> dict[str, Any]:
        given = {FIELDS.get(name, name): getattr(self, name) for name in ("model", "data", "loss", *FIELDS)}
        given |= {name.replace("__", "."): value for name, value in more.items()}
        fields = {name: value for name, value in given.items() if value is not None}
        if self.validation is not None:
            fields["data.validation"] = _number_or_name(self.validation)
        for section, name, pairs in (("model", self.model, self.model_arg), ("data", self.data, self.data_arg)):
            found = key_values(pairs, f"--{section}-arg")
            if found and name is not None:  # the recipe's own arguments are for another one
                fields[f"{section}.args"] = found
            else:
                fields |= {f"{section}.args.{key}": value for key, value in found.items()}
        return fields


def _check_set(pairs: list[str], options: dict[str, Any]) -> None:
    """Raises UsageError if --set and an option give a field different values. options: {field: value}."""
    from svdcompress.recipe import parse_yaml

    asked = _fields(options)
    for pair in pairs:
        field, value = pair.partition("=")[0].strip(), parse_yaml(pair.partition("=")[2])
        section = isinstance(value, dict) and "." not in field  # fields that it does not name stay as they are
        given = _fields({field: value}) if section else {field: value}
        for name, value in {NAMES.get(name, name): value for name, value in given.items()}.items():
            if name in asked and str(asked[name]) != str(value) and asked[name] != value:
                raise UsageError(f"{_option(name, asked[name])} and --set {pair} contradict each other")


def _fields(values: dict[str, Any]) -> dict[str, Any]:
    """The values with mappings replaced by their fields, and without lists, of which options set only empty ones."""
    inner = {f"{name}.{key}": each for name, part in values.items() if isinstance(part, dict) for key, each in part.items()}
    return {**{name: value for name, value in values.items() if not isinstance(value, dict | list)}, **inner}


def _option(field: str, value: Any) -> str:
    """The option that sets a field, as it was typed."""
    section, _, key = field.partition(".args.")
    if key:
        return f"--{section}-arg {key}={value}"
    name = OPTIONS.get(field, f"--{field.rpartition('.')[2].replace('_', '-')}")
    name = name[value] if isinstance(name, dict) else name
    return name if isinstance(value, bool) or name == "--no-calibrate" else f"{name} {value}"


def _number_or_name(text: str) -> float | str:
    """A share or number of examples, or the name of other data."""
    try:
        return float(text)
    except ValueError:
        return text


def with_settings(work: Callable[..., Any]) -> Callable[..., Any]:
    """The command `work(settings, ...)` for Typer, with the shared options in place of its first parameter."""
    own = list(inspect.signature(work).parameters.values())[1:]
    shared = list(inspect.signature(Settings).parameters.values())
    types = get_type_hints(work, include_extras=True) | get_type_hints(Settings, include_extras=True)
    lists = {f.name for f in fields(Settings) if f.default_factory is list}

    @functools.wraps(work)
    def command(**given: Any) -> Any:
        return work(Settings(**{each.name: given.pop(each.name) for each in shared}), **given)

    parameters = [
        each.replace(
            annotation=types[each.name],
            default=[] if each.name in lists else each.default,
            kind=inspect.Parameter.KEYWORD_ONLY,
        )
        for each in [*shared, *own]
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def stem(recipe: str | None, made: Recipe) -> str:
    """A name for a run's folder."""
    if recipe is not None:
        path = Path(recipe)
        of_a_run = path.name == "recipe.yaml" and path.resolve().parent.name  # runs/mine/recipe.yaml: named after the run
        return of_a_run or (path.name if path.is_dir() else path.stem)
    name = str(made.model.name).rpartition(":")[2] if ":" in str(made.model.name) else str(made.model.name)
    return safe_name(name) or "run"


def safe_name(text: str) -> str:
    """A text with all characters that are unsafe in a file name replaced by dashes."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in text)
