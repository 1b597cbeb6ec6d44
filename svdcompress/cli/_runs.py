"""Commands that take a finished run's folder: predict, export, report."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from svdcompress.cli._common import (
    MOST_SAMPLES,
    Debug,
    Device,
    Json,
    ModelAgain,
    Run,
    TrustCode,
    check_file,
    err_console,
    on_device,
    opened_run,
    out_console,
    print_json,
)
from svdcompress.errors import OutputError, UsageError, counted, shortened

BY_MEAN = (
    "predicted by the mean: on the run's validation data draws were no better, and cost more. --samples 100 draws anyway "
    "(mutual information needs draws)"
)
PRECISIONS = ("none", "auto", "int8", "int4", "float16")


def export(
    run: Run,
    out: Annotated[Path, typer.Option(help="The file to write.")],
    monte_carlo: Annotated[bool, typer.Option("--monte-carlo", help="With `samples` as an input, and uncertainties.")] = False,
    noise: Annotated[
        str, typer.Option(help="random; seed: a seed has to be given; or input: the noise is an input.")
    ] = "random",
    opset: Annotated[int, typer.Option(help="ONNX opset, 18 to 23.")] = 20,
    precision: Annotated[
        str,
        typer.Option(metavar="FORM", help="none; int8; int4 or float16 (stored so, run in float32); auto: int8 where it can."),
    ] = "none",
    compact: Annotated[bool, typer.Option("--compact", help="Without zeros; they come back as the file is loaded.")] = False,
    dynamic_axis: Annotated[
        list[str] | None,
        typer.Option(metavar="INPUT:DIMENSION=NAME", help="A dimension whose size stays open: input:2=height. Several times."),
    ] = None,
    model: ModelAgain = None,
    trust_code: TrustCode = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Export a run's model to ONNX again, in another form; checked against PyTorch."""
    from svdcompress.export import FEW_BITS_OPSET, export_onnx
    from svdcompress.likelihoods import own_likelihood
    from svdcompress.pipeline import (
        as_open_as_can_be,
        baked,
        chosen_by_time,
        export_model,
        feed,
        file_metadata,
        promised,
        reduced,
        sets_of,
    )
    from svdcompress.sources import example_inputs

    if precision not in PRECISIONS:
        raise UsageError(f"--precision: {precision!r} is unknown; one of {', '.join(PRECISIONS)}")
    if noise != "random" and not monte_carlo:
        raise UsageError("--noise needs --monte-carlo: a deterministic file draws nothing")
    if monte_carlo and precision in ("int8", "int4", "auto"):
        raise UsageError(
            f"--precision {precision}: a Monte-Carlo file stays in floating point, as integers distort what its draws say "
            "about certainty; use float16, in which it can be stored"
        )
    opened = opened_run(run, trust_code, model)
    if out.exists():
        raise OutputError(f"--out: {out} exists already; name another file")
    check_file(out)
    recipe, inputs = opened.recipe, example_inputs(opened.data_as_read.train, 2)
    axes = _open_axes(dynamic_axis) if dynamic_axis else recipe.export.dynamic_axes
    results = opened.results if (run / "report.json").is_file() else {}
    units = baked(opened.preprocessing, recipe.task, opened.dim)
    metadata = file_metadata(results, units.preprocessing, opened.classes, recipe.task, draws=monte_carlo)
    if monte_carlo:
        small = units.drawn(opened.model)
        own = own_likelihood(small, recipe.task, opened.dim, opened.tau)
        more: dict[str, Any] = {"monte_carlo": monte_carlo, "task": own, "noise": noise, "target_scale": units.target}
        more["further"] = sets_of(results, "samples", own) if recipe.export.sets else None
        metadata |= promised(results, "samples")
        more |= {"opset": opset, "metadata": metadata}

        def write(dims: Any) -> Any:
            return export_onnx(small, out, units.inputs(inputs), dynamic_axes=dims, **more)

        def warn(line: str) -> None:
            err_console().print(f"warning: {line}", markup=False, highlight=False)

        written = write(axes) if dynamic_axis else as_open_as_can_be(write, axes, warn)
    else:
        batches = partial(feed, opened.data_as_read)
        timed = chosen_by_time(recipe)
        task, dim = recipe.task, opened.dim
        sets = (lambda model: sets_of(results, "mean", own_likelihood(model, task, dim))) if recipe.export.sets else None
        metadata |= promised(results, "mean")
        more = {"opset": opset, "metadata": metadata, "dynamic_axes": axes, "timed": timed, "units": units, "sets": sets}
        written, _ = export_model(opened.model, out, inputs, batches, **more)
    told = ""
    if compact or precision != "none":
        written, told = reduced(opened, out, precision, compact)
    if precision == "int4" and opset < FEW_BITS_OPSET:
        told += f"; in opset {FEW_BITS_OPSET}, because opset {opset} has no 4-bit types"
    if json:
        print_json(written.to_dict())
        return
    names = f"inputs {', '.join(written.inputs)}; outputs {', '.join(written.outputs)}"
    close = f"; at most {written.parity:.2g} from PyTorch" if written.parity is not None else ""
    out_console().print(f"{out}: {written.bytes:,} bytes; {names}{close}{told}", markup=False, highlight=False)


