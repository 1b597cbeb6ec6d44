"""Finds the shipped recipes: inside the installed package, or next to it in a checkout."""

from __future__ import annotations

import os
import re
from pathlib import Path

from svdcompress.errors import RecipeError, nearest
from svdcompress.recipe._yaml import parse_yaml

_PACKAGE = Path(__file__).resolve().parent.parent

_OPTIONS = {
    "--model {}:FUNCTION": r".+\.py",
    "--weights {}": r".+\.(safetensors|pt|pth|th|ckpt|bin)",
    "--data csv:{}": r".+\.[ct]sv",
    "--data parquet:{}": r".+\.parquet",
    "--data npz:{}": r".+\.npz",
    "--data {}": r"(csv|parquet|npz|mnist|imagefolder|cifar100?):.+",
    "--model {} or --data {}": r"(hf:.+|.+\.py:[A-Za-z_]\w*)",
    "--model {}": r"((torchvision|timm):.+|[A-Za-z_][\w.]*:[A-Za-z_]\w*)",
}
"""What may be given in a recipe's place by mistake, with the option that takes it."""


def recipes_folder() -> Path:
    """The folder of the shipped recipes. Raises RecipeError if the installation lacks it."""
    for folder in (_PACKAGE / "recipes", _PACKAGE.parent / "recipes"):
        if any(folder.glob("*.yaml")):
            return folder
    raise RecipeError(f"no recipes next to {_PACKAGE}; reinstall svdcompress")


def shipped_recipes() -> dict[str, Path]:
    """Name and file of each shipped recipe, in alphabetical order."""
    return {path.stem: path for path in sorted(recipes_folder().glob("*.yaml"))}


def describe_recipe(path: Path) -> str:
    """The first line of a recipe's description."""
    content = parse_yaml(path.read_text(encoding="utf-8")) or {}
    return str(content.get("description", "")).strip().partition("\n")[0]


def find_recipe(path: str | Path) -> Path:
    """The file, or that of a run's folder, else the shipped recipe of that name. Raises RecipeError if there is neither, or if
    it is the name of a model, weights or data."""
    file = Path(path)
    if os.path.isdir(file) and os.path.isfile(file / "recipe.yaml"):
        return file / "recipe.yaml"  # a run's folder
    for option, form in _OPTIONS.items():
        if re.fullmatch(form, str(path)):
            raise RecipeError(f"{path}: not a recipe, which is a YAML file; did you mean {option.replace('{}', str(path))}?")
    if os.path.exists(file):
        return file
    shipped = shipped_recipes()
    name = file.name.removesuffix(".yaml")
    if name in shipped and file.parent in (Path("."), Path("recipes")):
        return shipped[name]
    close = nearest(name, shipped)
    hint = f"did you mean {close}?" if close else f"there are: {', '.join(shipped)}"
    raise RecipeError(f"{path}: no such file, and no shipped recipe of that name ({hint})")
