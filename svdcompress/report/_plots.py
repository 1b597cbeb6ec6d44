"""The plots of the page, each a function from plain data to an SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from svdcompress.report._draw import INK, LINE, PAGE, QUIET, Drawing, make_log, mark, series, short, steady
from svdcompress.report._rows import milliseconds

CURVES = {
    "nll": "NLL",
    "kl": "KL (nats)",
    "beta": "beta",
    "sparsity": "sparsity (%)",
    "val_error": "validation error (%)",
    "val_rmse": "validation RMSE",
    "val_nll": "validation NLL",
    "lr": "learning rate",
}
"""Columns of the history that are drawn, in this order."""

DASHES: Any = ("-", (0, (4, 2)), (0, (1, 1.5)))
"""Line styles: colors repeat after six series, and then the next style is used."""

CSS_DASHES = ("solid", "dashed", "dotted")
"""The same line styles in CSS, for legends."""

FEW = 10
"""Examples below which a bin of the reliability diagram is a pale dot: its accuracy is mostly chance."""


def stages(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """The stages of training in their order."""
    return list(dict.fromkeys(str(entry.get("stage", "training")) for entry in history))


STILL = 0.05
"""The least span of an axis relative to its values: smaller changes are not worth showing."""


def chance_error(error: float, examples: int | None) -> float:
    """Four standard errors of an error in percent that was counted on `examples` examples; 0 if their number is unknown."""
    share = min(max(error / 100, 1 / examples), 1) if examples else 0.0
    return 400 * math.sqrt(share * (1 - share) / examples) if examples else 0.0


def _least(values: Sequence[float], name: str, examples: int | None) -> float:
    """The least span of an axis with these values."""
    middle = float(np.median(np.abs(values)))
    noise = chance_error(middle, examples) if name in ("error", "val_error") else 0.0
    return max(STILL * middle, noise)


def training_curve(history: Sequence[Mapping[str, Any]], name: str, examples: int | None = None) -> str | None:
    """One column of the history over all epochs, a color for each stage; None if nothing was recorded.

    examples: number of validation examples, from which the axis of their error gets a span no smaller than chance.
    """
    values = [_number(entry.get(name)) for entry in history]
    if all(math.isnan(value) for value in values):
        return None
    scale = 100 if name == "sparsity" else 1
    order = stages(history)
    with Drawing(3.3, 1.9) as drawing:
        for k, stage in enumerate(order):
            at = [i for i, entry in enumerate(history) if str(entry.get("stage", "training")) == stage]
            points = [(i + 1, values[i] * scale) for i in at if not math.isnan(values[i])]
            if points:
                line = drawing.ax.plot(
                    *zip(*points, strict=True), color=series(k), marker="o" if len(points) < 3 else None, ms=3
                )
                mark(line, k)
                texts = [f"{stage}, epoch {x}: {CURVES[name]} {short4(y)}" for x, y in points]
                drawing.points(drawing.ax, points, texts, k)
        finite = [value for value in values if not math.isnan(value)]
        if name in ("nll", "kl") and min(finite) > 0 and max(finite) / min(finite) > 30:
            make_log(drawing.ax)
        if name == "sparsity":
            drawing.ax.set_ylim(0, 100)
        steady(drawing.ax, _least(finite, name, examples))
        drawing.ax.set_xlabel("epoch")
        drawing.ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    return drawing.svg


def log_alpha(histogram: Mapping[str, Any], threshold: float | None) -> str:
    """Histogram of a layer's log alpha: kept below the threshold, irrelevant from there on."""
    edges, counts = np.asarray(histogram["edges"], float), np.asarray(histogram["counts"], float)
    limit = _number(histogram.get("threshold", threshold))
    with Drawing(3.3, 1.7) as drawing:
        kept = len(counts) if math.isnan(limit) else int((edges[:-1] < limit).sum())
        for start, stop, colour in ((0, kept, series(0)), (kept, len(counts), LINE)):
            if stop > start:
                drawing.ax.stairs(counts[start:stop], edges[start : stop + 1], fill=True, color=colour, lw=0)
        drawing.ax.set_ylim(0, 1.05 * max(counts.max(), 1))
        if not math.isnan(limit):
            drawing.ax.axvline(limit, color=series(1), lw=1.2)
        positive = counts[counts > 0]
        if len(positive) and positive.max() / positive.min() > 100:
            drawing.ax.set_ylim(positive.min() / 2, positive.max() * 2)
            make_log(drawing.ax)
        drawing.ax.set_xlabel("log alpha")
        bins = list(zip(edges, edges[1:], counts, strict=False))
        texts = [f"log alpha {a:.1f} to {b:.1f}: {short(n)}{' dropped' if a >= limit else ''}" for a, b, n in bins]
        drawing.points(drawing.ax, [((a + b) / 2, n) for a, b, n in bins], texts)
    return drawing.svg


