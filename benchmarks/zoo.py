"""All architectures of torchvision and one of each of timm's families, pruned and compared with masked weights.

    python benchmarks/zoo.py [--only PATTERN ...] [--again] [--seconds 120] [--gigabytes 6]

Each architecture is built without pretrained weights (zoo_nets.py says which, and at what image size) and runs in a process
of its own, on one thread, within the given CPU time and memory. It is converted, and pruned with two kinds of masks
(zoo_oracle.py): `random` removes half of all single weights, so that hardly any unit can go, and `aligned` removes whole
units. The result is compared with a plain copy of the dense network whose weights were multiplied by the masks, on fresh
inputs of two batch sizes. `exact`: they differ by at most 1e-5 of the outputs' spread; or both networks do after a cast to
double precision; or they do when the pruning itself is done in double precision and leads to the same shapes: what is left
then is the rounding of constants that were folded in single precision (`rounding` is that of the masked network itself).
`rounded`: in double precision the pruning is exact but removes other units (which constants are alike depends on the last
digits), and the one in single precision is off by more than 1e-5, but by less than single precision is for the masked network
itself. `masked`: exact, with nothing removed. What could be removed is found without the package's code.

Rows are written to benchmarks/results/zoo.json as they come, with the commit that made them, and a stored row is not run
again without --again; zoo.md is the table.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import platform
import resource
import signal
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import zoo_nets
import zoo_oracle
from torch import nn

import svdcompress as svdc
from svdcompress.layers import variational_layers

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
KINDS = ("random", "aligned")
EXACT = 1e-5
SEED = 0


def one(name: str, target: Path | None = None) -> dict[str, Any]:
    """The row of an architecture, made in this process; written to `target` as it grows, in case a limit ends the process."""
    row: dict[str, Any] = {"name": name}

    def tell() -> None:
        if target is not None:
            target.write_text(json.dumps(row))

    torch.set_num_threads(1)
    try:
        dense, inputs = zoo_nets.build(name)
    except zoo_nets.Skipped as why:
        row["skipped"] = str(why)
        tell()
        return row
    torch.manual_seed(SEED)
    zoo_nets.shake(dense, inputs)
    row["input"] = list(inputs.shape) if torch.is_tensor(inputs) else [list(t.shape) for t in inputs]
    row["parameters"] = sum(p.numel() for p in dense.parameters())
    try:
        model = svdc.convert(copy.deepcopy(dense), example_inputs=inputs)
    except svdc.errors.ModelError as error:
        row["skipped"] = f"nothing to convert: {str(error)[:200]}"
        tell()
        return row
    names = [layer for layer, _ in variational_layers(model)]
    row["converted"] = sum(dense.get_submodule(layer).weight.numel() for layer in names) / row["parameters"]
    for kind in KINDS:
        row[kind] = compare(kind, dense, model, names, inputs)
        tell()
    return row


def compare(kind: str, dense: nn.Module, model: nn.Module, names: list[str], inputs: Any) -> dict[str, Any]:
    """Prune with masks of a kind: verdict, shares, seconds, memory."""
    generator = torch.Generator().manual_seed(SEED)
    layers = {name: dense.get_submodule(name) for name in names}
    if kind == "random":
        masks = zoo_oracle.random_masks(layers, generator)
    else:
        masks = zoo_oracle.aligned_masks(dense, layers, generator)
    Path("/proc/self/clear_refs").write_text("5")
    before, start = resident("VmRSS"), time.process_time()
    try:
        small = svdc.prune(model, inputs, masks=masks).eval()
    except Exception as error:
        return {"verdict": "failed", "reason": f"{type(error).__name__}: {str(error)[:200]}"}
    result: dict[str, Any] = {"seconds": time.process_time() - start, "added_bytes": resident("VmHWM") - before}
    masked = zoo_oracle.reference(dense, masks)
    result["error"] = differ(small, masked, inputs)
    if result["error"] > EXACT:  # rounding or a mistake: the same pruning in double precision shows which
        double = copy.deepcopy(masked).double()
        result["error_stored"] = differ(copy.deepcopy(small).double(), double, inputs, torch.double)
        wide = svdc.prune(copy.deepcopy(model).double(), zoo_oracle.each(lambda t: t.double(), inputs), masks=masks).eval()
        result["error_double"] = differ(wide, double, inputs, torch.double)
        result["same_double"] = [p.shape for p in wide.parameters()] == [p.shape for p in small.parameters()]
        result["rounding"] = rounding(masked, inputs)
    gone = sum(count(dense.get_submodule(n)) - count(small.get_submodule(n)) for n in names)
    result["removed"] = sum(p.numel() for p in dense.parameters()) - small.pruning.parameters_after
    result["verdict"] = verdict(result)
    reasons: Counter[str] = Counter()
    for group in small.pruning.groups:
        if group.reason:
            reasons[group.reason.partition(" in ")[0][:90]] += group.kept * group.unit_parameters
    result["reasons"] = [f"{why}" for why, _ in reasons.most_common(3)]
    result["notes"] = [note[:200] for note in small.pruning.notes]
    if kind == "random":
        return result
    start = time.process_time()
    try:
        result["removable"] = zoo_oracle.Oracle(masked, names, masks, inputs).removable()
        result["removed_of_layers"] = gone
        result["share"] = gone / result["removable"] if result["removable"] else None
    except Exception as error:
        result["oracle"] = f"{type(error).__name__}: {str(error)[:200]}"
    result["oracle_seconds"] = time.process_time() - start
    return result


def verdict(result: dict[str, Any]) -> str:
    """The verdict on a comparison."""
    error, stored, double = (result.get(key, float("inf")) for key in ("error", "error_stored", "error_double"))
    if min(error, stored) <= EXACT or (double <= EXACT and result["same_double"]):
        return "exact" if result["removed"] else "masked"
    return "rounded" if double <= EXACT and stored <= result["rounding"] else "wrong"


def count(layer: Any) -> int:
    """The number of parameters in a layer's weight and bias."""
    return layer.weight.numel() + (0 if layer.bias is None else layer.bias.numel())


