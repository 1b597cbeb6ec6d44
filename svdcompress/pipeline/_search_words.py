"""The messages of a search: on each trial, and on what it could not do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from svdcompress.pipeline._busy import Load
from svdcompress.pipeline._path import UNPRESSED
from svdcompress.pipeline._search_cost import recovery_of
from svdcompress.recipe import MEASURES, MOST_LEVELS, Goal, Recipe, SearchSection, smaller
from svdcompress.search import CLOSE, Losses, Trial

ENOUGH = 4
"""A cut in at least this many steps costs little, because what stays has learned to do without the rest."""


def told_trial(trial: Trial, measure: str, dense: Mapping[str, float], judged: Losses, budget: bool) -> str:
    """The line for a trial. dense: the dense model's costs; judged: its losses; budget: whether there is one."""
    ratio = dense[measure] / max(trial.costs[measure], 1e-12)
    kept = "" if not budget else ": within the budget" if trial.met else ": loses too much"
    lost = f"{error_of(trial.error, judged)}, {drop_of(trial, judged)}{kept}"
    on = "" if trial.continues is None else f" (trial {trial.continues} recovered further)"
    return f"trial {trial.number}{on}: {ratio:.3g}x {smaller(measure)}{told_mixture(trial)}, {lost}"


def told_mixture(trial: Trial) -> str:
    """The mixture that was chosen, in parentheses; "" for the usual way."""
    mixture = trial.mixture
    return "" if mixture is None or mixture["chosen"] == mixture["usual"] else f" (mixture {mixture['chosen']})"


def error_of(error: float, judged: Losses) -> str:
    """An error with its unit."""
    return f"{error:.2f}% error" if judged.probabilities else f"RMSE {error:.4g}"


def drop_of(trial: Trial, judged: Losses) -> str:
    """A drop with its unit, and its upper bound at the confidence of the budget."""
    unit = "points" if judged.probabilities else "%"
    bound = "" if trial.upper is None else f" (at most {trial.upper:+.2f})"
    measured = f"{trial.drop:+.2f} {unit}{bound}"
    if trial.estimate is None or trial.at_most is None:
        return measured
    return f"{trial.drop:+.2f} {unit} measured, {trial.estimate:+.2f} by the NLL (at most {trial.at_most:+.2f})"


def outcome(
    best: Trial,
    trials: Sequence[Trial],
    measure: str,
    goal: Goal | None,
    target: float,
    judged: Losses,
    budget: bool,
    epochs: int,
    how: str = "",
    steps: int = 1,
    aimed: float = 0.0,
) -> list[str]:
    """Warnings on what was asked for and not reached: why, and what to set. target: the largest size that counts as reaching
    the goal; epochs: of training; how: from `told_how`; steps: the number of steps in which trials are cut; aimed: the size
    that the search aimed at, above the target if the goal is out of reach."""
    lines = []
    if budget and not best.met:
        lines.append(
            f"no trial is within the budget: the closest ({drop_of(best, judged)}) is kept. Allow more, or train longer: "
            f"--epochs {2 * epochs or 10}, and more recover.epochs"
        )
    if goal is None or best.costs[measure] <= target:
        return lines
    small = [trial for trial in trials if trial.costs[measure] <= target]
    if budget and best.met and small:
        why = f"it would lose {drop_of(min(small, key=lambda trial: trial.lost), judged)}"
        lines.append(f"the goal {goal.text} exceeds the budget ({why}): the smallest model within it is used")
    else:
        aim = target / (1 + CLOSE)
        if goal.factor is not None and measure != "latency":
            aim = math.floor(round(aim, 3)) or aim  # a share of a count, or less than one
        seen = _size_when_chosen(best)
        if measure == "latency" and seen is not None and seen <= target:
            factor = best.costs[measure] / aim
            more = f"{goal.factor * factor:.3g}x" if goal.factor is not None else f"{aim / factor:.3g}ms"
            why = f"When its units were chosen, it took {_size(seen)}: measurements differ. --goal latency={more} leaves room"
        elif aimed > target:
            why = f"As the goal is out of reach, the search aimed at {_size(aimed)}"
        elif steps == 1:
            why = "More epochs of training, or a higher search.levels, increase the pressure"
        else:
            why = "One unit of each layer stays, and so does what prune.protect names or pruning cannot remove"
        lines.append(
            f"the goal {goal.text} was not reached: {_size(best.costs[measure])} against {_size(aim)} "
            f"{MEASURES[measure]}{how}; the closest is kept. {why}"
        )
    return lines


