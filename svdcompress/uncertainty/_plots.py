"""Plots of a comparison: reliability, error by share answered, figures under shift, and detection of inputs from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from svdcompress.errors import OutputError
from svdcompress.files import make_folder
from svdcompress.likelihoods import likelihood_for

COLOURS = {
    "dense": "#6b7280",
    "dense, temperature": "#b45309",
    "dense, MC dropout": "#7c3aed",
    "sparse, mean": "#0e7490",
    "sparse, samples": "#15803d",
}
OTHERS = ("#be185d", "#1d4ed8", "#a16207", "#0f172a")
"""Colors of further contenders, in their order."""

SCORES = {
    "softmax": "1 - confidence",
    "entropy": "predictive entropy",
    "mutual_information": "mutual information",
    "energy": "energy",
    "variance": "variance",
}
MEASURES = {
    "error": "error (%)",
    "rmse": "RMSE",
    "nll": "NLL",
    "ece": "ECE",
    "coverage": "coverage of the central 95%",
    "selective": "of the surest {kept}%",
}


def plot(result: dict[str, Any], folder: str | Path) -> list[Path]:
    """Plot what `compare` returned as PNG files in a folder, which is created if needed; returns the files.

    Raises OutputError if the folder or a file cannot be written.
    """
    folder = make_folder(Path(folder))
    contenders = result["contenders"]
    files = []
    if any(contender["reliability"] for contender in contenders):
        files.append(_save(_reliability(contenders), folder / "reliability.png"))
    if any(contender["selective"] for contender in contenders):
        files.append(_save(_answered(contenders, result["task"]), folder / "answered.png"))
    if any(contender["ood"] for contender in contenders):
        files.append(_save(_outside(contenders), folder / "out_of_distribution.png"))
    if result.get("shift"):
        files.append(_save(_shift(result["shift"], [contender["name"] for contender in contenders]), folder / "shift.png"))
    return files


def colours(names: Sequence[str]) -> dict[str, str]:
    """A color for each contender; those that are always there keep theirs."""
    others = (name for name in names if name not in COLOURS)
    return {**COLOURS, **{name: OTHERS[k % len(OTHERS)] for k, name in enumerate(others)}}


def _style(name: str) -> str:
    return "-" if name.startswith("sparse") else "--"


def _figure(columns: int, width: float, height: float, rows: int = 1, **kwargs: Any) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False, **kwargs).flat)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return figure, axes


def _save(figure: Any, path: Path) -> Path:
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror or error})") from error
    return path


def _reliability(contenders: list[dict[str, Any]]) -> Any:
    columns = min(4, len(contenders))
    rows = -(-len(contenders) // columns)
    figure, axes = _figure(columns, 2.7 * columns, 3.1 * rows, rows, sharey=True)
    palette = colours([contender["name"] for contender in contenders])
    for axis in axes[len(contenders) :]:
        axis.set_visible(False)
    for axis, contender in zip(axes, contenders, strict=False):
        diagram = contender["reliability"]
        edges, count = diagram["edges"], sum(diagram["count"])
        width = edges[1] - edges[0]
        colour = palette[contender["name"]]
        for left, n, sure, right in zip(edges[:-1], diagram["count"], diagram["confidence"], diagram["accuracy"], strict=True):
            if n:
                axis.bar(left, right, width, align="edge", color=colour, alpha=0.25 + 0.6 * (n / count) ** 0.3)
                axis.plot([sure, sure], [right, sure], color="#dc2626", linewidth=1.5)
        axis.plot([0, 1], [0, 1], color="#111827", linewidth=0.8, linestyle="--")
        axis.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence")
        axis.set_title(f"{contender['name']}\nECE {contender['metrics']['ece']:.4f}", fontsize=9)
    for axis in axes[::columns]:
        axis.set_ylabel("accuracy")
    return figure


def _answered(contenders: list[dict[str, Any]], task: str) -> Any:
    """Error against the share of inputs answered; logarithmic for error rates, since what matters is near 0."""
    figure, (axis,) = _figure(1, 6.2, 3.8)
    percent = likelihood_for(task).probabilities
    palette = colours([contender["name"] for contender in contenders])
    lowest = []
    for contender in contenders:
        curve = contender["selective"]
        if curve:
            loss = [100 * value if percent else value**0.5 for value in curve["loss"]]
            lowest += [value for value in loss if value > 0]
            share = [100 * part for part in curve["share"]]
            name = contender["name"]
            axis.plot(share, loss, label=name, color=palette[name], linestyle=_style(name), linewidth=1.4)
    axis.set(
        xlabel="inputs answered, the surest first (%)",
        ylabel="error of answered inputs (%)" if percent else "RMSE of answered inputs",
        xlim=(0, 100),
        ylim=(0, None),
    )
    if percent and lowest:
        axis.set_yscale("symlog", linthresh=max(min(lowest), 1e-3), linscale=0.3)
    axis.legend(frameon=False, fontsize=8)
    return figure


def _shift(shift: dict[str, Any], names: list[str]) -> Any:
    """A row for each figure, a column for each kind of corruption."""
    curves, palette = shift["curves"], colours(names)
    first = next(iter(next(iter(curves.values())).values()))[0]
    kept = any("selective" in points[0] for points in next(iter(curves.values())).values())
    measures = [key for key in MEASURES if key in first or (key == "selective" and kept)]
    figure, axes = _figure(
        len(curves), 2.4 * len(curves) + 0.6, 1.9 * len(measures) + 0.9, len(measures), sharex=True, sharey="row"
    )
    for row, measure in enumerate(measures):
        for column, (kind, by_name) in enumerate(curves.items()):
            axis = axes[row * len(curves) + column]
            for name, points in by_name.items():
                at = [(level, point[measure]) for level, point in enumerate(points) if measure in point]
                if at:
                    style: dict[str, Any] = {"color": palette[name], "linestyle": _style(name), "linewidth": 1.3}
                    axis.plot(*zip(*at, strict=True), label=name, **style)
            if not row:
                axis.set_title(kind, fontsize=9)
            if not column:
                axis.set_ylabel(MEASURES[measure].format(kept=shift["kept"]), fontsize=8)
            axis.tick_params(labelsize=7)
            if row == len(measures) - 1:
                axis.set_xlabel("level", fontsize=8)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def _outside(contenders: list[dict[str, Any]]) -> Any:
    names = list(dict.fromkeys(name for contender in contenders for name in contender["ood"]))
    palette = colours([contender["name"] for contender in contenders])
    figure, axes = _figure(len(names), 3.0 * len(names) + 1.8, 0.32 * 3 * len(contenders) / 2 + 1.2, sharey=True)
    for axis, name in zip(axes, names, strict=True):
        rows = [
            (contender["name"], score, value)
            for contender in contenders
            for score, value in contender["ood"].get(name, {}).items()
        ]
        labels = [f"{who}: {SCORES.get(score, score)}" for who, score, _ in rows]
        values = [value for *_, value in rows]
        axis.barh(range(len(rows)), values, color=[palette[who] for who, *_ in rows], height=0.7)
        for place, value in enumerate(values):
            axis.text(value - 0.01, place, f"{value:.3f}", ha="right", va="center", color="white", fontsize=7)
        axis.set_yticks(range(len(rows)), labels, fontsize=7)
        axis.invert_yaxis() if axis is axes[0] else None
        axis.set(xlim=(min(0.5, *values), 1.0), xlabel="AUROC")
        axis.set_title(f"test against {name}", fontsize=9)
        axis.grid(axis="y", visible=False)
    return figure
