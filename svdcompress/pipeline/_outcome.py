"""Closing warnings of a run whose model is not smaller, hardly faster, or too large a file: why, and what to set."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from svdcompress.pipeline._results import RunResults
from svdcompress.prune import PADDED
from svdcompress.recipe import WITHOUT_RECIPE, Recipe, parse_goal
from svdcompress.search import CLOSE

SMALLER = 0.95
"""A model that keeps at least this share of its parameters has not become smaller."""

SPARSE = 0.5
"""At or above this share of zeros, units stay because the zeros are scattered; below it, because too few weights were
dropped."""

MORE_UNITS = {"weight": 0.5, "input": 0.25, "output": 0.25}
"""A `convert.share` that removes more units than that of WITHOUT_RECIPE."""


def nothing_smaller(recipe: Recipe, results: RunResults, history: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """A warning for a run whose shapes hardly changed; [] if they did change, or if sizes are not known.

    results: need the counts of both models, `layers` and `pruning`. history: the run's epochs, for the last beta.
    """
    if not (results.dense.counts and results.sparse.counts and results.layers):
        return []  # another warning has said why there are none
    before, after = results.dense.counts.parameters, results.sparse.counts.parameters
    if after < SMALLER * before:
        return []
    weights = sum(row["weights_before"] for row in results.layers)
    zeros = 1 - sum(row["weights"] for row in results.layers) / max(weights, 1)
    dead, blocked = _blocked(results.layers, results.pruning or {})
    lines = [f"the shapes are {'the same' if after == before else 'almost the same'}: {before:,} parameters, now {after:,}."]
    if dead:
        unit, its, it = ("unit", "its", "it") if dead == 1 else ("units", "their", "them")
        lines.append(f"{dead} {unit} lost all {its} weights, but the graph keeps {it} ({blocked}): svdc inspect says more.")
    elif zeros >= SPARSE:
        lines.append(
            f"{100 * zeros:.0f}% of the weights are zero, but scattered: hardly any unit lost all of its weights. "
            f"To remove units: {_share(recipe.convert.share)}."
        )
    else:
        lines.append(f"Only {100 * zeros:.0f}% of the weights were dropped. {_more(recipe, results, history)}")
    return [" ".join(lines)]


def padded_in_code(results: RunResults) -> list[str]:
    """A warning if channels stay, relevant or not, because of a padding in the middle of a module's forward; else []."""
    groups = [group for group in (results.pruning or {}).get("groups", ()) if PADDED in group["reason"]]
    if not groups:
        return []
    kept, more = sum(group["kept"] for group in groups), len(groups) - 1
    where = groups[0]["name"] + (f" and {more} other layer{'s' * (more > 1)}" if more else "")
    return [
        f"{kept:,} channels of {where} stay, relevant or not: the model's code pads those that they meet by a fixed number. In "
        "a module of its own that returns just the padded tensor, the padding can be cut, and so can they (docs/pruning.md)"
    ]


def without_weights(results: RunResults) -> list[str]:
    """A note on layers of which no weight is left; else []."""
    names = [row["name"] for row in results.layers or () if row.get("weights") == 0]
    if not names:
        return []
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    which, give = ("1 layer", "it gives") if len(names) == 1 else (f"{len(names)} layers", "they give")
    return [
        f"no weight is left in {which} ({', '.join(names[:3])}{more}): what {give} is a constant. If it is added to what "
        "others give, as in a residual block, the ONNX files hold the constant alone"
    ]


