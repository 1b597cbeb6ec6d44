"""Networks of real.py in integers: ours by `--precision int8`, and the networks of its peers in the same way.

    python benchmarks/real_int8.py [--only resnet20-macs2x ...] [--runs FOLDER] [--peer NAME ...] [--seconds 10] [--again]

Needs what benchmarks/real.py left in the folder of --runs: the run CASE, and CASE-PEER.done.pt for each peer; peers whose
file does not exist (yet) are left out. Call it in the checkout in which real.py ran, as the stored peers name the model's
file. For ours the run's own model.onnx is used, for the dense start its dense.onnx; peers are exported as the package exports
dense models. Each file is then converted to int8 by the package's own function for `--precision int8`: onnxruntime's
quantizer in QDQ form, activation ranges from the same training images, and layers left in float by the same search on the
images used for choices, within 0.1 points of the net's own float file. If that search left some layers in float, a row "all
layers" leaves none.

Error: of the file in onnxruntime, on the reported half and (public weights) on all 10,000 test images, with paired 95%
intervals. Latency: medians, one thread, with the float and integer files of all nets taking turns in one process. A net with
stored results is not measured again without --again, except for its latency, as all files take turns. Results are written to
benchmarks/results/real_int8.json and real_int8.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from controls import change
from mnist import machine, read, write
from real_peers import unpickled
from torch import Tensor, nn

from svdcompress import cost, export_onnx
from svdcompress.pipeline import OpenRun, open_run, versions
from svdcompress.pipeline._baked import Baked, baked
from svdcompress.pipeline._figures import feed
from svdcompress.pipeline._integers import Integers
from svdcompress.pipeline._onnx_model import OnnxModel
from svdcompress.sources import Examples, example_inputs

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "real_int8.json"
OURS, START, WHOLE = "ours", "dense start", ", all layers"
BATCHES = (1, 32)


def nets(folder: Path, opened: OpenRun, units: Baked, place: Path, wanted: list[str] | None) -> Iterator[tuple[str, Path]]:
    """The name and the float file of each net of a case. place: where peers are exported to."""
    yield OURS, folder / "model.onnx"
    yield START, folder / "dense.onnx"
    inputs = units.inputs(example_inputs(opened.data.train, 2))
    for file in sorted(folder.parent.glob(f"{folder.name}-*.done.pt")):
        peer = file.name.removeprefix(f"{folder.name}-").removesuffix(".done.pt")
        if wanted and peer not in wanted:
            continue
        model = unpickled(file)
        path = place / f"{peer}.onnx"
        export_onnx(units.model(model.float().eval()), path, inputs, opset=opened.recipe.export.opset)
        yield peer, path


@torch.no_grad()
def wrong(path: Path, examples: Examples, units: Baked) -> Tensor:
    """Which of the examples a file answers wrongly (N,)."""
    model: nn.Module = OnnxModel(path, units)
    return torch.cat([model(x).argmax(1) != y for x, y in examples.batches(500)])


def missed(path: Path, opened: OpenRun, units: Baked) -> dict[str, Tensor]:
    """The same by part of the test images: those not used for choices, and all of them if both halves are test images."""
    found = {"reported": wrong(path, opened.data.test, units)}
    if isinstance(opened.recipe.weights.file, str):
        found["all"] = torch.cat([wrong(path, opened.data.validation, units), found["reported"]])
    return found


def integers(float_file: Path, path: Path, opened: OpenRun, units: Baked) -> tuple[dict[str, Path], dict[str, Any]]:
    """The integer files of one net, by the suffix of their row's name, and how they were made."""
    work = Integers(float_file, opened.data, units, compact=opened.recipe.export.compact)
    work.write(path)
    made, files = work.report, {"": path}
    made["left"] = [name for name, kind in made.pop("layers").items() if kind != "int8"]
    if made["left"]:
        files[WHOLE] = path.with_name(f"{path.stem}-whole.onnx")
        work.form.write(files[WHOLE], method=made["calibration"]["method"], compact=work.compact)
    return files, made


def errors(found: dict[str, Tensor], before: dict[str, Tensor] | None = None) -> dict[str, Any]:
    """Percent wrong by part, and what is lost compared with another file on the same images: [points, low, high]."""
    return {
        part: {
            "error": 100 * float(each.double().mean()),
            **({"lost": change(before[part], each)} if before else {}),
        }
        for part, each in found.items()
    }


