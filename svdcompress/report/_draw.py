"""Matplotlib figures as SVG that follows the page's style: colors are CSS variables, and text stays text.

A figure is drawn with marker colors that stand for "ink", "quiet", "line", "page" or "series k"; in the SVG they become
`var(--ink)` and so on, which the page's style sheet defines for light and dark. `Drawing.points` registers points that get a
tooltip; they end up, in the SVG's own coordinates, in its `data-points`. `mark` marks series that a legend can hide.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

INK, QUIET, LINE, PAGE = "#010101", "#020202", "#030303", "#040404"
SERIES = ("#050501", "#050502", "#050503", "#050504", "#050505", "#050506")

_VARIABLES = {INK: "--ink", QUIET: "--quiet", LINE: "--line", PAGE: "--page"} | {
    colour: f"--c{k}" for k, colour in enumerate(SERIES, 1)
}
_RC: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": ["sans-serif"],
    "font.size": 8.5,
    "axes.titlesize": 8.5,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": QUIET,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": LINE,
    "grid.linewidth": 0.5,
    "text.color": INK,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "lines.linewidth": 1.4,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.constrained_layout.use": True,
}


def short(value: float, _position: int = 0) -> str:
    """A tick's number in short form: 0.001, 20, 5k, 1.3M."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"


def make_log(ax: Axes) -> None:
    """Make the y axis logarithmic, with plain numbers at its ticks."""
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(FuncFormatter(short))
    ax.yaxis.set_minor_locator(NullLocator())
    low, high = ax.get_ylim()
    if high / low < 30:  # too short for decades alone
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))


def series(k: int) -> str:
    """The marker color of series k; colors repeat after six."""
    return SERIES[k % len(SERIES)]


def mark(artists: Artist | Iterable[Artist], k: int) -> None:
    """Name artists as parts of series k, which the page's legend shows and hides."""
    for artist in [artists] if isinstance(artists, Artist) else artists:
        artist.set_gid(f"series-{k}")


def steady(ax: Axes, least: float) -> None:
    """Widen a linear y axis to a span of `least`, so that smaller differences, which may be chance, look small."""
    low, high = ax.get_ylim()
    if ax.get_yscale() == "linear" and 0 < high - low < least:
        middle = (low + high) / 2
        bottom = middle - least / 2
        if low >= 0 > bottom:  # for values that are never negative
            bottom = 0.0
        ax.set_ylim(bottom, bottom + least)


class Drawing:
    """A figure in the page's style, used as a context manager; `svg` is set when the context ends.

    width, height: in inches at the page's nominal text size; the page scales the figure to its column.
    """

    def __init__(self, width: float = 3.9, height: float = 2.3, rows: int = 1, columns: int = 1, **kwargs: Any) -> None:
        self._rc = matplotlib.rc_context(_RC)
        self._size, self._grid, self._kwargs = (width, height), (rows, columns), kwargs
        self._points: list[tuple[Axes, float, float, str, int]] = []
        self.svg = ""

    def __enter__(self) -> Drawing:
        self._rc.__enter__()
        self.figure = Figure(figsize=self._size)
        self.axes: Sequence[Axes] = list(self.figure.subplots(*self._grid, squeeze=False, **self._kwargs).flat)
        return self

    def __exit__(self, *failure: Any) -> None:
        try:
            if failure[0] is None:
                self.svg = _with_points(_to_svg(self.figure), self.figure, self._points)
        finally:
            self._rc.__exit__(*failure)

    @property
    def ax(self) -> Axes:
        """The first (often the only) axes."""
        return self.axes[0]

    def points(self, ax: Axes, at: Iterable[tuple[float, float]], texts: Iterable[str], series: int = 0) -> None:
        """Give each point of a plot a tooltip. at: in data coordinates. series: the one they belong to, as in `mark`."""
        self._points += [(ax, float(x), float(y), text, series) for (x, y), text in zip(at, texts, strict=True)]


def _with_points(svg: str, figure: Figure, points: Sequence[tuple[Axes, float, float, str, int]]) -> str:
    """The SVG with its points in its own units (72 per inch, y down)."""
    unit, height = 72 / figure.dpi, 72 * figure.get_figheight()
    found = []
    for ax, x, y, text, k in points:
        across, up = ax.transData.transform((x, y))
        spot = round(float(across) * unit, 1), round(height - float(up) * unit, 1)
        box = ax.get_window_extent()
        if box.x0 - 2 <= across <= box.x1 + 2 and box.y0 - 2 <= up <= box.y1 + 2:  # none for points cut off by the axes
            found.append([*spot, text, k])
    if not found:
        return svg
    data = escape(json.dumps(found, ensure_ascii=False, separators=(",", ":")))
    return svg.replace("<svg ", f'<svg data-points="{data}" ', 1)


_drawn = 0


def _to_svg(figure: Figure) -> str:
    global _drawn
    _drawn += 1  # ids inside the SVG are hashed from it, so that several SVGs on one page don't share them
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": f"svdcompress-{_drawn}"}):
        metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(buffer, format="svg", transparent=True, metadata=metadata)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<svg ([^>]*?)width="[^"]*"', r'<svg role="img" \1', text, count=1)
    text = re.sub(r'(<svg [^>]*?)height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r"font: ([^;\"]*?)px [^;\"]*", r"font-size: \1px; font-family: inherit", text)
    text = re.sub(
        r' id="(?:figure|axes|patch|line2d|text|matplotlib\.axis|xtick|ytick|legend|PathCollection|LineCollection)_\d+"',
        "",
        text,
    )
    text = re.sub(r' id="series-(\d+)"', r' data-series="\1"', text)
    for colour, name in _VARIABLES.items():
        text = text.replace(colour, f"var({name})")
    return text.strip()