def larger_file(results: RunResults) -> list[str]:
    """A warning if model.onnx is larger than the goal in bytes that its trial had reached; `reached` is then set to False.
    Else []."""
    found, size = results.search, results.sparse.bytes
    if not found or found["objective"] != "bytes" or not found.get("reached") or size is None:
        return []
    goal = parse_goal(found["goal"])
    target = goal.target(found["dense"]["costs"]["bytes"])
    if size <= target * (1 + CLOSE):
        return []
    trial = next(trial for trial in found["trials"] if trial["number"] == found["chosen"])
    line = (
        f"the goal {goal.text} was not reached after all: model.onnx has {size:,} bytes against {target:,.0f}, as it holds "
        f"more than that of trial {trial['number']} ({trial['costs']['bytes']:,.0f}). Ask for {size - target:,.0f} bytes less"
    )
    return _missed(results, line)


def _missed(results: RunResults, line: str) -> list[str]:
    """Note that the goal of the run's search was not reached after all; returns the warning."""
    found = results.search or {}
    results.search = {**found, "reached": False, "notes": [*found.get("notes", ()), line]}
    return [line]


NOISE = 0.1
"""Latencies of one file differ by up to this share from one measurement to the next."""


def slower_file(results: RunResults) -> list[str]:
    """A warning if model.onnx is slower than the goal that its trial had reached, by more than measurements differ; `reached`
    is then set to False. Else []. A latency that a command measured is not compared: these are of another machine."""
    found, now, dense = results.search, results.sparse.latency_ms, results.dense.latency_ms
    if not found or found["objective"] != "latency" or not found.get("reached") or not now or not dense:
        return []
    if "batches" not in found.get("measured", {}):
        return []
    batches = [f"batch_{batch}" for batch in found["measured"]["batches"]]
    share = math.prod(now[batch] / dense[batch] for batch in batches) ** (1 / len(batches))
    goal, before = parse_goal(found["goal"]), found["dense"]["costs"]["latency"]
    target = goal.target(before)
    if share * before <= target * (1 + CLOSE + NOISE):
        return []
    line = (
        f"the goal {goal.text} was not reached after all: model.onnx takes {share * before:.4g} ms against {target:.4g}, more "
        "than its trial. Ask for less, and let nothing else run meanwhile: measurements differ"
    )
    return _missed(results, line)


FEWER, PART, SLOWER = 1.5, 0.2, 0.9
"""A warning is due if a model has FEWER times fewer MACs but gains less than this PART of them in speed at every batch size
(less than 1.1x for 1.5x fewer, 1.2x for 2x, 1.6x for 4x), or if its speedup at some batch size is below SLOWER."""

BLOCK = 8
"""The least number of channels that onnxruntime's kernels compute at once: 8 with AVX2, 16 with AVX-512."""

OVERHEAD = 0.02
"""A call that takes fewer milliseconds than this is mostly overhead, not arithmetic."""


def hardly_faster(results: RunResults, sets: bool = False) -> list[str]:
    """A warning for a run that reduced MACs but not latency, or made a slower model; [] after a search for latency, non-zeros
    or bytes (others report on those), if latencies are not known, and if the difference is not clear. sets: whether model.onnx
    also computes intervals or sets (`export.sets`), as dense.onnx does not."""
    ratios = results.compression or {}
    macs, latency = ratios.get("macs"), ratios.get("latency") or {}
    sought = (results.search or {}).get("objective") in ("latency", "nonzero", "bytes")
    if sought or not latency or macs is None:
        return []
    slower = min(latency.values()) < SLOWER
    if not slower and (macs < FEWER or max(latency.values()) - 1 >= PART * (macs - 1)):
        return []
    at = ", ".join(f"{ratio:.2f}x at batch {batch.removeprefix('batch_')}" for batch, ratio in latency.items())
    said = f"{macs:.3g}x fewer MACs, but {'slower than the dense model' if slower else 'far less gain in speed'} ({at})."
    if sets:
        said += " model.onnx also computes the promised intervals or sets (export.sets), which dense.onnx does not: in a small "
        said += "model, they are much of the time."
    if max((results.dense.latency_ms or {"": 1.0}).values()) < OVERHEAD:
        return [
            f"{said} The dense model itself takes less than {OVERHEAD:g} ms, most of it overhead per call: such a model "
            "hardly gets faster in onnxruntime"
        ]
    pruning = results.pruning or {}
    odd = [row["name"] for row in results.layers or () if _odd(row)]
    instead = f"let a search measure the latency itself: {_by_latency(results.search or {})}"
    if not odd or (pruning.get("round_to") or 1) % BLOCK == 0:
        return [f"{said} These MACs are not what takes the time; {instead}"]
    which = f"layer {odd[0]}" if len(odd) == 1 else f"layer {odd[0]} and {len(odd) - 1} other{'s' * (len(odd) > 2)}"
    return [
        f"{said} onnxruntime's kernels compute channels in blocks of {BLOCK} or {2 * BLOCK}, and {which} no "
        f"longer {'has a multiple of it' if len(odd) == 1 else 'have multiples of it'}. Use --set prune.round_to={BLOCK} "
        f"(kept only where it measures faster), or {instead}"
    ]


