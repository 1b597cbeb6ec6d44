"""What `recover.optimizer: auto` may choose besides the optimizer: fields of the section `recover` that are not set."""

from __future__ import annotations

from functools import reduce
from typing import Any

from svdcompress.recipe._schema import Recipe, RecoverSection

BY_SGD: dict[str, Any] = {
    "lr": 0.01,
    "weight_decay": 5e-4,
    "schedule.warmup": "5%",
    "distill.weight": 0.9,
    "distill.temperature": 3.0,
}
"""Settings for SGD, which brings pruned classifiers with batch normalization further than Adam does (benchmarks/recovery.py
and recovery_auto.py)."""

EARLIER = "# The resolved recipe of this run: `svdc sparsify recipe.yaml` runs it again.\n"
"""The heading of `recipe.yaml` in folders of earlier versions, which wrote every field, set or not."""

HEADING = f"{EARLIER.rstrip()} What it leaves to `recover.optimizer: auto` is not in it.\n"
"""The heading of `recipe.yaml` in a run's folder."""


def left_open(recover: RecoverSection) -> list[str]:
    """The fields of `BY_SGD` that `recover.optimizer: auto` may choose: those that are not set, to whatever value."""
    if recover.optimizer != "auto":
        return []
    split = {field: field.rpartition(".") for field in BY_SGD}
    return [
        field
        for field, (inside, _, name) in split.items()
        if name not in (getattr(recover, inside) if inside else recover).model_fields_set
    ]


def as_written(recipe: Recipe) -> dict[str, Any]:
    """The content of a resolved recipe's file: every field but those that are `left_open`, so that they stay open."""
    content = recipe.model_dump(mode="json")
    for field in left_open(recipe.recover):
        *inside, name = field.split(".")
        del reduce(dict.__getitem__, inside, content["recover"])[name]
    return content


def from_earlier(content: Any) -> Any:
    """The content of a file that an earlier version wrote, without those fields of `BY_SGD` that have their defaults: in that
    version, these were open."""
    recover, plain = content.get("recover") if isinstance(content, dict) else None, RecoverSection().model_dump()
    if not isinstance(recover, dict) or recover.get("optimizer", "auto") != "auto":
        return content
    for field in BY_SGD:
        inside, _, name = field.rpartition(".")
        place, usual = (recover.get(inside), plain[inside]) if inside else (recover, plain)
        if isinstance(place, dict) and name in place and place[name] == usual[name]:
            del place[name]
    return content