def differ(found: nn.Module, expected: nn.Module, inputs: Any, dtype: torch.dtype = torch.float32) -> float:
    """The largest difference on fresh inputs, with as many examples as were traced and with one more."""
    worst = 0.0
    with torch.no_grad():
        for seed, more in enumerate((0, 1)):
            generator = torch.Generator().manual_seed(1000 + seed)
            fresh = zoo_oracle.each(
                lambda t, g=generator, m=more: torch.randn((len(t) + m, *t.shape[1:]), generator=g).to(dtype), inputs
            )
            torch.manual_seed(seed)
            a = zoo_oracle.apply(found, fresh)
            torch.manual_seed(seed)
            worst = max(worst, zoo_oracle.error(a, zoo_oracle.apply(expected, fresh)))
    return worst


def rounding(masked: nn.Module, inputs: Any) -> float:
    """The error of the masked network in single precision."""
    wide, fresh = copy.deepcopy(masked).double(), zoo_oracle.each(torch.randn_like, inputs)
    with torch.no_grad():
        expected = zoo_oracle.apply(wide, zoo_oracle.each(lambda t: t.double(), fresh))
        return zoo_oracle.error(zoo_oracle.apply(masked, fresh), expected)


def resident(key: str) -> int:
    """Resident bytes of this process: "VmRSS" now, "VmHWM" the peak since the mark was last reset (Linux)."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)]
    return int(line.split()[1]) * 1024


# The run


def launch(name: str, seconds: int, gigabytes: float) -> dict[str, Any]:
    """Run `one` in a process of its own within limits (forked, so that modules are imported only once)."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "row"
        child = multiprocessing.get_context("fork").Process(target=_limited, args=(name, seconds, gigabytes, target))
        child.start()
        child.join()
        text = target.read_text() if target.is_file() else ""
    complete = [line for line in text.splitlines() if line.endswith("}")]
    row = json.loads(complete[-1]) if complete else {"name": name}
    if child.exitcode:
        spent = child.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
        row["stopped"] = f"{seconds} s of CPU time were spent" if spent else f"ended with {child.exitcode}"
    row["commit"], row["wall"] = commit(), round(time.perf_counter() - start, 1)
    return row


def _limited(name: str, seconds: int, gigabytes: float, target: Path) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (int(gigabytes * 1e9),) * 2)
    try:
        one(name, target)
    except Exception as error:
        with target.open("a") as file:
            told = f"{type(error).__name__}: {str(error)[:200]}"
            file.write("\n" + json.dumps({"name": name, "skipped": f"the benchmark failed: {told}"}))


def commit() -> str:
    """The commit of the package, with a + if there are uncommitted changes."""
    short = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "svdcompress"], cwd=ROOT).returncode
    return short + "+" * changed


