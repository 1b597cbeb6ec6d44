"""Makes benchmarks/results/real.md from real.json."""

from __future__ import annotations

import json
from typing import Any


def optimizers(made: dict[str, Any]) -> str:
    """The optimizers of our fine-tuning, and of our recovery and all other rows."""
    rest, first = made.get("recovery"), made.get("training", {"optimizer": "adam", "lr": made["lr"], "weight_decay": 0.0})
    if rest is None:  # in rows from before it was stored: Adam throughout
        return f"Adam at {made['lr']:g}"
    taught = f", distillation {first['distill']:g}" if "distill" in first else ""
    return f"fine-tuning by {_stepped(first)}{taught}; recovery, and all others, by {_stepped(rest)}"


def distilled(nets: dict[str, Any]) -> str:
    """Which rows also learned from the dense network's answers."""
    return "every row, unless its name says otherwise" if any("not distilled" in name for name in nets) else "every row"


def _stepped(by: dict[str, Any]) -> str:
    decay = f", weight decay {by['weight_decay']:g}" if by["weight_decay"] else ""
    return f"{by['optimizer']} at {by['lr']:g}{decay}"


def asked(goal: str) -> str:
    """The option of `svdc sparsify` for what is asked for: a goal, or max-drop=POINTS (of an RMSE, percent)."""
    return f"--{goal.replace('=', ' ')}" if goal.startswith("max-drop") else f"--goal {goal}"


def epochs_of(history: list[dict[str, Any]]) -> int:
    """The epochs that led from the dense network to ours; a recovery that was undone and repeated counts once."""
    return len({(row["stage"], row["epoch"]) for row in history if row["stage"] != "dense"})


def kept_of(search: dict[str, Any]) -> dict[str, Any]:
    """What a search (of report.json) was allowed to lose, and what its model loses; nothing if it had no budget."""
    if search["max_drop"] is None:
        return {}
    taken = next(trial for trial in search["trials"] if trial["number"] == search["chosen"])
    return {
        "budget": {key: search[key] for key in ("max_drop", "confidence", "met")}
        | {key: taken[key] for key in ("drop", "upper")}
    }


def within(budget: dict[str, Any], unit: str, examples: str) -> str:
    """One line: whether a budget was kept. unit: that of the loss, as in points; examples: those that chose."""
    kept = "kept" if budget["met"] else "not kept"
    few = budget["met"] and budget["upper"] > budget["max_drop"]
    return (
        f"the budget of {budget['max_drop']:g}{unit} was {kept}: {budget['drop']:.2f} on the {examples} that choose, at most "
        f"{budget['upper']:.2f} with {100 * budget['confidence']:g}% confidence"
        + ("; these are too few for that bound to decide, so the measured loss did" if few else "")
    )


def _moved(change: list[float]) -> str:
    return "{:+.2f} [{:+.2f}, {:+.2f}]".format(*change)


def _faster(base: dict[str, Any], net: dict[str, Any]) -> str:
    """How many times lower the latencies are than the dense network's, at both batch sizes."""
    before, after = base.get("latency_ms") or {}, net.get("latency_ms") or {}
    return ", ".join(f"{before[size] / after[size]:.1f}x" for size in before if size in after)


def table(results: dict[str, Any]) -> str:
    """Markdown: a section for each network."""
    lines = ["# Networks that others trained", "", "Written by `benchmarks/real.py`, which says how each row is trained.", ""]
    lines.append(
        "Accuracy on test images that chose nothing (half of them where the weights are public), with Wilson's 95% interval;"
    )
    lines.append(
        "chosen: on those that chose; all 10,000: on both. Change: the error of our network less that of the row, in points,"
    )
    lines.append(
        "paired, 95%; below 0 ours is better. The same of all 10,000, half of which chose ours, in some rows. Latency: of the"
    )
    lines += ["file in onnxruntime on one thread, batch 1 and 128, where it was kept.", ""]
    head = ("net", "MACs", "parameters", "non-zeros", "latency", "accuracy %", "chosen", "all 10,000", "change", "wall-clock")
    for name, one in results.items():
        made, base = one["setting"], one["nets"]["dense start"]
        facts = [
            f"`{asked(one['goal'])}`; {one['epochs']} epochs for each row (train.epochs {made['train']}, recover.epochs "
            f"{made['recover']}, {made['levels']} levels)",
            *(
                [f"{within(ours['budget'], ' points', 'images')}; trials: {ours['trials']}"]
                if "budget" in (ours := one["nets"]["ours"])
                else []
            ),
            *([f"{made['images']:,} training images"] if "images" in made else []),
            *([f"dense start: {made['dense']['epochs']} epochs by {_stepped(made['dense'])}"] if "dense" in made else []),
            optimizers(made) + (f", in batches of {made['batch']}" if "batch" in made else ""),
            f"precision {made['precision'].replace('no', 'float32')}",
            f"distillation {made['distill']:g} ({distilled(one['nets']) if 'recovery' in made else 'ours alone'})",
            *(
                [f"ours alone: {layers:g} times the error of layers' outputs, falling to 0 (`recover.distill.layers`)"]
                if (layers := one["nets"]["ours"].get("layers"))
                else []
            ),
            f"augmentation {json.dumps(made['augment'])}",
            f"{made['device']}, {one['machine'].get('cpu')}, {made['threads']} thread(s), torch {made['torch']}",
            *(f"{label}: {net['note']}" for label, net in one["nets"].items() if "note" in net),  # made otherwise than the rest
        ]
        lines += [f"## {name}", "", f"Anchor: {one['anchor']}.", "", *(f"- {fact}" for fact in facts), ""]
        lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        for label, net in one["nets"].items():
            accuracy, (low, high) = net["accuracy"], net["interval"]
            moved = _moved(net["change"]) if "change" in net else ""
            everywhere = f"{accuracy['all']:.2f}" if "all" in accuracy else ""
            everywhere += f"; {_moved(net['change_all'])}" if "change_all" in net else ""
            others = net.get("epochs") or one["epochs"]  # a network of ours that was added later has its own
            label += f" ({others} epochs)" if others != one["epochs"] else ""
            cells = [label, f"{base['macs'] / net['macs']:.2f}x", f"{base['parameters'] / net['parameters']:.2f}x"]
            cells += [f"{base['nonzero'] / net['nonzero']:.2f}x", _faster(base, net)]
            cells += [
                f"{accuracy['reported']:.2f} ({low:.2f} to {high:.2f})",
                f"{accuracy['chosen']:.2f}",
                everywhere,
                moved,
                f"{net['seconds'] / 60:.0f} min" if net.get("seconds") else "",
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)
