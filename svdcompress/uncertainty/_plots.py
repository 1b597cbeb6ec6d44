"""Pictures of a comparison: reliability diagrams, rejection curves, what tells the inputs from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from svdcompress.errors import OutputError
from svdcompress.likelihoods import likelihood_for

COLOURS = {
    "dense": "#6b7280",
    "dense, temperature": "#b45309",
    "dense, MC dropout": "#7c3aed",
    "sparse, mean": "#0e7490",
    "sparse, samples": "#15803d",
}
SCORES = {
    "softmax": "1 - confidence",
    "entropy": "predictive entropy",
    "mutual_information": "mutual information",
    "variance": "variance",
}


def draw(result: dict[str, Any], folder: str | Path) -> list[Path]:
    """Write the pictures of what `compare` returned into a folder as PNG, which is made; returns the files.

    Raises OutputError for a place that cannot be written.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made ({error.strerror or error})") from error
    contenders = result["contenders"]
    files = []
    if any(contender["reliability"] for contender in contenders):
        files.append(_save(_reliability(contenders), folder / "reliability.png"))
    if any(contender["rejection"] for contender in contenders):
        files.append(_save(_rejection(contenders, result["task"]), folder / "rejection.png"))
    if any(contender["ood"] for contender in contenders):
        files.append(_save(_outside(contenders), folder / "out_of_distribution.png"))
    return files


def _figure(columns: int, width: float, height: float, **kwargs: Any) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, squeeze=False, **kwargs)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return figure, list(axes)


def _save(figure: Any, path: Path) -> Path:
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror or error})") from error
    return path


def _reliability(contenders: list[dict[str, Any]]) -> Any:
    figure, axes = _figure(len(contenders), 2.7 * len(contenders), 3.1, sharey=True)
    for axis, contender in zip(axes, contenders, strict=True):
        diagram = contender["reliability"]
        edges, count = diagram["edges"], sum(diagram["count"])
        width = edges[1] - edges[0]
        colour = COLOURS.get(contender["name"], "#15803d")
        for left, n, sure, right in zip(edges[:-1], diagram["count"], diagram["confidence"], diagram["accuracy"], strict=True):
            if n:
                axis.bar(left, right, width, align="edge", color=colour, alpha=0.25 + 0.6 * (n / count) ** 0.3)
                axis.plot([sure, sure], [right, sure], color="#dc2626", linewidth=1.5)
        axis.plot([0, 1], [0, 1], color="#111827", linewidth=0.8, linestyle="--")
        axis.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence")
        axis.set_title(f"{contender['name']}\nECE {contender['metrics']['ece']:.4f}", fontsize=9)
    axes[0].set_ylabel("accuracy")
    return figure


def _rejection(contenders: list[dict[str, Any]], task: str) -> Any:
    figure, (axis,) = _figure(1, 5.6, 3.6)
    percent = likelihood_for(task).probabilities
    for contender in contenders:
        curve = contender["rejection"]
        if curve:
            loss = [100 * value for value in curve["loss"]] if percent else [value**0.5 for value in curve["loss"]]
            axis.plot(
                [100 * part for part in curve["rejected"]],
                loss,
                label=contender["name"],
                color=COLOURS.get(contender["name"]),
                linestyle="-" if contender["name"].startswith("sparse") else "--",
            )
    axis.set(
        xlabel="inputs rejected, the least certain first (%)",
        ylabel="error of the rest (%)" if percent else "RMSE of the rest",
        ylim=(0, None),
    )
    axis.legend(frameon=False, fontsize=8)
    return figure


def _outside(contenders: list[dict[str, Any]]) -> Any:
    names = list(dict.fromkeys(name for contender in contenders for name in contender["ood"]))
    figure, axes = _figure(len(names), 3.0 * len(names) + 1.8, 0.32 * 3 * len(contenders) / 2 + 1.2, sharey=True)
    for axis, name in zip(axes, names, strict=True):
        rows = [
            (contender["name"], score, value)
            for contender in contenders
            for score, value in contender["ood"].get(name, {}).items()
        ]
        labels = [f"{who}: {SCORES[score]}" for who, score, _ in rows]
        values = [value for *_, value in rows]
        axis.barh(range(len(rows)), values, color=[COLOURS.get(who, "#15803d") for who, *_ in rows], height=0.7)
        for place, value in enumerate(values):
            axis.text(value - 0.01, place, f"{value:.3f}", ha="right", va="center", color="white", fontsize=7)
        axis.set_yticks(range(len(rows)), labels, fontsize=7)
        axis.invert_yaxis() if axis is axes[0] else None
        axis.set(xlim=(min(0.5, *values), 1.0), xlabel="AUROC")
        axis.set_title(f"test against {name}", fontsize=9)
        axis.grid(axis="y", visible=False)
    return figure