def log_alpha_map(histograms: Mapping[str, Mapping[str, Any]], threshold: float | None) -> str:
    """The same for many layers: one row per layer, darker where more of its weights are."""
    edges = np.asarray(next(iter(histograms.values()))["edges"], float)
    grid = np.array([_rebin(h, edges) for h in histograms.values()])
    grid = grid / np.maximum(grid.max(1, keepdims=True), 1e-12)
    with Drawing(7.2, 0.55 + 0.17 * len(grid)) as drawing:
        ax = drawing.ax
        for row, shares in enumerate(grid):
            for left, right, share in zip(edges, edges[1:], shares, strict=False):
                if share > 0.002:
                    ax.barh(row, right - left, 0.9, left, color=series(0), alpha=round(0.06 + 0.94 * share**0.5, 3), lw=0)
        limit = _number(threshold)
        if not math.isnan(limit):
            ax.axvline(limit, color=series(1), lw=1.2)
        ax.set_yticks(range(len(grid)), list(histograms), fontsize=7)
        ax.set_ylim(len(grid) - 0.4, -0.6)
        ax.grid(axis="y", visible=False)
        ax.set_xlabel("log alpha")
    return drawing.svg


def _rebin(histogram: Mapping[str, Any], edges: np.ndarray) -> np.ndarray:
    own = np.asarray(histogram["edges"], float)
    counts = np.asarray(histogram["counts"], float)
    if len(own) == len(edges) and np.allclose(own, edges):
        return counts
    return np.histogram((own[:-1] + own[1:]) / 2, edges, weights=counts)[0]


def threshold_curve(points: Sequence[Mapping[str, Any]], chosen: float | None, examples: int | None = None) -> str | None:
    """Error (or RMSE), NLL and non-zeros against the threshold, one panel each. examples: number of validation examples."""
    names = {"error": "error (%)", "rmse": "RMSE", "nll": "NLL", "nonzero": "non-zeros"}
    shown = [name for name in names if any(point.get(name) is not None for point in points)]
    points = sorted(points, key=lambda point: point["threshold"])
    if not shown or not points:
        return None
    with Drawing(3.3, 0.5 + 0.9 * len(shown), rows=len(shown), sharex=True) as drawing:
        for ax, name in zip(drawing.axes, shown, strict=True):
            at = [(point["threshold"], point[name]) for point in points if point.get(name) is not None]
            ax.plot(*zip(*at, strict=True), color=series(0), marker="o", ms=2.5)
            ax.set_ylabel(names[name])
            texts = [f"threshold {x:g}: {names[name].removesuffix(' (%)')} {short4(y)}{'%' * (name == 'error')}" for x, y in at]
            drawing.points(ax, at, texts)
            steady(ax, _least([y for _, y in at], name, examples))
            if name == "nonzero":
                make_log(ax)
            if chosen is not None:
                ax.axvline(chosen, color=series(1), lw=1.2)
        drawing.axes[-1].set_xlabel("threshold on log alpha")
    return drawing.svg