def _open_axes(given: list[str]) -> dict[str, dict[int, str]]:
    """`dynamic_axes` from entries such as input:2=height. Raises UsageError for others."""
    found: dict[str, dict[int, str]] = {}
    for entry in given:
        match = re.fullmatch(r"(.+):(\d+)=(.+)", entry)
        if match is None:
            raise UsageError(f"--dynamic-axis: {entry!r} is not INPUT:DIMENSION=NAME, as in input:2=height")
        name, dim, axis = match.groups()
        found.setdefault(name, {})[int(dim)] = axis
    return found


def report(run: Run, json: Json = False, debug: Debug = False) -> None:
    """Print a run's table, and rebuild report.html from report.json."""
    from svdcompress import report as made
    from svdcompress.pipeline import open_run, stored_recipe

    # An experiment leaves figures and pictures, but no model to open.
    results = made.load(run) if run.is_dir() and stored_recipe(run).experiment else open_run(run).results
    if json:
        print_json(results)
        return
    failed = None
    try:
        try:
            made.write(run, results)
        except OutputError as error:  # a folder that may only be read has its table all the same
            failed = error
        made.table(results, out_console(), run)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
        if debug:
            raise
        reason = shortened(f"{type(error).__name__}: {error}")
        raise OutputError(f"{run}/report.json: its figures cannot be shown; was it changed by hand? ({reason})") from error
    if failed is not None:
        err_console().print(f"warning: {failed}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def predict(
    run: Run,
    input_: Annotated[Path, typer.Option("--input", help="npy, npz, csv, parquet, an image, or a folder of images.")],
    samples: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_SAMPLES, help="Draws for each input (100, or none if the run found the mean as good)."),
    ] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Use model_mc.onnx in onnxruntime instead of PyTorch.")] = False,
    out: Annotated[Path | None, typer.Option(help="The file to write: .csv, .parquet or .npz (predictions.csv).")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the draws (0; with --onnx a fresh one).")] = None,
    device: Device = "auto",
    model: ModelAgain = None,
    answer_above: Annotated[
        float | None,
        typer.Option(help="Accuracy wanted on answered inputs, e.g. 0.99; the others are marked."),
    ] = None,
    coverage: Annotated[
        float | None, typer.Option(help="How often prediction sets or intervals should contain the truth, e.g. 0.9.")
    ] = None,
    trust_code: TrustCode = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Predict, and say how sure: a table with mean, variance and entropies for each input.

    --answer-above adds a column that says which inputs are answered; the confidence this takes comes from the run's validation
    data. --coverage adds each input's set of classes, or the ends of its interval.

    Example: svdc predict runs/digits --input scans.npy --samples 200 --out sure.csv
    """
    from svdcompress.predict import predict_run

    if out is not None:
        check_file(out)
    # onnxruntime runs on the CPU, whatever the device.
    place = None if onnx and device in (None, "auto", "cpu") else str(on_device(device))
    if onnx and place is not None:
        raise UsageError(f"--onnx runs on the CPU; leave out --device {device}")
    if trust_code:
        opened_run(run, trust_code, model)  # says what runs
    trusted: dict[str, Any] = {"trust_code": trust_code, "model": model}
    told: dict[str, Any] = {}
    promised: dict[str, Any] = {"answer_above": answer_above, "coverage": coverage, "told": told}
    path, count = predict_run(run, input_, out, samples=samples, onnx=onnx, seed=seed, device=place, **trusted, **promised)
    report = {"file": str(path), "predictions": count, **told}
    if not json:
        if told.get("by") == "mean":
            err_console().print(BY_MEAN, highlight=False, soft_wrap=True)
        for line in _promises(told):
            err_console().print(line, highlight=False, soft_wrap=True)
    print_json(report) if json else err_console().print(f"{path}: {count:,} predictions", markup=False, highlight=False)


def _width(width: float | list[float]) -> str:
    """The width of intervals in deviations, as text; for several targets, the smallest and the largest."""
    return f"{min(width):.3g} to {max(width):.3g} (by target)" if isinstance(width, list) else f"{width:.3g}"


def _promises(told: dict[str, Any]) -> list[str]:
    """What was promised about the predictions, in words."""
    lines, like = [], "inputs like the validation data"
    if told.get("other_sizes"):
        like += ", which these, of other sizes, are not"
    if found := told.get("not_promised"):
        lines.append(f"[yellow]warning:[/] not promised for these predictions, though the recipe asks for it: {escape(found)}")
    if found := told.get("answer_above"):
        lines.append(
            f"answered: {100 * found['share']:.1f}% of the inputs, those with a confidence of {found['threshold']:.4g} or "
            f"more; on {like} {100 * found['accuracy']:g}% of the answers are right (with "
            f"{100 * found['confidence']:g}% confidence, from {counted(found['examples'], 'validation example')})"
        )
    if found := told.get("coverage"):
        sets = found["kind"] == "sets"
        size = f"{found['mean_size']:.3g} classes per set" if sets else f"{_width(found['width'])} deviations each way"
        lines.append(
            f"coverage: {100 * found['coverage']:g}% of truths on {like} ("
            f"{counted(found['examples'], 'example')}); {size} on average"
        )
    return lines
