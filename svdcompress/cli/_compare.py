"""`compare` and `sweep`: several runs in one table and one picture."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from svdcompress.cli import _settings as s
from svdcompress.cli._common import Debug, Device, Json, check_file, err_console, made_folder, out_console, print_json
from svdcompress.errors import ExportError, Interrupted, SvdcError, UsageError
from svdcompress.recipe import MEASURES

LONGEST = 200
"""Most bytes of the name of a combination's folder; file systems take 255."""

SHOWN = 6
"""Most settings that an error about a folder's run names."""

Picture = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a plot of error vs. size: .png, .svg or .pdf.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write an HTML page with all of it.")]
Measure = Annotated[str, typer.Option(metavar="MEASURE", help=f"Size in the plot: {', '.join(MEASURES)}. The table has all.")]


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of finished runs.")],
    picture: Picture = None,
    html: Html = None,
    measure: Measure = "nonzero",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare finished runs in one table: test error of the dense and the sparse model, and how much smaller it is.

    Example: svdc compare runs/a runs/b --html compare.html
    """
    from svdcompress import report

    _check_measure(measure)
    _check_files(picture, html)
    _show([report.load(run) for run in runs], runs, picture, html, measure, json)


@s.with_settings
def sweep(
    settings: s.Settings,
    grid: Annotated[
        list[str],
        typer.Option(metavar="FIELD=A,B,...", help="Values for a field of the recipe; repeat for all combinations."),
    ],
    out: Annotated[Path, typer.Option(help="The folder for the runs, one subfolder per combination.")],
    seed: Annotated[int | None, typer.Option(help="Random seed (0).")] = None,
    device: Device = None,
    picture: Picture = None,
    html: Html = None,
    measure: Measure = "nonzero",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Run a recipe with all combinations of some settings, then compare the runs. Run it again to continue a stopped sweep.

    If a combination fails, the others still run; the exit code is then that of the first one that failed.

    Example: svdc sweep digits --grid train.beta.final=0.1,0.3,1 --grid convert.share=weight,input --out runs/grid
    """
    from svdcompress import pipeline, report
    from svdcompress.recipe import load_recipe

    _check_measure(measure)
    fields = [_values(text) for text in grid]
    if not fields:
        raise UsageError("--grid is missing: name a field and its values, as in --grid train.beta.final=0.1,0.3,1")
    names = [name for name, _ in fields]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"--grid {twice[0]}: named twice; write --grid {twice[0]}=A,B with all values")
    if "out" in names:
        raise UsageError("--grid out: each combination has a folder of its own in --out; other fields can vary")
    base = settings.resolved(seed=seed, device=device)
    if base.experiment is not None:
        raise UsageError("sweep: an experiment has no size figures; name a recipe with a model and data")
    combinations = [list(zip([name for name, _ in fields], values, strict=True)) for values in
                    itertools.product(*(values for _, values in fields))]  # fmt: skip
    console = err_console()
    texts = [[f"{name}={value}" for name, value in pairs] for pairs in combinations]
    recipes = [_with(settings, text, seed, device) for text in texts]
    planned = [(text, recipe, out / name) for text, recipe, name in zip(texts, recipes, _folder_names(texts), strict=True)]
    made_folder(out)
    _check_files(picture, html)  # which may be in it
    for _, recipe, folder in planned:  # before the first run: a folder that does not fit may be hours away
        if (folder / "recipe.yaml").is_file():
            _check_same(load_recipe(folder / "recipe.yaml"), recipe, folder)
    failed: dict[Path, SvdcError] = {}
    for text, recipe, folder in planned:
        resume = (folder / "recipe.yaml").is_file()
        if resume and (folder / "report.json").is_file() and not (folder / "state").exists():
            console.print(f"{folder}: finished already", markup=False, highlight=False)
            if recipe.export.onnx and not (folder / "model.onnx").is_file():
                failed[folder] = ExportError("finished without model.onnx, and its report says why; svdc export tries again")
            continue
        console.print(", ".join(text), style="bold", markup=False, highlight=False)
        try:
            pipeline.run(recipe, folder, resume=resume, console=console, quiet=json)
        except Interrupted:
            raise
        except SvdcError as error:  # the others may still succeed
            failed[folder] = error
            console.print(f"failed: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
    folders = [folder for *_, folder in planned if folder not in failed or (folder / "report.json").is_file()]
    if folders:
        _show([report.load(folder) for folder in folders], folders, picture, html, measure, json)
    if failed:
        first = next(iter(failed.values()))
        told = "; ".join(f"{folder}: {error}" for folder, error in failed.items())
        raise type(first)(f"sweep: {len(failed)} of {len(planned)} combinations failed. {told}") from first


def _folder_names(texts: Sequence[Sequence[str]]) -> list[str]:
    """A name for each combination's folder: its settings as a safe file name, with a number if several come out the same, as 0*
    and 0? do."""
    names: list[str] = []
    for text in texts:
        name = plain = _short(s.safe_name("_".join(text)))
        number = 1
        while name in names:
            number += 1
            name = f"{plain}-{number}"
        names.append(name)
    return names


def _short(name: str) -> str:
    """A name that file systems take: of a long one the beginning, and a checksum of the whole."""
    content = name.encode()
    if len(content) <= LONGEST:
        return name
    return f"{content[: LONGEST - 9].decode(errors='ignore')}-{zlib.crc32(content):08x}"


def _check_same(stored: Any, given: Any, folder: Path) -> None:
    """Raises UsageError, naming the differences, if a folder's run has other settings than those given now."""
    from svdcompress.pipeline import changed_fields, value_of

    found = [
        f"{name} is {value_of(stored, name)} there and {value_of(given, name)} here"
        for name in changed_fields(stored, given, but_for=("out",))
    ]
    if found:
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise UsageError(
            f"--out: {folder} holds a run with other settings than these: {'; '.join(found[:SHOWN])}{more}. Give the "
            "settings of that run, or another --out, or move the folder away to run it again"
        )


def _with(settings: s.Settings, text: list[str], seed: int | None, device: str | None) -> Any:
    from dataclasses import replace

    return replace(settings, set_=[*settings.set_, *text]).resolved(seed=seed, device=device)


def _values(text: str) -> tuple[str, list[str]]:
    """A field and its values; commas inside brackets do not separate values."""
    field, equals, rest = text.partition("=")
    values, depth, start = [], 0, 0
    for place, letter in enumerate(rest):
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and depth == 0:
            values.append(rest[start:place].strip())
            start = place + 1
    values.append(rest[start:].strip())
    if not equals or not field.strip() or not all(values):
        raise UsageError(f"--grid {text}: write it as FIELD=A,B,..., such as train.beta.final=0.1,0.3,1")
    return field.strip(), values


def _check_files(picture: Path | None, html: Path | None) -> None:
    """Check, before the work, the files that are written at its end. Raises OutputError, UsageError."""
    if html is not None:
        check_file(html, "--html")
    if picture is None:
        return
    from matplotlib.backend_bases import FigureCanvasBase

    check_file(picture, "--picture")
    kinds = FigureCanvasBase.get_supported_filetypes()
    kind = picture.suffix.lower().removeprefix(".")
    if kind and kind not in kinds:
        raise UsageError(f"--picture: {picture}: pictures are .png, .svg or .pdf")


def _check_measure(measure: str) -> None:
    if measure not in MEASURES:
        raise UsageError(f"--measure: {measure!r} is not one of {', '.join(MEASURES)}")


def _show(
    found: Sequence[dict[str, Any]],
    folders: Sequence[Path],
    picture: Path | None,
    html: Path | None,
    measure: str,
    json: bool,
) -> None:
    names = _names(folders)
    found = [{**results, "name": name} for results, name in zip(found, names, strict=True)]  # folders may have been renamed
    rows = [_row(results, folder) for results, folder in zip(found, folders, strict=True)]
    if told := _other_data(folders):
        err_console().print(f"warning: {told}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    if html is not None:
        from svdcompress import report

        report.write_text(html, report.render_comparison(list(zip(names, found, strict=True)), measure))
    refused: SvdcError | None = None
    if picture is not None:
        from svdcompress import report

        try:
            report.plot_tradeoff(*found, measure=measure).savefig(picture, dpi=150)
        except UsageError as error:  # the table and the page show what has no axis in common
            refused, picture = UsageError(f"--picture: {str(error).removeprefix('plot_tradeoff: ')}"), None
    _print(rows, {"picture": picture, "page": html}, json)
    if refused is not None:
        raise refused


def _print(rows: Sequence[dict[str, Any]], files: dict[str, Path | None], json: bool) -> None:
    """Print the table, and the files that were written beside it."""
    if json:
        print_json(rows)
        return
    console = out_console()
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("run", overflow="fold")
    batches = sorted({key for row in rows for key in row if key.startswith("batch_")}, key=lambda key: int(key[6:]))
    columns = {**COLUMNS, **{key: key.replace("_", " ") for key in batches}}
    for heading in columns.values():
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(Text(str(row["run"])), *(_cell(row, key) for key in columns))
    console.print(table)
    unit = {row["metric"] for row in rows}
    console.print(
        f"\n{' and '.join(sorted(unit))} on test data; sizes and latencies are factors relative to the dense model",
        highlight=False,
    )
    for what, file in files.items():
        if file is not None:
            console.print(f"{what}: {file}", markup=False, highlight=False)


def _names(folders: Sequence[Path]) -> list[str]:
    """A name for each run: that of its folder, or the folder as given if several have the same name."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def _other_data(folders: Sequence[Path]) -> str:
    """What to tell if runs were tested on different data; "" if on the same, as far as their checkpoints tell."""
    from svdcompress.checkpoint import read_manifest

    tested: list[tuple[Path, int, int | None]] = []  # inputs may differ in their preparation
    for folder in folders:
        try:
            test = read_manifest(folder / "model.safetensors")["extra"]["data"]["test"]
            tested.append((folder, test["examples"], test.get("targets")))
        except (SvdcError, KeyError, TypeError):  # an older run, or one without a checkpoint
            continue
    for folder, examples, targets in tested[1:]:
        first, as_many, of_it = tested[0]
        if examples != as_many or (None not in (targets, of_it) and targets != of_it):
            told = "were tested on different data: compare the changes of each, not their errors with each other"
            return f"{first} and {folder} {told}"
    return ""


COLUMNS = {"dense": "dense", "sparse": "sparse", "change": "change (95%)", "nonzero": "non-zeros"}
COLUMNS |= {"parameters": "parameters", "macs": "MACs", "bytes": "bytes"}
"""Headings of the table, by the keys of a row; those of latencies follow."""


def _row(results: dict[str, Any], folder: Path) -> dict[str, Any]:
    sides = [((results.get(side) or {}).get("metrics") or {}) for side in ("dense", "sparse")]
    metric = "error" if "error" in sides[1] else "rmse"
    ratios = results.get("compression") or {}
    latency = ratios.get("latency") or {}
    change = (results.get("changes") or {}).get(metric) or {}
    return {
        "run": str(folder),
        "metric": "error in %" if metric == "error" else "RMSE",
        "dense": sides[0].get(metric),
        "sparse": sides[1].get(metric),
        "change": [change["low"], change["high"]] if change else None,
        **{key: ratios.get(key) for key in ("nonzero", "parameters", "macs", "bytes")},
        **{key: latency.get(key) for key in dict.fromkeys(("batch_1", "batch_128", *latency))},
    }


def _cell(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if value is None:
        return "–"
    if key == "change":
        figure = "+.2f" if row["metric"] != "RMSE" else "+.3g"
        return f"{value[0]:{figure}} to {value[1]:{figure}}"
    return f"{value:.3g}" if key in ("dense", "sparse") else f"{value:.3g}x"