def machine() -> dict[str, Any]:
    """The machine and versions that the figures depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    versions = {"python": platform.python_version(), **{name: version(name) for name in ("torch", "torchvision", "timm")}}
    return {"cpu": cpu, "cores": os.cpu_count(), "threads": 1, "seed": SEED, "versions": versions}


def write(rows: dict[str, dict[str, Any]], command: str, target: Path) -> None:
    """Write the results, with one row per line, and the table."""
    ordered = sorted(rows.values(), key=lambda row: row["name"])
    head = json.dumps({"machine": machine(), "command": command})[:-1]
    text = head + ', "rows": [\n' + ",\n".join(json.dumps(row) for row in ordered) + "\n]}\n"
    part = target.with_suffix(".part")
    part.write_text(text)
    part.replace(target)
    target.with_suffix(".md").write_text(table(ordered, command))


def table(rows: list[dict[str, Any]], command: str) -> str:
    """The figures as Markdown."""
    where = machine()
    ran = [row for row in rows if "aligned" in row]
    shares = [row["aligned"]["share"] for row in ran if row["aligned"].get("share") is not None]
    cells = [(row, kind) for row in rows for kind in KINDS if kind in row]
    verdicts = Counter(row[kind]["verdict"] for row, kind in cells)
    told = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.most_common())
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    lines = [
        "# Architectures, pruned and compared",
        "",
        f"`{command}`: {len(ran)} architectures with two kinds of masks each: {told}. Median share removed of what could go "
        f"(aligned masks): {statistics.median(shares) if shares else float('nan'):.3f}; at least 0.9 in "
        f"{sum(share >= 0.9 for share in shares)} of {len(shares)}.",
        "",
        f"{where['cpu']}, one thread, seed {SEED}; {versions}; commits of the package: {commits}. How it is measured stands "
        "in benchmarks/zoo.py, what `could go` means in benchmarks/zoo_oracle.py: shapes may forbid "
        "some of it, and a gate that is a constant 0 may add to it (a share above 1).",
        "",
        "`error`: the largest difference from the masked dense network, as a share of the outputs' spread (in double "
        "precision where it is marked d; of a rounded one as it is stored, and in brackets what rounding does to the masked "
        "network itself). `left`: parameters left. `share`: removed of what could go. Seconds "
        "are CPU time of `svdc.prune`; memory is its peak above what was resident before.",
        "",
        "| architecture | input | parameters | random | error | aligned | error | left | could be left | share | s | GB | "
        "what stays, and why |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [line(row) for row in rows if any(kind in row for kind in KINDS)]
    lines += ["", "Not run, or not to the end:", "", "| architecture | reason |", "|---|---|"]
    lines += [
        f"| {row['name']} | {row.get('skipped') or row.get('stopped')} |"
        for row in rows
        if "skipped" in row or "stopped" in row
    ]
    return "\n".join(lines) + "\n"


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    random, aligned, size = row.get("random", {}), row.get("aligned", {}), row["parameters"]

    def wrong(cell: dict[str, Any]) -> str:
        if cell.get("verdict") == "rounded":
            return f"{cell['error_stored']:.0e} ({cell['rounding']:.0e})"
        if "error_double" in cell:
            return f"{cell['error_double']:.0e}d"
        return f"{cell['error']:.0e}" if "error" in cell else ""

    left = f"{1 - aligned['removed'] / size:.2f}" if "removed" in aligned else ""
    could = f"{1 - aligned['removable'] / size:.2f}" if "removable" in aligned else ""
    share = f"{aligned['share']:.2f}" if aligned.get("share") is not None else ""
    why = aligned.get("reason") or "; ".join([*aligned.get("notes", []), *aligned.get("reasons", [])[:1]])
    memory = f"{aligned['added_bytes'] / 1e9:.2f}" if "added_bytes" in aligned else ""
    seconds = f"{aligned['seconds']:.1f}" if "seconds" in aligned else ""
    costs = f"{seconds} | {memory}"
    return (
        f"| {row['name']} | {'x'.join(map(str, row['input']))} | {size / 1e6:.2f} M | {random.get('verdict', '')} | "
        f"{wrong(random)} | {aligned.get('verdict', '')} | {wrong(aligned)} | {left} | {could} | {share} | {costs} | {why} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=["*"], help="patterns of names, as in timm:resnet*")
    parser.add_argument("--again", action="store_true", help="run rows that are there already")
    parser.add_argument("--seconds", type=int, default=120, help="CPU time of an architecture")
    parser.add_argument("--gigabytes", type=float, default=6.0, help="memory of an architecture")
    parser.add_argument("--results", type=Path, default=RESULTS / "zoo.json")
    parser.add_argument("--one", help="run this one in this process and print its row as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one(arguments.one)), flush=True)
        return
    rows = {}
    if arguments.results.is_file():
        rows = {row["name"]: row for row in json.loads(arguments.results.read_text())["rows"]}
        for cell in (row[kind] for row in rows.values() for kind in KINDS if "error" in row.get(kind, {})):
            cell["verdict"] = verdict(cell)
    command = f"python benchmarks/zoo.py --seconds {arguments.seconds} --gigabytes {arguments.gigabytes:g}"
    for name in sorted(zoo_nets.names(), key=zoo_nets.turn):
        if not any(fnmatchcase(name, pattern) for pattern in arguments.only) or (name in rows and not arguments.again):
            continue
        row = rows[name] = launch(name, arguments.seconds, arguments.gigabytes)
        write(rows, command, arguments.results)
        told = row.get("skipped") or row.get("stopped") or {k: (row[k]["verdict"], row[k].get("share")) for k in KINDS}
        print(f"{name}: {told}, {row['wall']:.0f} s", flush=True)
    write(rows, command, arguments.results)


if __name__ == "__main__":
    main()
