"""Finds what in a recipe would run code other than the package's own, so that a file alone never decides to run it.

The lists here name what is known to be harmless; anything else counts as code. Names are looked up in the same order as in
`make_model`, `open_data`, `make_loss` and `_transforms.build`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from svdcompress.recipe import DataSection, LossSection, ModelSection, Recipe
from svdcompress.sources._names import is_python_name
from svdcompress.sources._nets import NETS
from svdcompress.sources._readers import made_by
from svdcompress.sources._text import ARGS
from svdcompress.sources._transforms import PURE
from svdcompress.sources.given import is_given

TEXTS = {
    "hf": ("auto", "revision", "problem_type", "hidden_act", "activation_function"),
    "torchvision": ("weights",),
    "timm": ("global_pool",),
}
"""For models from other libraries, the arguments that may be text: any other could name a file, a hub or a kernel to load."""

LOADING = ("name", "revision", "split", *ARGS)
"""The keys that `data.args` may have for a data set on the hub: others reach builders that unpickle, or scripts."""


def code_in(recipe: Recipe) -> dict[str, str]:
    """{field: name} of all that would run code when a run is opened: Python names, and arguments that could load code."""
    return {**code_of_model(recipe.model), **code_of_data(recipe.data), **code_of_loss(recipe.loss)}


def code_of_run(recipe: Recipe) -> dict[str, str]:
    """The same for a run that is resumed: `code_in`, and the program with which its search measures latencies."""
    command = recipe.search.latency_command
    return {**code_in(recipe), **({} if command is None else {"search.latency_command": command})}


def run_argument(folder: str | Path, recipe: Recipe | None) -> str:
    """A run's folder, quoted for a command line, and --trust-code if its recipe names code. recipe: None if it is not known."""
    return shlex.quote(str(folder)) + (" --trust-code" if recipe is not None and code_in(recipe) else "")


def code_of_model(section: ModelSection) -> dict[str, str]:
    """The same for a recipe's model."""
    name = section.name or ""
    kind, _, rest = name.partition(":")
    if kind == "hf" or (kind in TEXTS and rest):
        found = {"model.name": name} if kind == "timm" and ":" in rest else {}
        unsafe = {key: value for key, value in section.args.items() if key not in TEXTS[kind] and _holds_text(value)}
        return {**found, **{f"model.args.{key}": f"{value!r:.80}" for key, value in unsafe.items()}}
    return {"model.name": name} if name not in NETS and is_python_name(name) and not is_given(name) else {}


def code_of_data(section: DataSection) -> dict[str, str]:
    """The same for its data, transforms included."""
    name = section.name or ""
    kind, _, place = name.partition(":")
    found = {}
    if kind == "hf":
        if place in ("pandas", "torch") or place.endswith(".py"):
            found["data.name"] = name
        found |= {f"data.args.{key}": f"{value!r:.80}" for key, value in section.args.items() if key not in LOADING}
    elif made_by(section) and not is_given(name):
        found["data.name"] = name
    return {**found, **code_of_transforms(section.transform), **code_of_transforms(section.augment, "data.augment")}


def code_of_transforms(specs: Sequence[str | Mapping[str, Any]], field: str = "data.transform") -> dict[str, str]:
    """The same for a list of transforms."""
    names = [(place, name) for place, spec in enumerate(specs) for name in ([spec] if isinstance(spec, str) else spec)]
    return {f"{field}.{place}": name for place, name in names if is_python_name(name) and name not in PURE}


def code_of_loss(section: LossSection) -> dict[str, str]:
    """The same for its loss."""
    return {"loss.name": section.name} if ":" in section.name and not is_given(section.name) else {}


def _holds_text(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True  # nested settings
    if isinstance(value, list | tuple):
        return any(map(_holds_text, value))
    return not isinstance(value, bool | int | float | None)
