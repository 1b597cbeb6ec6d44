"""Commands that take a finished run's folder: evaluate, predict, export, bench, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from svdcompress.cli._common import Debug, Json, Run, err_console, out_console, print_json
from svdcompress.errors import UsageError

Samples = Annotated[int, typer.Option(help="Draws of the weights.")]

BATCH = 500
HEADINGS = {"error": "error %", "nll": "NLL", "ece": "ECE", "brier": "Brier", "rmse": "RMSE"}


def evaluate(
    run: Run,
    samples: Samples = 100,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for evaluation.json and pictures (RUN/evaluation).")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare, on the test data, the dense model, its calibrated and its MC-dropout forms, and the sparse model with samples.

    Also how well each tells inputs that are none of the data's kind (shuffled, noise) from those that are.
    """
    from svdcompress import uncertainty
    from svdcompress.pipeline import open_run
    from svdcompress.report import write_json

    opened = open_run(run)
    data = opened.data
    test = lambda: data.test.batches(BATCH)  # noqa: E731
    result = uncertainty.compare(
        opened.dense,
        opened.model,
        test,
        lambda: data.validation.batches(BATCH),
        task=data.task,
        ood=uncertainty.outside(test, seed),
        samples=samples,
        seed=seed,
        scale=1.0 if data.target_scale is None else data.target_scale[1],
    )
    folder = out or run / "evaluation"
    pictures = uncertainty.draw(result, folder)
    write_json(folder / "evaluation.json", result)
    if json:
        print_json(result)
        return
    console = out_console()
    console.print(_comparison(result))
    console.print(f"\nwritten to {folder}/: evaluation.json, {', '.join(path.name for path in pictures)}", highlight=False)


def _comparison(result: dict[str, Any]) -> Table:
    rows = result["contenders"]
    names = list(dict.fromkeys(name for row in rows for name, value in row["metrics"].items() if value is not None))
    sets = list(dict.fromkeys(name for row in rows for name in (row["ood"] or {})))
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("")
    headings = {"error": "error %", "nll": "NLL", "ece": "ECE", "brier": "Brier", "rmse": "RMSE"}
    for name in names:
        table.add_column(str(headings.get(name, name)), justify="right")
    for name in sets:
        table.add_column(f"AUROC, {name}", justify="right")
    for row in rows:
        figures = [f"{row['metrics'][name]:.4g}" if row["metrics"].get(name) is not None else "" for name in names]
        for name in sets:
            scores = (row["ood"] or {}).get(name) or {}
            best = scores.get("mutual_information", scores.get("softmax", scores.get("variance")))
            figures.append("" if best is None else f"{best:.4f}")
        table.add_row(row["name"], *figures)
    return table


def export(
    run: Run,
    out: Annotated[Path, typer.Option(help="The file to write.")],
    monte_carlo: Annotated[bool, typer.Option("--monte-carlo", help="With `samples` as an input, and uncertainties.")] = False,
    noise: Annotated[str, typer.Option(help="random, or input: the noise is an input of the file.")] = "random",
    opset: Annotated[int, typer.Option(help="ONNX opset, 18 to 23.")] = 20,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a run's model as ONNX once more, in another form, checked against PyTorch."""
    from svdcompress.errors import OutputError
    from svdcompress.export import export_onnx
    from svdcompress.pipeline import open_run
    from svdcompress.sources import example_inputs

    opened = open_run(run)
    if out.exists():
        raise OutputError(f"--out: {out} exists already; name another file")
    written = export_onnx(
        opened.model,
        out,
        example_inputs(opened.data.train, 2),
        monte_carlo=monte_carlo,
        task=opened.recipe.task,
        noise=noise,
        opset=opset,
    )
    if json:
        print_json(written.to_dict())
        return
    names = f"inputs {', '.join(written.inputs)}; outputs {', '.join(written.outputs)}"
    out_console().print(f"{out}: {written.bytes:,} bytes; {names}; at most {written.parity:.2g} from PyTorch", highlight=False)


def bench(
    run: Run,
    batch: Annotated[list[int], typer.Option(help="A batch size; may be given several times.")] = [1, 128],  # noqa: B006
    threads: Annotated[int, typer.Option(help="Threads of onnxruntime.")] = 1,
    seconds: Annotated[float, typer.Option(help="Time for each batch size.")] = 2.0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure a run's files again, dense against sparse, on this machine: latency, bytes, multiply-accumulates."""
    from svdcompress import cost
    from svdcompress.pipeline import feed, open_run
    from svdcompress.sources import example_inputs

    if any(size < 1 for size in batch):
        raise UsageError(f"--batch: {min(batch)} is not a batch size")
    opened = open_run(run)
    paths = {name: run / file for name, file in (("dense", "dense.onnx"), ("sparse", "model.onnx")) if (run / file).is_file()}
    if not paths:
        raise UsageError(f"{run} holds no ONNX files (its recipe has export.onnx: false)")
    inputs = example_inputs(opened.data.train, 2)
    times = cost.latencies(paths, feed(opened.data, next(iter(paths.values()))), batch, threads=threads, seconds=seconds)
    models = {"dense": opened.dense, "sparse": opened.model}
    found: dict[str, Any] = {
        name: {**cost.measure(models[name], inputs).to_dict(), "bytes": cost.file_bytes(path), "latency_ms": times[name]}
        for name, path in paths.items()
    }
    if len(found) == 2:
        found["compression"] = cost.compression(found["dense"], found["sparse"])
    found["threads"] = threads
    print_json(found) if json else out_console().print(_bench_table(found))


def _bench_table(found: dict[str, Any]) -> Table:
    names = [name for name in ("dense", "sparse") if name in found]
    table = Table(title=f"onnxruntime, {found['threads']} thread(s)", title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for key, label in (("parameters", "parameters"), ("nonzero", "non-zeros"), ("bytes", "bytes"), ("macs", "MACs")):
        table.add_row(label, *[f"{found[name][key]:,}" for name in names])
    for size in found[names[0]]["latency_ms"]:
        label = f"latency, {size.replace('_', ' ')}"
        table.add_row(label, *[f"{found[name]['latency_ms'][size]:.3f} ms" for name in names])
    return table


def report(run: Run, json: Json = False, debug: Debug = False) -> None:
    """Print a run's table and write its report.html anew from report.json."""
    from svdcompress import report as made
    from svdcompress.pipeline import open_run

    opened = open_run(run)
    if json:
        print_json(opened.results)
        return
    made.write(run, opened.results)
    made.table(opened.results, out_console(), run)


def predict(
    run: Run,
    input_: Annotated[Path, typer.Option("--input", help="npy, npz, csv, parquet, an image, or a folder of images.")],
    samples: Samples = 100,
    onnx: Annotated[bool, typer.Option("--onnx", help="With model_mc.onnx in onnxruntime in place of PyTorch.")] = False,
    out: Annotated[Path | None, typer.Option(help="The file to write: .csv, .parquet or .npz (predictions.csv).")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draws (PyTorch).")] = 0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Predict, and say how sure: mean, variance and entropies of each input, written as a table.

    Example: svdc predict runs/digits --input scans.npy --samples 200 --out sure.csv
    """
    from svdcompress.predict import predict_run

    path, count = predict_run(run, input_, out, samples=samples, onnx=onnx, seed=seed)
    report = {"file": str(path), "predictions": count}
    print_json(report) if json else err_console().print(f"{path}: {count:,} predictions", highlight=False)
