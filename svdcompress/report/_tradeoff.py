"""Error against size: a search's trials, or several runs, as a picture, a section of the page and lines on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from svdcompress.errors import UsageError, counted
from svdcompress.recipe import smaller
from svdcompress.report import _html as html
from svdcompress.report._files import load

if TYPE_CHECKING:  # matplotlib only when something is drawn
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LATENCY_BATCH = 1
"""The batch size at which the latencies of finished runs are compared; each report has it."""


@dataclass(frozen=True)
class Point:
    """A model: how many times smaller it is than the dense one, its error, the upper bound on that, and a name."""

    ratio: float
    error: float
    upper: float | None = None
    name: str = ""
    met: bool | None = None
    chosen: bool = False


@dataclass(frozen=True)
class Curve:
    """Models of one search or run. measure: how size is measured; unit: what comes after a factor of it ("faster"). what:
    which error, on which data ("validation error (%)"). dense: the dense model's error."""

    name: str
    measure: str
    unit: str
    what: str
    dense: float
    points: list[Point]


def search_curve(results: Mapping[str, Any]) -> Curve | None:
    """The trials of a run's search, by validation error; None for a run without a search."""
    found = results.get("search")
    if not found or not found.get("trials"):
        return None
    measure, dense = found["objective"], found["dense"]
    regression = results.get("task") in ("regression", "gaussian")
    points = []
    for trial in found["trials"]:
        upper = None
        if trial["upper"] is not None:
            lost = trial["upper"] - trial["drop"]
            upper = trial["error"] + (lost * dense["error"] / 100 if regression else lost)
        points.append(
            Point(
                dense["costs"][measure] / max(trial["costs"][measure], 1e-12),
                trial["error"],
                upper,
                str(trial["number"]),
                trial["met"] if found.get("met") is not None else None,
                trial["number"] == found.get("chosen"),
            )
        )
    what = f"validation {'RMSE' if regression else 'error (%)'}"
    return Curve(str(results.get("name") or ""), measure, smaller(measure), what, dense["error"], points)


def run_point(results: Mapping[str, Any], measure: str) -> tuple[Point, float] | None:
    """A finished run by its test error, and the dense model's error; None if one of them or the size is missing."""
    sides = [(results.get(side) or {}) for side in ("dense", "sparse")]
    errors: list[Any] = [(side.get("metrics") or {}).get("error", (side.get("metrics") or {}).get("rmse")) for side in sides]
    ratio = (results.get("compression") or {}).get(measure)
    if isinstance(ratio, Mapping):
        ratio = ratio.get(f"batch_{LATENCY_BATCH}")
    before, after = errors
    if ratio is None or before is None or after is None:
        return None
    changes = (results.get("changes") or {}).get("error") or (results.get("changes") or {}).get("rmse")
    upper = None if not changes or changes.get("high") is None else before + changes["high"]
    return Point(float(ratio), float(after), upper, str(results.get("name") or "")), float(before)


def of_a_run(measure: str) -> str:
    """What comes after a finished run's factor: a report has latencies at several batch sizes."""
    return smaller(measure) + (f" (batch {LATENCY_BATCH})" if measure == "latency" else "")