def _size_when_chosen(trial: Trial) -> float | None:
    """The size at which a trial's way was chosen among several; None if it was the only one, or not measured."""
    mixture = trial.mixture or {"candidates": (), "chosen": ""}
    return next((each["size"] for each in mixture["candidates"] if each["name"] == mixture["chosen"]), None)


def _size(size: float) -> str:
    """A size as text: large counts with all digits, milliseconds and numbers below 1000 with four."""
    return f"{size:,.0f}" if size >= 1000 else f"{size:.4g}"


def below_least(goal: Goal, measure: str, dense: float, least: float, aim: float, how: Mapping[str, Any]) -> str:
    """The warning for a goal below the size with one unit in each layer. dense, least, aim: sizes in the measure."""
    unit = MEASURES[measure]
    least_told, aim_told = (f"{size:,.4g}" if how else f"{size:,.0f}" for size in (least, aim))
    if measure == "bytes":
        cure = "most of a file this small is its graph"
    elif not how:
        cure = "`svdc inspect` says what stays, and why"
    elif len(how.get("batches", ())) > 1:
        cure = "one example takes about the same time at any width; --set search.latency_batch=128 counts that batch alone"
    else:
        cure = "most of that time doesn't depend on widths"
    than = "faster" if measure == "latency" else "fewer"
    least_model = "one unit in each layer, plus what cannot be removed,"
    return (
        f"the goal {goal.text} cannot be reached: {'the smallest model that can be left' if how else least_model} still "
        f"{'takes' if how else 'has'} {least_told} {unit} "
        f"({dense / least:.3g}x {than}){told_how(how)}. The search aims at {aim_told} instead ({dense / aim:.3g}x): {cure}"
    )


def no_least(measure: str, error: Exception) -> str:
    """The warning if the size with one unit in each layer could not be measured."""
    return (
        f"search: the size with one unit in each layer, in {MEASURES[measure]}, could not be measured ({error}); a goal "
        "that cannot be reached is reported only at the end"
    )


def at_floor(best: Trial, measure: str, least: float, dense: float, how: str = "") -> list[str]:
    """The warning if the budget is kept even at the smallest size that was tried. least: the size with one unit in each
    layer; dense: the dense model's size; how: from `told_how`."""
    return [
        f"the budget is kept at {dense / best.costs[measure]:.3g}x {smaller(measure)}, and nothing smaller was tried: "
        f"one unit in each layer, plus what cannot be removed, gives {dense / least:.3g}x{how}"
    ]


LEAST_TOLD = 1.005
"""Factors below this would read "1x fewer"."""


def cut_by_rank(
    best: Trial,
    levels: int,
    settings: SearchSection,
    unit: str,
    reached: str,
    epochs: int,
    whole: int,
    steps: int = 1,
    recovery: int = 0,
) -> list[str]:
    """The warning for a model that was cut far beyond what pressure removes by itself, at the end of the path.

    levels: of the path that were trained, of `whole` planned ones; unit: that of `Trial.natural`; reached: the size, from
    `told_size`; epochs: of training. steps: the number of steps in which the model was cut while it trained. recovery: the
    epochs of recovery.
    """
    if steps >= ENOUGH or best.ratio < 1:  # what stays has learned to do without the rest, or not much went
        return []
    at_once = told_mixture(best)
    at_once += "" if steps == 1 else f" in {steps} steps (one per epoch, at most {settings.cuts}: search.cuts)"
    if best.pressure <= UNPRESSED:
        cure = f"More epochs (--epochs {2 * epochs}) would lose less accuracy"
        if not epochs:
            cure = f"{'More epochs' if recovery else 'Epochs'} of recovery (--set recover.epochs={2 * recovery or 10}) regain "
            cure += "accuracy"
        return [
            f"pressure removes hardly any {unit} within these epochs, so trial {best.number} was made without it: all the way "
            f"to {reached} was cut by rank alone{at_once}. {cure}"
        ]
    if (steps == 1 and best.pressure < levels - 1) or math.log2(max(best.natural, 1.0)) >= best.ratio / 2:
        return []
    more = min(levels + 3, MOST_LEVELS)
    pressed = whole == levels < more and steps == 1  # else accuracy ended the path, or units are cut in steps
    cures = [f"--set search.levels={more}"] if pressed else []
    cures += [f"--epochs {2 * epochs}", "a larger share of units (convert.share)"]
    at = "at the path's highest pressure" if steps == 1 else "by the pressure of the path"
    fewer, way = (f"{best.natural:.3g}x", "the rest of") if best.natural >= LEAST_TOLD else ("no", "all")
    return [
        f"{at} the model has {fewer} fewer {unit} by itself; {way} the way to {reached} was "
        f"cut by rank alone{at_once}, which costs accuracy. To increase the pressure: {', '.join(cures)}"
    ]


