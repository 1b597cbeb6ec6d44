"""What each class, or yes-or-no question, lost in compression: figures of all of them together hide it where it is rare."""

from __future__ import annotations

from typing import Any

from svdcompress.calibrate import tail
from svdcompress.pipeline._passes import Passes
from svdcompress.pipeline._results import RunResults
from svdcompress.recipe import Recipe
from svdcompress.sources import Data

MOST = 1000
"""The most classes in the report: those that lost most, if there are more."""

CHANCE = 0.05
"""The largest probability with which chance alone makes a run say that any class lost."""

GOOD_PART = 1 / 3
"""A class has lost if the small model finds this share less of what the dense one finds."""

HIDDEN = 3
"""All targets together hide what a class lost if their right answers lost a share that is smaller by this factor."""

RARE = 0.1
"""A class is rare if no larger share of the targets is of it."""

NAMED = 3
"""The most classes that the warning names."""


def recall(dense: Passes, sparse: Passes, data: Data) -> dict[str, dict[str, Any]] | None:
    """`recall` of the report, by the name or number of each class that the test data has; None if the task has no classes.

    examples: how many targets are of the class; dense, sparse: the share of them that the model finds. For yes-or-no questions:
    targets whose answer is yes, by question; for a single one, both answers, "0" and "1". lost: True where the small model
    finds at least GOOD_PART less, and that is not chance: by McNemar's exact test over the examples that have the class, with
    Bonferroni's correction for the number of classes. Examples with many targets (pixels, tokens) count once for each class.
    """
    before, after = dense.test.found, sparse.test.found
    if before is None or after is None or not before.known or not after.known:
        return None
    gained, lost = (part.tolist() for part in after.differences(before))
    total, had, has = (part.tolist() for part in (before.total, before.right, after.right))
    there = [k for k, count in enumerate(total) if count]
    level = CHANCE / max(sum(had[k] > 0 for k in there), 1)
    if len(there) > MOST:
        there = sorted(sorted(there, key=lambda k: has[k] - had[k])[:MOST])
    found: dict[str, dict[str, Any]] = {}
    for k in there:
        one = {"examples": total[k], "dense": had[k] / total[k], "sparse": has[k] / total[k]}
        much = had[k] and has[k] <= (1 - GOOD_PART) * had[k]
        if much and tail(gained[k], gained[k] + lost[k], 0.5) <= level:
            one["lost"] = True
        found[_name(k, data, max(before.questions, 2))] = one
    return found


def _name(label: int, data: Data, questions: int) -> str:
    """The name of a class, if the names are known and there is one for each."""
    names = data.classes or []
    known = len(names) == len(set(names)) and (data.task != "binary" or len(names) == questions)
    return str(names[label]) if known and label < len(names) else str(label)


def lost_classes(results: RunResults, recipe: Recipe, data: Data) -> str | None:
    """A warning if a class lost much of what the dense model finds of it, and the error of all classes hides it; else None.

    results: need `recall` and both models' metrics on the test data.
    """
    before, after = ((side.metrics or {}).get("error") for side in (results.dense, results.sparse))
    if before is None or after is None or not results.recall:
        return None
    gone = 1 - (100 - after) / max(100 - before, 1e-9)  # of all right answers
    left = {name: one["sparse"] / one["dense"] for name, one in results.recall.items() if one.get("lost")}
    left = {name: share for name, share in left.items() if 1 - share >= HIDDEN * gone}
    if not left:
        return None
    questions = data.task == "binary" and data.outputs > 1
    whole = len(data.test) if questions else sum(one["examples"] for one in results.recall.values())
    what = "question" if questions else "class"
    unit = "positions" if whole > len(data.test) else "examples"
    lost = [
        f"{what} {name!r}, {100 * one['sparse']:.0f}% of {one['examples']:,} {unit} (dense: {100 * one['dense']:.0f}%)"
        for name, one in ((name, results.recall[name]) for name in sorted(left, key=left.__getitem__))
    ]
    more = [f"{len(lost) - NAMED} more in report.json (recall)"] if len(lost) > NAMED else []
    rare = all(results.recall[name]["examples"] <= RARE * whole for name in left)
    why = f", because such {unit} are rare" if rare else ""
    return (
        f"the small model misses much of what the dense one finds on the test data: {'; '.join(lost[:NAMED] + more)}. The "
        f"error of all together ({before:.2f}%, now {after:.2f}%) does not show that{why}. {_advice(recipe, questions)}"
    )


def _advice(recipe: Recipe, questions: bool) -> str:
    less = "Allow less (--max-drop), ask for a smaller factor (--goal)"
    if not recipe.search.wanted:
        less = "Remove less (a higher --threshold, or a lower --set train.beta.final=...)"
    longer = f"recover longer (--set recover.epochs={max(2 * recipe.recover.epochs, 5)})"
    if recipe.loss.class_weights or recipe.loss.name not in ("cross-entropy", "binary"):
        return f"{less}, or {longer}"
    weighted = "answers of yes" if questions else "rare classes"
    return f"{less}, {longer}, or give {weighted} more weight (--set loss.class_weights=balanced)"
