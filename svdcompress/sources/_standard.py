"""Standardization of a table's columns and a regression's targets (mean 0, standard deviation 1): when, by which numbers, and
what the user is told; also warnings about targets that can hardly be classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from svdcompress.recipe import DataSection
from svdcompress.sources._positions import IGNORED

OFF = "--set data.standardize=false"

SPREAD = 100.0
"""Inputs with a largest absolute value above this (or below its inverse) get a warning, as do targets with such a deviation."""

UNEVEN = 3.0
"""There is a warning if one of several targets varies less than all of them together by more than this factor."""


def is_table(preprocessing: Mapping[str, Any], inputs: Any) -> bool:
    """Whether inputs (N, features) are columns of numbers, some of them one-hot categories."""
    return "columns" in preprocessing and not preprocessing.get("text") and isinstance(inputs, Tensor) and inputs.dim() == 2


def standardizes(section: DataSection, preprocessing: Mapping[str, Any], inputs: Any) -> bool:
    """Whether inputs are standardized before `data.transform`. auto: columns of a table are, if `data.transform` is empty."""
    if section.standardize == "auto":
        return not section.transform and is_table(preprocessing, inputs)
    return section.standardize


def column_statistics(inputs: Tensor, preprocessing: Mapping[str, Any]) -> dict[str, list[float]]:
    """Mean and standard deviation of each column, for `normalize`; one-hot columns stay as they are, constant ones become 0."""
    values = inputs.double()
    mean, std = values.mean(0), values.std(0, correction=0)
    categories = preprocessing.get("categories", {})
    widths = [len(categories[column]) if column in categories else 0 for column in preprocessing["columns"]]
    hot = torch.cat([torch.ones(width).bool() if width else torch.zeros(1).bool() for width in widths])
    if len(hot) == len(mean):
        mean[hot], std[hot] = 0.0, 1.0
    std[values.amax(0) == values.amin(0)] = 1.0
    return {"mean": mean.tolist(), "std": std.tolist()}


def scales_target(section: DataSection, task: str, standardized: bool) -> bool:
    """Whether the targets of a regression are standardized. auto: if the inputs are."""
    if task not in ("regression", "gaussian") or section.target_scale == "none":
        return False
    return section.target_scale == "standardize" or standardized


def note(origin: str, preprocessing: Mapping[str, Any], scaled: bool) -> str:
    """The note of a run that standardizes a table without being asked to."""
    target = preprocessing.get("target")
    several = isinstance(target, list) and len(target) > 1
    names = ", ".join(target) if isinstance(target, list) else str(target)
    verb = "are" if several else "is"
    together = " together, by one mean and one standard deviation" if several else ""
    also, gives = (f", and so {verb} {names}{together}", f" and give {names}") if scaled else ("", "")
    return (
        f"the columns of {origin} are standardized (mean 0, standard deviation 1){also}; predict and the ONNX files take the "
        f"columns{gives} in the table's units. Turn off: {OFF}"
    )


def unscaled(section: DataSection, inputs: Any, targets: Any, task: str, standardized: bool, scaled: bool) -> list[str]:
    """Warnings about columns and regression targets of large or small scale that nothing standardizes, unless that was asked
    for, and about targets that one scale does not fit."""
    found = _uneven(targets) if isinstance(targets, Tensor) and task in ("regression", "gaussian") else []
    asked = section.standardize == "auto" and not standardized
    if asked and isinstance(inputs, Tensor) and inputs.dim() == 2 and inputs.is_floating_point() and not section.transform:
        largest = float(inputs.abs().max(0).values.max())
        if largest > SPREAD or 0 < largest < 1 / SPREAD:
            what = f"the inputs' columns have values up to {largest:.3g}"
            found.append(f"{what}; a network learns better from standardized ones: --set data.standardize=true")
    if asked and isinstance(targets, Tensor) and task in ("regression", "gaussian") and len(targets) > 1 and not scaled:
        spread = targets.double().std()
        if float(spread) > SPREAD or 0 < float(spread) < 1 / SPREAD:
            what = f"the targets have a standard deviation of {float(spread):.3g}"
            found.append(f"{what}; a network learns better from standardized ones: --set data.target_scale=standardize")
    return found


def _uneven(targets: Tensor) -> list[str]:
    """A warning if one of several targets, (N, outputs), varies far less than all of them together."""
    if targets.dim() != 2 or targets.shape[1] < 2 or len(targets) < 2:
        return []
    values = targets.double()
    each, mean, whole = values.std(0), values.mean(0), float(values.std())
    if float(each.min()) * UNEVEN >= whole:
        return []
    return [
        f"the {targets.shape[1]} targets have means from {float(mean.min()):.3g} to {float(mean.max()):.3g} and standard "
        f"deviations from {float(each.min()):.3g} to {float(each.max()):.3g}, but share one scale, one loss and one noise: a "
        "target that varies little hardly counts, and gets standard deviations that are far too large (intervals of "
        "--coverage have a width for each). Give them a common scale in the data, or train one model for each"
    ]


def not_classes(targets: Any, classes: list[str] | None) -> list[str]:
    """A warning about a numeric target with so many values that they can hardly be classes."""
    if not isinstance(targets, Tensor) or targets.dim() != 1 or not all(name.isdigit() for name in classes or ()):
        return []
    values = len(targets.unique())
    if values <= 20 or values <= len(targets) / 3:
        return []
    return [
        f"the target has {values:,} different whole numbers in {len(targets):,} examples, each treated as a class; for a "
        "regression, use --loss mse"
    ]


def absent_classes(targets: Tensor | None, classes: list[str] | None) -> list[str]:
    """A warning about classes that the source names but no training example has."""
    if targets is None or classes is None:
        return []
    there = set(targets.unique().tolist())
    absent = [name for index, name in enumerate(classes) if index not in there]
    if not absent:
        return []
    named = ", ".join(absent[:5]) + (" ..." if absent[5:] else "")
    return [
        f"no training example belongs to {len(absent)} of the {len(classes)} classes ({named}): the sparse model cannot learn "
        "them"
    ]


def unseen_classes(targets: Mapping[str, Tensor | None]) -> list[str]:
    """A warning about classes that validation or test data have, but training data don't; targets: of each split.

    Two dimensions may be tokens, many of which occur in one text alone: they are left out.
    """
    counts = {name: _counted(each) for name, each in targets.items() if each is not None and each.dim() != 2}
    seen = counts.pop("train", None)
    if seen is None:
        return []
    unseen = sorted({label for found in counts.values() for label in found} - set(seen))
    if not unseen:
        return []
    told = [
        f"{label} ({', '.join(f'{name} has {found[label]:,}' for name, found in counts.items() if label in found)})"
        for label in unseen[:5]
    ]
    more = " ..." if unseen[5:] else ""
    return [f"training data have no example of class{'es' * (len(unseen) > 1)} {', '.join(told)}{more}"]


def _counted(targets: Tensor) -> dict[int, int]:
    """How often each class occurs."""
    counts = targets[targets != IGNORED].bincount()
    return {label: int(counts[label]) for label in counts.nonzero()[:, 0].tolist()}
