"""What it saves to leave the length of texts open in a file, instead of padding all of them to the longest.

    python benchmarks/open_length.py RUN [RUN ...] [--mask attention_mask] [--open input_ids attention_mask] [--examples 1000]

RUN: the folder of a finished run on tokens that are padded on the right. Its dense and its small model are each written twice,
with one length and with `dynamic_axes` for the second dimension of --open. The first --examples test examples are passed to
all four files one by one, in onnxruntime, on one thread: padded to the file with one length, and cut to the positions that
--mask counts to the other. Each call is timed by the CPU time of its thread; what is reported is the mean over the examples,
and R2 of the predictions. Results: benchmarks/results/open_length.json and open_length.md.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from mnist import machine, read, write
from torch import Tensor

from svdcompress.export import export_onnx
from svdcompress.pipeline import open_run
from svdcompress.sources import example_inputs

HERE = Path(__file__).resolve().parent
WARM_UP = 5


def session(path: Path) -> Any:
    """A session of one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def r2(predictions: np.ndarray, targets: np.ndarray) -> float:
    """The share of the targets' variance that the predictions explain."""
    return 1 - float(np.square(predictions - targets).sum() / np.square(targets - targets.mean()).sum())


def sessions(folder: Path, opened: Any, axes: dict[str, dict[int, str]]) -> dict[str, Any]:
    """The four files' sessions, by model and form."""
    inputs, found = example_inputs(opened.data.train, 2), {}
    for name, model in (("dense", opened.dense), ("ours", opened.model)):
        for form, dims in (("one length", {}), ("open length", axes)):
            path = folder / f"{name} {form}.onnx".replace(" ", "_")
            export_onnx(model.cpu(), path, inputs, task="regression", dynamic_axes=dims)
            found[f"{name}, {form}"] = session(path)
    return found


def measured(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A run's figures: lengths, and for each file {"ms", "r2"}."""
    opened = open_run(folder, trust_code=True)
    axes = {name: {1: "length"} for name in options.open}
    times: dict[str, list[float]] = {}
    answers: dict[str, list[float]] = {}
    lengths: list[int] = []
    targets: list[float] = []
    with tempfile.TemporaryDirectory() as place:
        files = sessions(Path(place), opened, axes)
        for inputs, target in opened.data.test.batches(1):
            given: dict[str, Tensor] = dict(inputs)
            length = int(given[options.mask].sum())
            for name, file in files.items():
                cut = name.endswith("open length")
                feeds = {key: (x[:, :length] if cut and key in axes else x).numpy() for key, x in given.items()}
                start = time.thread_time()
                (output, *_) = file.run(None, feeds)
                times.setdefault(name, []).append(1e3 * (time.thread_time() - start))
                answers.setdefault(name, []).append(float(output.reshape(-1)[0]))
            lengths.append(length)
            targets.append(float(target.reshape(-1)[0]))
            if len(lengths) == options.examples:
                break
    longest = next(iter(given[options.mask].shape[1:]))
    nets = {
        name: {"ms": float(np.mean(each[WARM_UP:])), "r2": r2(np.array(answers[name]), np.array(targets))}
        for name, each in times.items()
    }
    pairs = [(f"{name}, one length", f"{name}, open length") for name in ("dense", "ours")]
    apart = max(float(np.abs(np.subtract(answers[a], answers[b])).max()) for a, b in pairs)
    spread = {"longest": longest, "mean": float(np.mean(lengths)), "percentiles": np.percentile(lengths, (5, 95)).tolist()}
    return {"lengths": spread, "examples": len(lengths), "nets": nets, "apart": apart}


def table(results: dict[str, Any]) -> str:
    """Markdown: a row for each file."""
    lines = ["# Files of one length, and of an open length", ""]
    lines += ["Written by `benchmarks/open_length.py`, which says how. Milliseconds of CPU time for one example, the mean over"]
    lines += ["test examples, in onnxruntime on one thread. R2 is of these examples.", ""]
    for name, found in sorted(results.items()):
        spread, nets = found["lengths"], found["nets"]
        low, high = spread["percentiles"]
        lines += [f"## {name}", ""]
        lines += [
            f"{found['examples']:,} test examples of {spread['mean']:.0f} tokens on average (from {low:.0f} to {high:.0f} in"
        ]
        lines += [
            f"90% of them), padded to {spread['longest']}. The two forms' answers differ by {found['apart']:.1g} at most.",
            "",
        ]
        lines += ["| file | ms | times as fast as dense with one length | R2 |", "|---|---|---|---|"]
        first = nets["dense, one length"]["ms"]
        lines += [f"| {key} | {net['ms']:.2f} | {first / net['ms']:.2f}x | {net['r2']:.4f} |" for key, net in nets.items()]
        lines += ["", f"{found['machine']['cpu']}, onnxruntime {found['onnxruntime']}.", ""]
    return "\n".join(lines)


def main() -> None:
    """Measure each run and store it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--mask", default="attention_mask")
    parser.add_argument("--open", nargs="+", default=["input_ids", "attention_mask"])
    parser.add_argument("--examples", type=int, default=1000)
    options = parser.parse_args()
    path = HERE / "results" / "open_length.json"
    for folder in options.runs:
        found = measured(folder, options) | {"machine": machine(), "onnxruntime": version("onnxruntime")}
        results = read(path) | {folder.name: found}
        write(path, results)
        path.with_suffix(".md").write_text(table(results), encoding="utf-8")


if __name__ == "__main__":
    main()
