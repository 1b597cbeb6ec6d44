"""The closing lines of a run that made nothing smaller: why, and what to set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from svdcompress.pipeline._results import RunResults
from svdcompress.recipe import WITHOUT_RECIPE, Recipe

SMALLER = 0.95
"""A model that keeps at least this share of its parameters has not become smaller."""

SPARSE = 0.5
"""From this share of zeros on it is the scatter of the zeros that keeps the units; below, too few weights have gone."""

MORE_UNITS = {"weight": 0.5, "input": 0.25, "output": 0.25}
"""A share by which more units go than by that of WITHOUT_RECIPE."""


def nothing_smaller(recipe: Recipe, results: RunResults, history: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """A warning for a run whose shapes hardly changed; [] where they did, or where sizes are not known.

    results: with the counts of both models, layers and pruning. history: its epochs, for where beta ended.
    """
    if not (results.dense.counts and results.sparse.counts and results.layers):
        return []  # a warning said already why there are none
    before, after = results.dense.counts.parameters, results.sparse.counts.parameters
    if after < SMALLER * before:
        return []
    weights = sum(row["weights_before"] for row in results.layers)
    zeros = 1 - sum(row["weights"] for row in results.layers) / max(weights, 1)
    dead = sum(row["outputs_before"] - row["outputs"] for row in results.layers)
    lines = [f"the shapes are {'the same' if after == before else 'almost the same'}: {before:,} parameters, now {after:,}."]
    blocked = _blocked(results.pruning or {})
    if dead and blocked:
        lines.append(f"{dead} units lost all their weights, but the graph keeps them ({blocked}): svdc inspect says more.")
    elif zeros >= SPARSE:
        lines.append(
            f"{100 * zeros:.0f}% of the weights are zero, but scattered: hardly any unit lost all of its weights. "
            f"To remove units: {_share(recipe.convert.share)}."
        )
    else:
        lines.append(f"Only {100 * zeros:.0f}% of the weights were dropped. {_more(recipe, results, history)}")
    return [" ".join(lines)]


def _more(recipe: Recipe, results: RunResults, history: Sequence[Mapping[str, Any]]) -> str:
    """What to set so that more goes."""
    cures = []
    if results.reach is not None and results.reach.within < SPARSE:
        cures.append("train longer, or with a larger train.lr: most weights could not get to the threshold")
    beta = next((row["beta"] for row in reversed(history) if row.get("stage") == "train"), None)
    if beta is not None:
        cures.append(f"increase the pressure: --set train.beta.final={3 * beta:.2g} (it was {beta:.2g})")
    cures.append(f"more epochs: --epochs {2 * recipe.train.epochs}")
    if not _asks_units(recipe.convert.share):
        cures.append(f"judge whole units too: {_share(recipe.convert.share)}")
    return f"To drop more: {'; '.join(cures)}."


def _blocked(pruning: Mapping[str, Any]) -> str:
    """The commonest reason why units stay that could be spared; "" where there is none."""
    reasons = [group["reason"] for group in pruning.get("groups") or () if group.get("reason")]
    return max(set(reasons), key=reasons.count) if reasons else ""


def _share(share: Any) -> str:
    """How to ask units more than a share does, as it is typed, and what it is now."""
    parts = MORE_UNITS if _asks_units(share) else WITHOUT_RECIPE["convert.share"]
    now = share if isinstance(share, str) else ", ".join(share)
    return f"--set convert.share='{{{', '.join(f'{name}: {part}' for name, part in parts.items())}}}' (it is {now})"


def _asks_units(share: Any) -> bool:
    return not {"input", "output"}.isdisjoint([share] if isinstance(share, str) else share)