def case(name: str, options: argparse.Namespace, known: dict[str, Any]) -> dict[str, Any]:
    """All rows of a case. known: the results of an earlier call."""
    folder = options.runs / name
    opened = open_run(folder, trust_code=True)
    units = baked(opened.preprocessing, opened.recipe.task, opened.dim)
    rows: dict[str, Any] = {} if options.again else dict(known.get("nets", {}))
    with TemporaryDirectory(prefix="real-int8") as work:
        place, files = Path(work), {}
        for net, path in nets(folder, opened, units, place, options.peer):
            print(f"{name}: {net}", flush=True)
            forms, made = integers(path, place / f"{net}-int8.onnx", opened, units)
            files |= {f"{net}|float": path, **{f"{net}|int8{end}": form for end, form in forms.items()}}
            if net in rows and set(rows[net]["forms"]) == {"float", *(f"int8{end}" for end in forms)}:
                continue
            before = missed(path, opened, units)
            rows[net] = {
                "made": made,
                "forms": {"float": {"bytes": cost.file_bytes(path), "errors": errors(before)}},
            }
            for end, form in forms.items():
                found = errors(missed(form, opened, units), before)
                rows[net]["forms"][f"int8{end}"] = {"bytes": cost.file_bytes(form), "errors": found}
        times = cost.latencies(files, feed(opened.data, folder / "model.onnx"), BATCHES, seconds=options.seconds)
        for key, each in times.items():
            net, _, form = key.partition("|")
            rows[net]["forms"][form]["latency_ms"] = each
    setting = {
        "calibration": "training images from all over, as --precision int8 takes them",
        "chosen on": len(opened.data.validation),
        "reported": len(opened.data.test),
        "onnxruntime threads": 1,
        "seconds of each batch size": options.seconds,
        "versions": versions(),
    }
    return {"machine": machine(), "setting": setting, "nets": rows}


def table(results: dict[str, Any]) -> str:
    """Markdown: a section for each case."""
    lines = [
        "# Real networks in integers",
        "",
        "Written by `benchmarks/real_int8.py`, which says how each file is made. Error on test images that chose nothing, and",
        "on all 10,000; lost: the error of the integer file less that of the net's own float file on the same images, in",
        "points, paired, 95%. Lost in all: against the float file of the dense start. Latency: ms, one thread, medians, all",
        "files in turns; faster: the float file's over the integer file's.",
        "",
    ]
    head = ["net", "file", "kB", "error %", "lost", "all 10,000", "lost", "lost in all"]
    head += [f"ms, batch {batch}" for batch in BATCHES] + ["faster"]
    for name, one in results.items():
        about = one["setting"]["versions"]
        lines += [f"## {name}", "", f"- {one['machine'].get('cpu')}, one thread, beside other work"]
        lines += [f"- {', '.join(f'{key} {about[key]}' for key in ('onnxruntime', 'onnx', 'torch') if key in about)}", ""]
        lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        base = one["nets"][START]["forms"]["float"]["errors"] if START in one["nets"] else None
        for net, row in one["nets"].items():
            for form, found in row["forms"].items():
                lines.append(f"| {' | '.join(cells(net, form, found, row, base))} |")
        lines.append("")
        for net, row in one["nets"].items():
            left, how = row["made"]["left"], row["made"]["calibration"]
            stay = f"{len(left)} layer(s) stayed in float: {', '.join(left)}" if left else "all layers in integers"
            lines.append(f"- {net}: {stay}; ranges by {how['method']} of {how['examples']} training images")
        lines.append("")
    return "\n".join(lines)


def cells(net: str, form: str, found: dict[str, Any], row: dict[str, Any], base: dict[str, Any] | None) -> list[str]:
    """The cells of one line of the table."""
    parts, times, whole = found["errors"], found["latency_ms"], row["forms"]["float"]["latency_ms"]
    line = [net, form, f"{found['bytes'] / 1000:.0f}"]
    for part in ("reported", "all"):
        here = parts.get(part, {})
        line += [f"{here['error']:.2f}" if here else ""]
        line += ["{:+.2f} [{:+.2f}, {:+.2f}]".format(*here["lost"]) if "lost" in here else ""]
    part = "all" if "all" in parts else "reported"
    line += [f"{parts[part]['error'] - base[part]['error']:+.2f}" if base else ""]
    line += [f"{times[f'batch_{batch}']:.3f}" for batch in BATCHES]
    ratios = [whole[f"batch_{batch}"] / times[f"batch_{batch}"] for batch in BATCHES]
    return [*line, "" if form == "float" else f"{', '.join(f'{each:.2f}x' for each in ratios)} (mean {mean(ratios):.2f}x)"]


def main() -> None:
    """Measure the cases in order; those without a finished run are left out, with a message."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["resnet20-macs2x"])
    parser.add_argument("--peer", nargs="+", help="as in the names of their files: torch-pruning-Taylor")
    parser.add_argument("--runs", type=Path, default=HERE.parent / "runs" / "benchmarks" / "real")
    parser.add_argument("--seconds", type=float, default=10.0, help="of latencies at each batch size, over all files")
    parser.add_argument("--again", action="store_true", help="measure the errors of known nets again, too")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.runs = options.runs.resolve()
    for name in options.only:
        if not (options.runs / name / "report.json").is_file():
            print(f"{name}: left out, as {options.runs / name} holds no finished run")
            continue
        if not list(options.runs.glob(f"{name}-*.done.pt")):
            print(f"{name}: ours alone, as benchmarks/real.py has left no {name}-PEER.done.pt")
        found = case(name, options, read(options.results).get(name, {}))
        results = read(options.results) | {name: found}  # another process may have added to it
        write(options.results, results)
        options.results.with_suffix(".md").write_text(table(results), encoding="utf-8")
    print(options.results.with_suffix(".md").read_text() if options.results.with_suffix(".md").is_file() else "nothing to show")


if __name__ == "__main__":
    main()