def _by_latency(search: Mapping[str, Any]) -> str:
    """The option, as typed, with which the same search would count time; a budget stays what it is."""
    budget = any(search.get(limit) is not None for limit in ("max_drop", "max_error"))
    return "--objective latency" if budget and search.get("goal") is None else "--goal latency=2x"


def _odd(row: Mapping[str, Any]) -> bool:
    """Whether a layer lost outputs and now has a number of them that is no multiple of BLOCK."""
    before, after = row.get("shape_before"), row.get("shape_after")
    if not before or not after:
        return False
    return after[0] != before[0] and after[0] % BLOCK != 0


def _more(recipe: Recipe, results: RunResults, history: Sequence[Mapping[str, Any]]) -> str:
    """Advice on what to set so that more weights are dropped."""
    if results.reach is not None and results.reach.mostly_frozen:
        return (
            f"To drop more: unfreeze the layers with requires_grad=False. They hold {100 * results.reach.frozen:.0f}% of the "
            "weights, which training can't change."
        )
    cures = []
    trained = recipe.train.epochs > 0
    if trained and results.reach is not None and results.reach.within < SPARSE:
        cures.append("train longer, or with a larger train.lr: most weights could not reach the threshold")
    beta = next((row["beta"] for row in reversed(history) if row.get("stage") == "train"), None)
    if beta:  # three times 0 would be no advice
        cures.append(f"increase the pressure: --set train.beta.final={3 * beta:.2g} (it was {beta:.2g})")
    cures.append(f"more epochs: --epochs {2 * recipe.train.epochs}" if trained else "epochs of fine-tuning: --epochs 10")
    if not _asks_units(recipe.convert.share):
        cures.append(f"judge whole units too: {_share(recipe.convert.share)}")
    return f"To drop more: {'; '.join(cures)}."


def _blocked(layers: Sequence[Mapping[str, Any]], pruning: Mapping[str, Any]) -> tuple[int, str]:
    """How many units without weights stay in their layers, and the most common reason; (0, "") if there are none."""
    dead: Counter[str] = Counter()
    for group in pruning.get("groups") or ():
        writers = [row for row in layers if row["name"] == group["name"] or f"{row['name']}.bias" in group["layers"]]
        left = group["kept"] - max((row["outputs"] for row in writers), default=group["kept"])  # several layers may write a sum
        if group.get("reason") and left > 0:
            dead[group["reason"]] += left
    return dead.total(), dead.most_common(1)[0][0] if dead else ""


def _share(share: Any) -> str:
    """The option, as typed, for a share that judges units more than `share` does, and the current value."""
    parts = MORE_UNITS if _asks_units(share) else WITHOUT_RECIPE["convert.share"]
    now = share if isinstance(share, str) else ", ".join(share)
    return f"--set convert.share='{{{', '.join(f'{name}: {part}' for name, part in parts.items())}}}' (it is {now})"


def _asks_units(share: Any) -> bool:
    return not {"input", "output"}.isdisjoint([share] if isinstance(share, str) else share)