def told_size(ratio: float, measure: str, unit: str) -> str:
    """How many times smaller a model is; with the measure's own unit if the sentence is about another one."""
    return f"{ratio:.3g}x" + ("" if MEASURES[measure] == unit else f" {smaller(measure)}")


def untaught(recipe: Recipe) -> list[str]:
    """A warning if a model that was cut at once, from the dense weights, has variances that were never trained."""
    epochs = recovery_of(recipe, at_once=True)
    if (recipe.recover.noise and epochs) or recipe.calibrate.posterior != "variational":
        return []
    why = "no epoch trains them" if not epochs else "recovery trains the mean alone (recover.noise: false)"
    drawn = "what the weights add to the draws of dropout says"
    what = drawn if recipe.convert.dropout == "draw" else "deviations and mutual information say"
    return [
        f"the variances were never trained ({why}): {what} little. "
        "--set calibrate.posterior=laplace-diagonal fits them without training"
    ]


def left_alone(best: Trial) -> list[str]:
    """A note on layers that could not be reconstructed."""
    found = best.reconstruction or {}
    left: Mapping[str, str] = found.get("left") or {}
    if not left:
        return []
    some = "; ".join(f"{name}: {why}" for name, why in [*left.items()][:4]) + (" ..." if len(left) > 4 else "")
    return [
        f"reconstruction fitted {found['layers']} layers to their outputs before the cut, and left {len(left)} alone ({some})"
    ]


def told_how(how: Mapping[str, Any]) -> str:
    """What a latency was measured with, to append to a sentence; "" for other measures. how: from `Measure.how`."""
    if not how:
        return ""
    if "command" in how:
        return f" (by {how['command']})"
    batches = " and ".join(map(str, how["batches"]))
    mean = f"batch {batches}" if len(how["batches"]) == 1 else f"geometric mean of batch {batches}"
    return f" ({mean}, {how['threads']} thread{'s' * (how['threads'] != 1)})"


def other_machine(before: Mapping[str, Any], now: Mapping[str, Any], first: float) -> str:
    """The warning for a latency search that is resumed on a machine with different latencies. first: the dense model's
    milliseconds at its beginning."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    what = ", ".join(f"{name} {_plain(now.get(name))} (it was {_plain(before.get(name))})" for name in names)
    return (
        f"the search began where latencies may differ: here {what}. Models are measured along with the dense one, so factors "
        f"such as 2x hold; milliseconds are reported as if the dense model still took {first:.4g}, as at the beginning"
    )


def busy_machine(goal: Goal, first: float, load: Load, how: Mapping[str, Any]) -> str:
    """The warning for a goal in milliseconds if the machine was busy while the dense model was measured. first: the dense
    model's milliseconds."""
    where = f" (unless {how['command']} measures elsewhere)" if "command" in how else ""
    return (
        f"while the dense model's latency was measured ({first:.4g} ms), other programs used {load.others or 0.0:.1f} of "
        f"{load.cores} cores: such times can be too long{where}, so for {goal.text} the model may be cut further than needed. "
        "Search on an idle machine, or ask for a factor, as in --goal latency=2x"
    )


def _plain(value: Any) -> str:
    if value is None:  # an earlier version did not record it
        return "not recorded"
    return " and ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def cut_short(
    settings: SearchSection,
    seconds: float,
    levels: int | None,
    trials: int,
    whole: tuple[int, int],
    wanted: tuple[float, float] | None,
    measure: str,
) -> str:
    """The warning for a search whose time was up: how far it got, and what would have come next.

    seconds: in all sittings. levels: of the path that were trained, if it was cut short, too; else None. trials: the number
    made. whole: the most levels and trials. wanted: beta of the next trial, and how many times smaller than the dense model
    it would have been; None if none was left to make.
    """
    path = "" if levels is None else f", on {levels} of {whole[0]} levels of pressure"
    more = ""
    if wanted is not None:
        more = f" The next would have been {wanted[1]:.3g}x {smaller(measure)} at beta {wanted[0]:.3g}."
    return (
        f"the time was up (search.max_minutes={settings.max_minutes:g}; {seconds / 60:.3g} minutes in all sessions): "
        f"{trials} of at most {whole[1]} trials were made{path}, and the best of them is kept.{more} A larger "
        "--max-minutes allows more"
    )
