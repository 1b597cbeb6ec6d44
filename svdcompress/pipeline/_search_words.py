"""What a search says: of each trial, and of what it could not do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from svdcompress.recipe import MEASURES, Goal
from svdcompress.search import Losses, Trial


def told_trial(trial: Trial, measure: str, dense: Mapping[str, float], judged: Losses, budget: bool) -> str:
    """A line of a trial. dense: the dense model's costs; judged: its losses; budget: whether there is one."""
    ratio = dense[measure] / max(trial.costs[measure], 1e-12)
    kept = "" if not budget else ": within the budget" if trial.met else ": loses too much"
    lost = f"{error_of(trial.error, judged)}, {drop_of(trial, judged)}{kept}"
    return f"trial {trial.number}: {ratio:.3g}x fewer {MEASURES[measure]}, {lost}"


def error_of(error: float, judged: Losses) -> str:
    """An error in its unit."""
    return f"{error:.2f}% error" if judged.probabilities else f"RMSE {error:.4g}"


def drop_of(trial: Trial, judged: Losses) -> str:
    """A drop in its unit, and what it is not more than at the confidence of the budget."""
    unit = "points" if judged.probabilities else "%"
    measured = f"{trial.drop:+.2f} {unit} (at most {trial.upper:+.2f})"
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
) -> list[str]:
    """What was asked for and not reached, why, and what to set. target: the size of the goal; epochs: of training."""
    lines = []
    if budget and not best.met:
        lines.append(
            f"no trial keeps the budget: the closest ({drop_of(best, judged)}) is kept. Allow more, or train longer: "
            f"--epochs {2 * epochs}, and more recover.epochs"
        )
    if goal is None or best.costs[measure] <= target:
        return lines
    small = [trial for trial in trials if trial.costs[measure] <= target]
    if budget and best.met and small:
        why = f"it would lose {drop_of(min(small, key=lambda trial: trial.lost), judged)}"
        lines.append(f"the goal {goal.text} breaks the budget ({why}): the smallest that keeps it is taken")
    else:
        lines.append(
            f"the goal {goal.text} was not reached: {best.costs[measure]:,.4g} against {target:,.4g}; the closest is kept. "
            "More epochs of training, or a higher search.levels, press harder"
        )
    return lines
