"""The table that is printed at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from svdcompress.report._rows import chance, duration, rounding, rows, size
from svdcompress.report._small import has_zeros, small_files
from svdcompress.report._tradeoff import trials_table

FILES = {
    "recipe.yaml": "the resolved recipe",
    "dense.safetensors": "the dense model",
    "model.safetensors": "the sparse variational model",
    "validation.safetensors": "calibration from validation data",
    "dense.onnx": "the dense model, for comparison",
    "model.onnx": "deterministic and pruned",
    "model_compact.onnx": "the same without its zeros",
    "model_int8.onnx": "the same in integers",
    "model_int4.onnx": "the same, its weights in four or eight bits",
    "model_float16.onnx": "the same, stored in two bytes per number",
    "model_mc.onnx": "predictions with uncertainties",
    "model_mc_compact.onnx": "the same without its zeros",
    "report.json": "all figures",
    "report.html": "all figures and plots: open it in a browser",
}
"""The files of a run's folder that a person looks for, and what each is."""

NO_ZEROS = dict.fromkeys(("model_compact.onnx", "model_mc_compact.onnx"), "the same with shorter names")
"""Descriptions of the compact files for a model that has no zeros to leave out."""


def table(results: Mapping[str, Any], console: Console | None = None, out_dir: str | Path | None = None) -> None:
    """Print dense vs. sparse, then those of a run's files that `out_dir` holds."""
    console = console or Console()
    name = Text(str(results.get("name") or ""))
    view = Table(title=name, title_justify="left", title_style="bold", show_edge=False, pad_edge=False)
    view.add_column("")
    for heading in ("dense", "sparse"):
        view.add_column(heading, justify="right")
    view.add_column("change")
    for row in rows(results):
        colour = {True: "green", False: "yellow", None: ""}[row.better]
        view.add_row(row.label, row.dense, Text(row.sparse, style="bold"), Text(row.change, style=colour))
    console.print(view if view.row_count else Text(name.plain, style="bold"))
    if (trials := trials_table(results)) is not None:
        console.print()
        console.print(trials)
    for text in filter(None, (chance(results), rounding(results), *small_files(results))):
        console.print(f"\n{text}", markup=False, highlight=False)
    if results.get("seconds"):
        console.print(f"\n{duration(sum(results['seconds'].values()))} on {results.get('device', 'an unnamed device')}")
    for warning in results.get("warnings") or ():
        console.print(Text(f"warning: {warning}", style="yellow"))
    if text := (results.get("uncertainty_of") or {}).get("text"):
        console.print(Text(f"note: {text}", style="dim"))
    if out_dir is not None:
        pictures = {str(picture["file"]): str(picture.get("title", "")) for picture in results.get("pictures") or ()}
        names = FILES if has_zeros(results) else {**FILES, **NO_ZEROS}
        _files(console, Path(out_dir), {**names, **pictures})


def _files(console: Console, folder: Path, files: Mapping[str, str]) -> None:
    console.print(f"\nwritten to {folder}/", markup=False, highlight=False)
    view = Table.grid(padding=(0, 2))
    view.add_column()
    view.add_column(justify="right")
    view.add_column()
    for name, what in files.items():
        if (folder / name).is_file():
            view.add_row(Text(f"  {name}"), size((folder / name).stat().st_size), Text(what))
    console.print(view)