def plot_curves(ax: Axes, curves: Sequence[Curve], colour: Callable[[int], str], quiet: str) -> None:
    """Plot each curve in its own color: trials with upper bounds on their errors, and a line through the best of each size."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    from svdcompress.report._draw import short

    for k, curve in enumerate(curves):
        ax.axhline(curve.dense, color=quiet, lw=0.8, ls=(0, (4, 3)))
        best = _front(curve.points)
        ax.plot([p.ratio for p in best], [p.error for p in best], color=colour(k), lw=1.2, alpha=0.6)
        for point in curve.points:
            if point.upper is not None:
                ax.plot([point.ratio] * 2, [point.error, point.upper], color=colour(k), lw=0.8, alpha=0.5)
            filled = point.met is not False
            ax.plot(
                point.ratio, point.error, "o", ms=7 if point.chosen else 4, color=colour(k), mfc=colour(k) if filled else "none"
            )
        if curve.points and len(curves) > 1:
            last = max(curve.points, key=lambda p: p.ratio)
            ax.annotate(curve.name, (last.ratio, last.error), textcoords="offset points", xytext=(5, 4), fontsize=8)
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{short(value, place)}x"))
    ax.xaxis.set_minor_locator(NullLocator())
    if curves:
        ax.set_xlabel(f"times {curves[0].unit}")
        ax.set_ylabel(curves[0].what)


def _front(points: Sequence[Point]) -> list[Point]:
    found: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.ratio, p.error)):
        if not found or point.error < found[-1].error:
            found.append(point)
    return found


def search(results: Mapping[str, Any], folder: Path | None) -> str:
    """The section of a search: a plot, and a table of its trials."""
    curve = search_curve(results)
    if curve is None:
        return ""
    from svdcompress.report._draw import QUIET, Drawing, series

    with Drawing(5.2, 2.6) as drawing:
        plot_curves(drawing.ax, [curve], series, QUIET)
        texts = [f"trial {p.name}: {p.ratio:.3g}x, {curve.what} {p.error:.3g}" for p in curve.points]
        drawing.points(drawing.ax, [(p.ratio, p.error) for p in curve.points], texts)
    found, unit = results["search"], "% of the RMSE" if "RMSE" in curve.what else " points"
    asked = ", ".join(
        text
        for text in (
            f"goal {found['goal']}" if found.get("goal") else "",
            f"at most {found['max_drop']:g}{unit} lost" if found.get("max_drop") is not None else "",
            f"an error of at most {found['max_error']:g}" if found.get("max_error") is not None else "",
        )
        if text
    )
    too_much = "The large one was chosen" if found.get("met") is None else "Open points lose too much; the large one was chosen"
    caption = (
        f"Asked for: {escape(asked)}. Each point is a model that was pruned and fine-tuned; the line above it is the upper "
        f"bound on its error, one-sided at {100 * found['confidence']:.0f}%, paired with the dense model (dashed) on "
        f"{counted(found['validation_examples'], 'validation example')}. {too_much}."
        f"{_decided(found)}{_measured(found.get('measured') or {})}{_trained(found.get('epochs'))}"
    )
    label = f"{curve.what} of each trial by how many times {curve.unit}"
    figure = html.figure(drawing.svg, "", caption, label).replace("<figure>", '<figure class="one">', 1)
    above = results.get("warnings") or ()  # the page begins with these
    lines = "".join(f'<p class="warning">{escape(line)}</p>' for line in found.get("notes") or () if line not in above)
    return f'{lines}<div class="figures">{figure}</div>{_table(found, curve)}'


def _by_nll(found: Mapping[str, Any]) -> bool:
    """Whether trials were judged by the drop estimated from their NLL, since there were too few examples to count errors."""
    return any(trial.get("estimate") is not None and trial.get("at_most") is not None for trial in found["trials"])


def _decided(found: Mapping[str, Any]) -> str:
    """A sentence on what decided between trials if that was not the upper bound; "" if it was."""
    few = f"{found['validation_examples']:,} examples are too few for counted errors to tell"
    if _by_nll(found):
        what = "which trials are within the budget" if found.get("met") is not None else "which trial lost least"
        bound = "the bound on " if found.get("met") is not None else ""
        return f" {few}: {bound}the drop estimated from the NLL (by the NLL) decided {what}, not the line."
    bounded = [trial for trial in found["trials"] if trial.get("allowed") is not None and trial["met"]]
    over = [trial for trial in bounded if trial["upper"] is None or trial["upper"] > trial["allowed"] + 1e-6]
    if found.get("met") is not None and over:
        return f" {few}: the measured drop alone decided, not the line."
    return ""


def _measured(how: Mapping[str, Any]) -> str:
    """A sentence on how latencies were measured; "" for other measures."""
    if "command" in how:
        return f" Latencies were reported by {escape(how['command'])}."
    if "batches" not in how:
        return ""
    batches, threads = how["batches"], how["threads"]
    each = f"batch {batches[0]}" if len(batches) == 1 else f"the geometric mean of batch {' and '.join(map(str, batches))}"
    machine = escape(str(how.get("machine")))
    clock = f" by {how['clock']}" if how.get("clock") else ""
    return f" Latencies are for {each}{clock}, in onnxruntime with {threads} thread{'s' * (threads != 1)} on {machine}."


def _trained(epochs: Mapping[str, Any] | None) -> str:
    """A sentence on how many epochs the search trained; "" for reports of earlier versions."""
    if not epochs or not epochs["one_run"]:
        return ""
    times = epochs["search"] / epochs["one_run"]
    return f" The path and all trials trained {epochs['search']:,} epochs, {times:.2g} times those of one run."


def _table(found: Mapping[str, Any], curve: Curve) -> str:
    rows = []
    mixed, by_nll = any(trial.get("mixture") for trial in found["trials"]), _by_nll(found)
    budget = found.get("met") is not None
    for trial, point in zip(found["trials"], curve.points, strict=True):
        kept = {True: "yes", False: "no", None: ""}[point.met]
        numbers = [f"{point.ratio:.3g}x", f"{trial['error']:.3g}", f"{trial['drop']:+.2f}", _signed(trial["upper"])]
        if by_nll:
            numbers += [_signed(trial.get("estimate")), _signed(trial.get("at_most"))]
        on = "" if trial.get("continues") is None else f", {trial['continues']} recovered further"
        cells = [
            f"<td>{trial['number']}{on}{' (chosen)' if point.chosen else ''}</td>",
            *(f'<td class="number">{text}</td>' for text in numbers),
            *([f"<td>{kept}</td>"] if budget else []),
            f'<td class="number">{trial["beta"]:.3g}</td><td class="number">{trial["seconds"]:.0f} s</td>',
            *([f"<td>{escape((trial.get('mixture') or {}).get('chosen', ''))}</td>"] if mixed else []),
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    measured = [curve.unit, curve.what, "lost", "at most", *(["by the NLL", "at most, by it"] if by_nll else [])]
    names = ["trial", *measured, *(["within budget"] if budget else []), "beta", "time", *(["mixture"] if mixed else [])]
    numbers = [*measured, "beta", "time"]
    head = "".join(f'<th scope="col"{" class=number" * (name in numbers)}>{escape(name)}</th>' for name in names)
    return html.scrolled(f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>", ", ".join(names))


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.2f}"


def trials_table(results: Mapping[str, Any], width: int = 10) -> Table | None:
    """The table for the terminal: one line per trial from large to small, the error as a bar; None without a search.

    "3, of 1" means that trial 3 recovered trial 1 further. If the NLL decided, its upper bound on the error is shown as well.
    """
    curve = search_curve(results)
    if curve is None:
        return None
    view = Table(show_edge=False, pad_edge=False, title="Trials", title_justify="left", title_style="bold")
    view.add_column("trial", no_wrap=True)
    for heading in (curve.unit, curve.what, "at most"):
        view.add_column(heading, justify="right")
    by_nll = _by_nll(results["search"])
    if by_nll:
        view.add_column("by the NLL at most", justify="right")
        view.caption = f"{_decided(results['search']).strip().removesuffix(', not the line.')}"
        view.caption_justify = "left"
    view.add_column(f"dense {curve.dense:.3g}", no_wrap=True)
    top = max(max(p.upper or p.error for p in curve.points), curve.dense, 1e-12)
    pairs = zip(results["search"]["trials"], curve.points, strict=True)
    for trial, point in sorted(pairs, key=lambda pair: pair[1].ratio):
        number = f"{trial['number']}" + ("" if trial.get("continues") is None else f", of {trial['continues']}")
        bar = "█" * max(1, round(width * point.error / top))
        style = "bold green" if point.chosen else "" if point.met is not False else "dim"
        mark = "  chosen" if point.chosen else "" if point.met is not False else "  loses too much"
        upper = "" if point.upper is None else f"{point.upper:.3g}"
        most = trial.get("at_most")
        told = [] if not by_nll else ["" if most is None else f"{curve.dense + most:.3g}"]
        view.add_row(number, f"{point.ratio:.3g}x", f"{point.error:.3g}", upper, *told, bar + mark, style=style)
    return view


def plot_tradeoff(*runs: Any, measure: str | None = None, ax: Axes | None = None) -> Figure:
    """Error against size, as a matplotlib figure.

    runs: folders of runs, results of `sparsify`, or dicts as in `report.json`. A single run with a search shows its trials by
    validation error; otherwise each run is a point by its test error.
    measure: parameters, macs, latency, bytes or nonzero (None: what the search made small, else nonzero). ax: where to plot.
    Raises UsageError if no run has the figures needed.

    Example:
        >>> svdc.plot_tradeoff("runs/digits").savefig("tradeoff.png")
    """
    from matplotlib.figure import Figure

    found = [run.results if hasattr(run, "results") else run if isinstance(run, Mapping) else load(Path(run)) for run in runs]
    curves: list[Curve] = []
    if len(found) == 1 and (curve := search_curve(found[0])) is not None and measure in (None, curve.measure):
        curves = [curve]
    else:
        wanted = {(results.get("search") or {}).get("objective") for results in found}
        name = measure or (wanted.pop() if len(wanted) == 1 else None) or "nonzero"  # one axis for all
        for results in found:
            if (pair := run_point(results, name)) is not None:
                what = "test RMSE" if results.get("task") in ("regression", "gaussian") else "test error (%)"
                curves.append(Curve(pair[0].name, name, of_a_run(name), what, pair[1], [pair[0]]))
    if len({curve.what for curve in curves}) > 1:
        raise UsageError("plot_tradeoff: runs with errors and runs with RMSEs have no axis in common; plot them separately")
    if not curves:
        raise UsageError("plot_tradeoff: none of the runs has a report with errors and sizes")
    if ax is None:
        ax = Figure(figsize=(5.6, 3.4), layout="constrained").subplots()
    plot_curves(ax, curves, lambda k: f"C{k}", "0.5")
    return ax.figure  # type: ignore[return-value]
