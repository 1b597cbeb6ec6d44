"""Which recipe fields may change when a stopped run is resumed: all that nothing was made with yet."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from svdcompress.errors import RecipeError, SvdcError, shortened
from svdcompress.pipeline._folder import STATE, RunState, stored_recipe
from svdcompress.pipeline._search_cost import objective_of
from svdcompress.recipe import Recipe, as_written
from svdcompress.train import StateFile

FILES = ("dense.pt", "train.pt", "pruned.safetensors", "recover.pt", "search")
"""The files that the stages leave in `state/`, in order."""

FIRST = {"dense": 0, "convert": 1, "train": 1, "relevance": 2, "prune": 2, "recover": 3}
FIRST |= dict.fromkeys(("search", "calibrate", "export"), 4)
"""The index of the first file in FILES that a section affects, along with all later ones; 0 for sections not named here."""

FURTHER = ("search.trials", "search.max_minutes")
"""Fields that limit how far a search goes; they may change at any time."""

ALWAYS = ("out", "device", "calibrate", "export", "uncertainty", "report", "description")
"""Sections that only affect how a run is carried out and what is written at its end."""

OF_FILES = ("export.opset", "export.dynamic_axes")

MEASURED = {
    "bytes": ("calibrate.coverage", "calibrate.answer_above", "calibrate.temperature", "export.sets", *OF_FILES),
    "latency": ("calibrate.coverage", "export.sets", *OF_FILES),
}
"""Fields of the sections in ALWAYS that affect how a search measures its trials, by its objective."""

UNDERWAY = ("lr", "lr_log_sigma2", "clip", "precision")
"""Settings of a training stage that may change between its epochs: those to change after a loss that is not finite. A search
uses `train` and `recover` until it is done, and trains with the new values from then on."""

NOT_SET = "not set"
"""What messages tell in place of a value that is left to `recover.optimizer: auto`; no field that may be has it as a value."""


def changed_fields(stored: Recipe, given: Recipe, but_for: Collection[str] = ALWAYS) -> list[str]:
    """The fields, such as `train.lr` or `seed`, in which two recipes differ, outside of the sections `but_for`.

    A field that only one of them leaves to `recover.optimizer: auto` differs, too.
    """
    auto = stored.recover.optimizer == given.recover.optimizer == "auto"
    left, right = (as_written(recipe) if auto else recipe.model_dump(mode="json") for recipe in (stored, given))
    fields = []
    for name, section in left.items():
        if name in but_for:
            continue
        if isinstance(section, Mapping) and isinstance(right[name], Mapping):
            pairs = {
                field: [each.get(field, NOT_SET) for each in (section, right[name])]
                for field in type(getattr(given, name)).model_fields
            }
            fields += [f"{name}.{field}" for field, (before, now) in pairs.items() if before != now]
        elif section != right[name]:
            fields.append(name)
    return fields


def value_of(recipe: Recipe, field: str) -> Any:
    """The value of a field that `changed_fields` names, as messages tell it: "not set" where the recipe leaves it to
    `recover.optimizer: auto`."""
    value: Any = as_written(recipe)
    for part in field.split("."):
        value = value.get(part, NOT_SET)
    return value


def outdated(stored: Recipe, given: Recipe, folder: Path) -> list[Path]:
    """Files in `state/` of stages that have done no epoch yet and that would begin differently with the changed recipe.

    Raises RecipeError, which names the fields, for changes to settings that an epoch of training or a pruned model was made
    with already.
    """
    fields = [field for field in changed_fields(stored, given) if field not in FURTHER]
    if stored.search.wanted:
        measured = MEASURED.get(objective_of(stored), ())
        fields += [field for field in changed_fields(stored, given, but_for=()) if field in measured]
    if not fields:
        return []
    files = [folder / STATE / name for name in FILES]
    done = [epochs_done(file) for file in files]
    searching = done[-1] is not None and "search" not in RunState(folder, writer=False).facts.get("seconds", {})
    refused, stale = [], set()
    for field in fields:
        section, _, name = field.partition(".")
        first = FIRST.get(section, 0)
        stage = getattr(stored, section)
        unfinished = f"{section}.pt" in FILES and (done[first] or 0) < stage.epochs and not any(done[first + 1 :])
        unfinished = unfinished or (searching and section in ("train", "recover"))
        if not any(done[first:]):
            stale |= {file for file, epochs in zip(files[first:], done[first:], strict=True) if epochs is not None}
            if first <= FIRST["recover"]:  # what a recovery that began again left beside its state
                stale |= set((folder / STATE).glob("recover-*"))
        elif not (name in UNDERWAY and unfinished):
            refused.append(field)
    if refused:
        raise RecipeError(_refusal(stored, refused, folder))
    return sorted(stale)


def _refusal(stored: Recipe, refused: list[str], folder: Path) -> str:
    file, names = folder / "recipe.yaml", ", ".join(refused)
    edited: list[str] = []
    with suppress(SvdcError):  # then the given recipe isn't from there
        edited = changed_fields(stored, stored_recipe(folder), but_for=())
    if set(refused) <= set(edited):
        before = ", ".join(f"{name}: {shortened(str(value_of(stored, name)), 60)}" for name in refused[:8])
        return (
            f"--resume: {file}, changed since, and the recipe that the run was made with differ in {names}, which the run has "
            f"used already; restore the file ({before}), or start another run with another --out"
        )
    return (
        f"--resume: {file} and the given recipe differ in {names}, which the run has used already; resume with the run's own "
        "recipe (give no recipe and no options that change it), or start another run with another --out"
    )


def epochs_done(file: Path) -> float | None:
    """The epochs in a stage's file, or None if there is no file; 1 for one that holds no training state (it counts as done)."""
    if not file.exists():
        return None
    if file.suffix != ".pt":
        return 1
    return StateFile(file).epochs()
