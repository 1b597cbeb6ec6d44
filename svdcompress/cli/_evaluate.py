"""`svdc evaluate`: compares a run's model with others on the same data, as a table, pictures and a section of the report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from svdcompress.cli._common import (
    Debug,
    Device,
    Json,
    ModelAgain,
    Run,
    Samples,
    TrustCode,
    err_console,
    made_folder,
    on_device,
    opened_run,
    out_console,
    print_json,
    short_of_memory,
)
from svdcompress.errors import DataError

BATCH = 500
OUTSIDE = 2000
"""Most images that are taken from other data."""

HEADINGS = {"error": "error %", "nll": "NLL", "ece": "ECE", "brier": "Brier", "rmse": "RMSE", "r2": "R2"}
SCORES = {"softmax": "1 - confidence", "mutual_information": "mutual information"}
LOWER = ("error", "nll", "ece", "brier", "rmse")
"""Figures of which less is better; the others are not colored."""


def evaluate(
    run: Run,
    samples: Samples = 100,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    members: Annotated[
        int,
        typer.Option(help="Dense networks for a deep ensemble, trained with the run's recipe; kept in RUN/baselines.", min=0),
    ] = 0,
    shift: Annotated[
        bool,
        typer.Option("--shift", help="Also test corrupted data, at several levels: blur, noise, missing values, masked words."),
    ] = False,
    magnitude: Annotated[
        bool | None,
        typer.Option(
            "--magnitude/--no-magnitude",
            help="Magnitude pruning to as many weights; automatic if training it takes a minute or less.",
        ),
    ] = None,
    laplace: Annotated[
        bool | None,
        typer.Option(
            "--laplace/--no-laplace", help="Laplace on the dense last layer; automatic if laplace-torch is installed."
        ),
    ] = None,
    outside: Annotated[
        list[str],
        typer.Option(help="Images of another kind, named as for --data: cifar10:DIR, mnist:DIR, ... Can be repeated."),
    ] = [],  # noqa: B006
    out: Annotated[Path | None, typer.Option(help="Folder for evaluation.json and pictures (RUN/evaluation).")] = None,
    batch: Annotated[int, typer.Option(help="Inputs per pass; fewer take less memory.", min=1)] = BATCH,
    device: Device = "auto",
    model: ModelAgain = None,
    trust_code: TrustCode = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare uncertainties on the test data: dense, calibrated, MC dropout, other baselines, the sparse model with samples.

    Also measures how well each detects inputs unlike the data: the test inputs with their numbers (or words) shuffled, uniform
    noise, and with --outside images from other data, converted to gray or color and resized as needed.

    Differences from the dense model with a temperature have 95% intervals; green and red mark those that are significant.
    """
    from svdcompress import report, uncertainty
    from svdcompress.evaluation import Wanted, evaluate_run
    from svdcompress.train import Bars

    place = on_device(device)
    opened = opened_run(run, trust_code, model)
    folder = made_folder(out or run / "evaluation")  # first, as all else takes time
    wanted = Wanted(samples, seed, members, magnitude, laplace, shift, str(place), batch)
    console = err_console()
    others = _others(outside, opened.data, batch)
    advice = f"lower --batch (here {batch}), or use another --device"
    with Bars(console, quiet=json) as bars, short_of_memory(advice):
        say = lambda line: None if json else console.print(line, style="dim", markup=False, highlight=False)  # noqa: E731
        result = evaluate_run(opened, wanted, elsewhere=others, bars=bars, say=say)
    pictures = uncertainty.plot(result, folder)
    report.write_json(folder / "evaluation.json", result)
    written = [path.name for path in pictures]
    if out is None and (run / "report.html").is_file():  # now with a section on this
        report.write_text(run / "report.html", report.render(opened.results, run))
        written.append("../report.html")
    if json:
        print_json(result)
        return
    console = out_console()
    console.print(_comparison(result))
    _tell_differences(console, result)
    if any(row["ood"] for row in result["contenders"]):
        console.print("\nAUROC: how well a score tells the test inputs from others (0.5: not at all)\n")
        console.print(_elsewhere(result))
    if result.get("shift"):
        kinds = ", ".join(result["shift"]["curves"])
        console.print(f"\nUnder shift: {kinds}; means over levels 1 to 5, of {result['shift']['inputs']:,} inputs\n")
        console.print(_shifted(result))
    console.print(f"\nwritten to {folder}/: evaluation.json, {', '.join(written)}", markup=False, highlight=False)