def reliability(calibration: Mapping[str, Mapping[str, Any]]) -> str:
    """Accuracy against confidence by bins, one line for each model; on the diagonal confidence equals accuracy."""
    with Drawing(3.9, 3.5) as drawing:
        ax = drawing.ax
        ax.plot([0, 1], [0, 1], color=QUIET, lw=0.8, ls=(0, (4, 3)))
        for k, (name, bins) in enumerate(calibration.items()):
            counts = bins.get("count") or [FEW] * len(bins["confidence"])
            every = list(zip(bins["confidence"], bins["accuracy"], counts, strict=True))
            points = [(c, a) for c, a, n in every if n >= FEW and a is not None]
            few = [(c, a) for c, a, n in every if 0 < n < FEW and a is not None]
            if few:
                pale: dict[str, Any] = {"ls": "none", "marker": "o", "ms": 3, "alpha": 0.4}
                mark(ax.plot(*zip(*few, strict=True), color=series(k), **pale), k)
            if points:
                style: dict[str, Any] = {"color": series(k), "ls": DASHES[k // 6 % 3]}
                mark(ax.plot(*zip(*points, strict=True), marker="o", ms=3.5, mfc=PAGE, **style), k)
            full = [(c, a, n) for c, a, n in every if n and a is not None]
            texts = [f"{name}: confidence {c:.3f}, accuracy {a:.3f}, {n:,} examples" for c, a, n in full]
            drawing.points(ax, [(c, a) for c, a, _ in full], texts, k)
        ax.set(xlim=(0, 1.02), ylim=(0, 1.02), xlabel="confidence", ylabel="accuracy")
    return drawing.svg


def latency_bars(dense: Mapping[str, float], sparse: Mapping[str, float]) -> str:
    """Latency of the two files by batch size, a panel for each since their scales differ."""
    names = [name for name in dense if name in sparse]
    with Drawing(3.9, 0.35 + 0.8 * len(names), rows=len(names)) as drawing:
        for ax, name in zip(drawing.axes, names, strict=True):
            for row, (label, value) in enumerate((("dense", dense[name]), ("sparse", sparse[name]))):
                ax.barh(row, value, 0.7, color=series(row), lw=0)
                at: dict[str, Any] = {"xycoords": "data", "textcoords": "offset points", "va": "center"}
                ax.annotate(milliseconds(value), (value, row), (4, 0), color=INK, **at)
                ax.annotate(label, (0, row), (-4, 0), ha="right", color=QUIET, **at)
            ax.set_xlim(0, 1.25 * max(dense[name], sparse[name]))
            ax.set_ylim(1.6, -0.6)
            ax.set_yticks([])
            ax.set_xticks([])
            ax.grid(visible=False)
            ax.spines[:].set_visible(False)
            ax.set_title(f"batch {name.removeprefix('batch_')}", loc="left", color=QUIET)
    return drawing.svg


def filters(before: Any, after: Any, limit: int = 32) -> str | None:
    """First-layer filters as pictures, before (left) and after (right), on one scale: red above 0, blue below."""
    pictures = [found for weights in (before, after) if (found := _pictures(np.asarray(weights, float))) is not None]
    if len(pictures) < 2:
        return None
    shown = min(limit, max(len(found) for found in pictures))
    columns = min(8, shown)
    rows = math.ceil(shown / columns)
    bound = max(float(np.abs(found).max()) for found in pictures) or 1.0
    sheets = [_tiles(found[:shown], rows, columns) for found in pictures]
    height, width = sheets[0].shape
    with Drawing(3.9, 0.3 + 1.9 * height / width, columns=2) as drawing:
        for ax, sheet, label in zip(drawing.axes, sheets, ("before", "after"), strict=True):
            ax.imshow(sheet, cmap="RdBu_r", vmin=-bound, vmax=bound, interpolation="none")
            ax.set_axis_off()
            ax.set_title(label, loc="left", color=QUIET)
    return drawing.svg


def _pictures(weights: np.ndarray) -> np.ndarray | None:
    """Weights (filters, inputs[, height, width]) as pictures (filters, height, width); None if they are not pictures."""
    if weights.ndim == 4:
        return weights.mean(1)
    side = math.isqrt(weights.shape[1]) if weights.ndim == 2 else 0
    return weights.reshape(-1, side, side) if side > 1 and side * side == weights.shape[1] else None


def _tiles(pictures: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Pictures in a grid, with empty gaps of one pixel."""
    height, width = pictures.shape[1:]
    sheet = np.full((rows * (height + 1) - 1, columns * (width + 1) - 1), np.nan)
    for k, picture in enumerate(pictures):
        top, left = k // columns * (height + 1), k % columns * (width + 1)
        sheet[top : top + height, left : left + width] = picture
    return sheet


def short4(value: float) -> str:
    """A number as text for a tooltip."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
