"""The look of the experiments' pictures: the page's colors, and a second file for the dark page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from svdcompress.errors import OutputError

INK, QUIET, BLUE, RED, GREEN, PURPLE = "#1b1f24", "#5c6670", "#0072b2", "#d55e00", "#009e73", "#a34d86"

_DARK = {
    INK: "#e8ebee",
    QUIET: "#9aa5af",
    BLUE: "#56b4e9",
    RED: "#f28e4b",
    GREEN: "#2fc79a",
    PURPLE: "#d98cc0",
    "#000000": "#e8ebee",  # matplotlib's default color
    "#ffffff": "#14171a",
}
"""What each color becomes on the dark page; both are those of report/style.css."""

_RC: Any = {
    "axes.edgecolor": QUIET,
    "axes.labelcolor": QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "legend.frameon": False,
    "figure.facecolor": "#ffffff",
    "axes.facecolor": "#ffffff",
}
_COLOURS = ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor")


def figure(rows: int, columns: int, size: tuple[float, float], **kwargs: Any) -> tuple[Any, Any]:
    """A figure that pyplot does not manage, and its axes as a (rows, columns) array."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_RC):
        drawing = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(drawing)
        return drawing, drawing.subplots(rows, columns, squeeze=False, **kwargs)


def save(drawing: Any, path: Path, title: str, caption: str) -> dict[str, str]:
    """Write a figure as PNG, and as NAME-dark.png for the dark page; returns its entry in the report's `pictures`.

    Raises OutputError if a file cannot be written.
    """
    dark = path.with_name(f"{path.stem}-dark{path.suffix}")
    for file in (path, dark):
        if file is dark:
            _darken(drawing)
        try:
            drawing.savefig(file, dpi=110)
        except OSError as error:
            raise OutputError(f"{file}: cannot be written ({error.strerror or error})") from error
    return {"title": title, "file": path.name, "dark": dark.name, "caption": caption}


def _darken(drawing: Any) -> None:
    """Give every part its color on the dark page; images keep theirs."""
    from matplotlib.axes import Axes

    for axis in drawing.findobj(Axes):
        axis.tick_params(which="both", color=_DARK[QUIET], labelcolor=_DARK[QUIET])
    for artist in drawing.findobj():
        for name in _COLOURS:
            get, put = getattr(artist, f"get_{name}", None), getattr(artist, f"set_{name}", None)
            if get is None or put is None:
                continue
            try:
                put(_on_dark(get()))
            except (TypeError, ValueError):  # not a color: "none", or the values of a color map
                continue


def _on_dark(colour: Any) -> Any:
    """A color, or an array (n, 4) of them, as on the dark page. Raises ValueError if it stays the same."""
    from matplotlib.colors import to_hex, to_rgba, to_rgba_array

    if isinstance(colour, str) and colour == "none":
        raise ValueError(colour)
    rows = to_rgba_array(colour)
    found = [to_rgba(_DARK.get(to_hex(row[:3]), to_hex(row[:3])), row[3]) for row in rows]
    if not found or all(to_hex(row[:3]) not in _DARK for row in rows):
        raise ValueError("it stays")
    return found[0] if len(found) == 1 else found