def _comparison(result: Mapping[str, Any]) -> Table:
    rows = result["contenders"]
    names = list(dict.fromkeys(name for row in rows for name, value in row["metrics"].items() if value is not None))
    answered = [entry["loss"] for entry in (rows[0]["selective"] or {}).get("answered", [])]
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("")
    shares = [f"answered at {100 * (1 - loss):g}%" for loss in answered]
    for heading in [*(str(HEADINGS.get(name, name)) for name in names), *shares]:
        table.add_column(heading, justify="right")
    for row in rows:
        figures = [_coloured(row["metrics"].get(name), name, row.get("difference")) for name in names]
        shares = [f"{100 * entry['share']:.1f}%" for entry in (row["selective"] or {}).get("answered", [])]
        table.add_row(row["name"], *figures, *shares)
    return table


def _coloured(value: float | None, name: str, difference: Mapping[str, Any] | None) -> str:
    """A figure, in color if it is significantly better or worse than the reference's."""
    from svdcompress.uncertainty import significant

    if value is None:
        return ""
    sign = significant(difference[name]) if difference and name in LOWER else 0
    text = f"{value:.4g}"
    return f"[green]{text}[/]" if sign < 0 else f"[red]{text}[/]" if sign > 0 else text


def _tell_differences(console: Any, result: Mapping[str, Any]) -> None:
    """Print each figure minus the reference's, with its interval."""
    rows = [row for row in result["contenders"] if row["name"] != result["reference"]]
    if not rows:
        return
    console.print(
        f"\ndifference from {result['reference']}, with 95% intervals (bootstrap over the test inputs)\n", highlight=False
    )
    names = list(rows[0]["difference"])
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("")
    for name in names:
        table.add_column(str(HEADINGS.get(name, name)), justify="right")
    for row in rows:
        table.add_row(row["name"], *[_difference(name, row["difference"][name]) for name in names])
    console.print(table)


def _difference(name: str, found: Mapping[str, float]) -> str:
    from svdcompress.uncertainty import significant

    if not any(found.values()):
        return "0"
    text = f"{found['value']:+.3g} ({found['low']:+.2g} to {found['high']:+.2g})"
    sign = significant(found) if name in LOWER else 0
    return f"[green]{text}[/]" if sign < 0 else f"[red]{text}[/]" if sign > 0 else text


def _shifted(result: Mapping[str, Any]) -> Table:
    means = result["shift"]["mean"]
    names = [name for name in next(iter(means.values())) if name != "difference"]
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("")
    for name in names:
        table.add_column(str(HEADINGS.get(name, name)), justify="right")
    for who, row in means.items():
        table.add_row(who, *[_coloured(row[name], name, row["difference"]) for name in names])
    return table


def _elsewhere(result: dict[str, Any]) -> Table:
    """A table of how well each contender's scores tell the test data from other data."""
    rows = [row for row in result["contenders"] if row["ood"]]
    sets = list(dict.fromkeys(name for row in rows for name in row["ood"]))
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("")
    table.add_column("score")
    for name in sets:
        table.add_column(Text(name), justify="right")
    for row in rows:
        for place, score in enumerate(row["ood"][sets[0]]):
            figures = [f"{row['ood'][name][score]:.4f}" for name in sets]
            table.add_row("" if place else row["name"], SCORES.get(score, score), *figures)
    return table


def _others(names: list[str], data: Any, batch: int) -> dict[str, Any]:
    """Batches of the test images of other data, by the data's name."""
    import torch

    from svdcompress import uncertainty
    from svdcompress.recipe import DataSection
    from svdcompress.sources import open_data

    found: dict[str, Any] = {}
    for name in names:
        try:
            test = open_data(DataSection(name=name), "classification").test
            if len(test) > OUTSIDE:  # spread over all of it, since files are often sorted by class
                test = test.subset(torch.linspace(0, len(test) - 1, OUTSIDE).long())
            batches = lambda test=test: test.batches(batch)  # noqa: E731
            # the run is open already, so its transforms are trusted
            images = uncertainty.images_like(batches, data.preprocessing, OUTSIDE, trust_code=True)
            next(iter(images()))
        except DataError as error:
            raise DataError(f"--outside {name}: {error}") from error
        kind = name.partition(":")[0]
        found[kind if kind not in found else name] = images
    return found
