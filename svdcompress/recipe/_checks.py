"""Checks of a recipe's values beyond their types; each raises ValueError, which suggests the nearest known name."""

from __future__ import annotations

import datetime
import math
import typing
from collections.abc import Iterable
from typing import Any

from svdcompress.errors import nearest
from svdcompress.recipe._goal import parse_goal

SHARES = ("weight", "input", "output", "layer")
"""The kinds of prior groups (as in `svdcompress.layers.REDUCED`)."""

TASKS = {"cross-entropy": "classification", "binary": "binary", "mse": "regression", "gaussian-nll": "gaussian"}
"""The task of each named loss."""

LAST_RANDOM_OPSET = 21
"""The last opset in which onnxruntime has the random numbers that a Monte-Carlo file draws."""

LARGEST = 2**53
"""Whole numbers beyond this are typing errors, and floats cannot hold them all."""

MOMENT = "a number of epochs, or a share of them such as 30%"


def known_goal(text: str) -> str:
    """A goal of the search, unchanged if it is valid."""
    parse_goal(text)
    return text


def numbers_are_numbers(value: Any, annotation: Any) -> Any:
    """Refuse true and false where a number is meant (they would count as 1 and 0), and whole numbers beyond `LARGEST`."""
    if value is None or isinstance(value, str | float) or _takes(annotation, Any):
        return value
    if isinstance(value, bool):
        if not _takes(annotation, bool):
            raise ValueError(f"{str(value).lower()} is neither a number nor a name; quote it if it is meant as text")
    elif isinstance(value, int):
        if abs(value) > LARGEST:
            raise ValueError(f"a whole number of at most {LARGEST} is needed")
    elif isinstance(value, list | tuple):
        for item in value:
            numbers_are_numbers(item, annotation)
    elif isinstance(value, dict) and not _is_section(annotation):
        for item in value.values():
            numbers_are_numbers(item, annotation)
    return value


def _takes(annotation: Any, kind: Any) -> bool:
    return annotation is kind or any(_takes(inner, kind) for inner in typing.get_args(annotation))


def _is_section(annotation: Any) -> bool:
    return hasattr(annotation, "model_fields") or any(map(_is_section, typing.get_args(annotation)))


def plain_values(value: Any, where: str = "") -> Any:
    """Refuse all but text, finite numbers, flags, null, and lists and mappings of them by text; ValueError names the place."""
    at = f"{where}: " if where else ""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        if abs(value) >= 2**64:
            raise ValueError(f"{at}a whole number beyond 64 bits")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{at}{value} is not finite, and a recipe cannot store it")
        return value
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{at}the key {key!r:.60} is a {type(key).__name__}, not text; quote it")
            plain_values(item, f"{where}.{key}".strip("."))
        return value
    if isinstance(value, list | tuple):
        for place, item in enumerate(value):
            plain_values(item, f"{where}.{place}".strip("."))
        return value
    quote = "; quote it if text is meant" if isinstance(value, datetime.date) else ""
    raise ValueError(f"{at}a {type(value).__name__}, which a recipe cannot store{quote}")


def moment(value: Any) -> Any:
    """A number of epochs, or a share of them as text."""
    if isinstance(value, str):
        text = value.strip()
        try:
            share = float(text.removesuffix("%"))
        except ValueError:
            share = -1.0
        if not text.endswith("%") or not 0 <= share <= 100:
            raise ValueError(MOMENT)
        return text
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        return float(value)
    raise ValueError(MOMENT)


def known_share(share: Any) -> Any:
    """A share: one name, several, or parts by name."""
    names = [share] if isinstance(share, str) else list(share)
    _known(names, "name")
    if not names:
        raise ValueError(f"name at least one of {', '.join(SHARES)}")
    if isinstance(share, dict) and any(part <= 0 for part in share.values()):
        raise ValueError(f"parts must be above 0, as in {{weight: 0.8, input: 0.2}}, not {share}")
    return share


def known_threshold(threshold: Any) -> Any:
    """A threshold: one number, or numbers by share."""
    if isinstance(threshold, dict):
        _known(threshold, "share")
    return threshold


def _known(names: Iterable[str], what: str) -> None:
    for name in names:
        if name not in SHARES:
            raise ValueError(f"unknown {what} {name!r}; use one or several of {', '.join(SHARES)}{_hint(str(name), SHARES)}")


def _hint(name: str, known: Iterable[str]) -> str:
    close = nearest(name, known)
    return f"; did you mean {close}?" if close else ""


def known_loss(name: str) -> str:
    """The name, if it is that of a loss in `TASKS` or of a Python object."""
    if name not in TASKS and ":" not in name:
        raise ValueError(f"unknown loss; use {', '.join(TASKS)}, or package.module:loss{_hint(name, TASKS)}")
    return name


def taken_by(field: str, value: Any, loss: str | None) -> None:
    """Refuse a field of the section `loss` that the named loss would silently ignore. loss: None if its name is wrong."""
    users = {"label_smoothing": ("cross-entropy",), "class_weights": ("cross-entropy", "binary"), "tau": ("mse",)}[field]
    if loss is not None and loss not in users:
        raise ValueError(f"only {' and '.join(users)} take{'s' * (len(users) == 1)} it, not {loss}; leave it out")
    if loss == "binary" and isinstance(value, list) and len(value) != 1:
        raise ValueError("binary takes one weight, that of the positive class, as in [3.0]")


def task_of(task: str | None, loss: str | None) -> str | None:
    """The task, if it fits the loss; it is needed for a loss of the user's own."""
    if loss is not None and ":" in loss and task is None:
        raise ValueError(f"{loss} is a loss of your own: set its task to one of {', '.join(TASKS.values())}")
    if loss in TASKS and task not in (None, TASKS[loss]):
        raise ValueError(f"the task of {loss} is {TASKS[loss]}; leave it out")
    return task


def opset_fits(opset: int, draws: bool) -> int:
    """The opset, if all files of a run can be written in it; draws: whether one of them draws its own noise."""
    if draws and opset > LAST_RANDOM_OPSET:
        raise ValueError(f"model_mc.onnx draws random numbers, which onnxruntime supports up to {LAST_RANDOM_OPSET}; "
                         "use that, or export.monte_carlo=false")  # fmt: skip
    return opset
