"""Does a network that was fine-tuned under its posterior's noise lose less in few bits than one without noise?

    python benchmarks/noise_aware.py --runs FOLDER [--recipe mnist-lenet300 ...] [--seeds 0 1 2]
    python benchmarks/noise_aware.py --runs FOLDER --real resnet20-macs4x --resnet-runs FOLDER

Each run of benchmarks/mnist.py is compared with gradual magnitude pruning from the run's own dense start, with as many
non-zero weights, as many epochs and the same digits (benchmarks/controls.py, the plan of one fall), trained here unless its
weights exist. With --real, the network of a run of benchmarks/real.py is compared with those of the peers that real.py left
next to it (run this in the checkout in which real.py ran). Both networks get the same treatment by the same code:

- weights of b bits: one step size for each output channel, which minimizes the squared errors; activations in float;
- int8: onnxruntime's quantizer in QDQ form, all layers, ranges from the same 320 training examples.

Ours is also measured with steps chosen by the posterior, which the other network does not have. Lost: the error in few bits
minus that in float32, in points of the test data; ours less: the difference between what both lose, paired by test example,
averaged over the seeds, with its 95% interval (normal). Below 0 ours loses less. Nothing is chosen on test data. Results:
benchmarks/results/noise_aware.json and .md.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from controls import control
from mnist import machine, read, write
from real_peers import unpickled
from torch import Tensor, nn

import svdcompress as svdc
from svdcompress.export import Int8, export_onnx, round_weights
from svdcompress.export._bits import rounded
from svdcompress.pipeline import OpenRun, open_run, versions
from svdcompress.pipeline._baked import baked
from svdcompress.pipeline._integers import Integers
from svdcompress.pipeline._onnx_model import OnnxModel
from svdcompress.sources import example_inputs
from svdcompress.uncertainty import paired_means

RESULTS = Path(__file__).resolve().parent / "results" / "noise_aware.json"
BITS = (3, 4, 5, 8)
OURS = "ours"


@torch.no_grad()
def wrong(model: nn.Module, opened: OpenRun) -> Tensor:
    """Which test examples the model gets wrong, as 0. or 1. (N,)."""
    model.eval()
    return torch.cat([(model(x).argmax(1) != y).double() for x, y in opened.data.test.batches(500)])


def in_bits(model: nn.Module, bits: int) -> nn.Module:
    """A copy whose weights with two or more dimensions are rounded."""
    found = copy.deepcopy(model)
    with torch.no_grad():
        for weight in found.parameters():
            if weight.dim() > 1:
                weight.copy_(rounded(weight, bits))
    return found


def in_integers(model: nn.Module, opened: OpenRun) -> Tensor:
    """`wrong` for the int8 file, in which all layers are integers."""
    units = baked(opened.preprocessing, opened.recipe.task, opened.dim)
    with TemporaryDirectory(prefix="noise-aware") as folder:
        path, dst = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        inputs = units.inputs(example_inputs(opened.data.train, 2))
        export_onnx(units.model(model.eval()), path, inputs, opset=opened.recipe.export.opset)
        feeds = Integers(path, opened.data, units)._feeds
        Int8(path, feeds).write(dst, compact=False)
        return wrong(OnnxModel(dst, units), opened)


def measured(model: nn.Module, opened: OpenRun, variational: nn.Module | None = None) -> dict[str, Tensor]:
    """`wrong` for each form of a network."""
    found = {"float32": wrong(model, opened), "int8": in_integers(model, opened)}
    for bits in BITS:
        found[f"{bits} bits"] = wrong(in_bits(model, bits), opened)
        if variational is not None:
            small = svdc.to_dense(round_weights(copy.deepcopy(variational), bits))
            found[f"{bits} bits, by the posterior"] = wrong(small, opened)
    return found


def pairs(options: argparse.Namespace) -> Iterator[tuple[str, str, str, dict[str, dict[str, Tensor]]]]:
    """(group, seed, other net's name, {net: measured})."""
    for case in options.real:
        folder = options.resnet_runs / case
        opened = open_run(folder, trust_code=True)
        ours = measured(svdc.to_dense(copy.deepcopy(opened.model)), opened, opened.model)
        for file in sorted(folder.parent.glob(f"{case}-*.done.pt")):
            other = unpickled(file)
            name = file.name.removeprefix(f"{case}-").removesuffix(".done.pt").replace("-", " ")
            yield f"{case}, {name}", "0", name, {OURS: ours, name: measured(other.float(), opened)}
    out = options.runs / "controls"
    out.mkdir(parents=True, exist_ok=True)
    for recipe in options.recipe:
        for seed in options.seeds:
            folder = options.runs / f"{recipe}-{seed}"
            if not (folder / "report.json").is_file():
                print(f"{folder.name}: left out, as there is no finished run")
                continue
            opened = open_run(folder)
            assert opened.dense is not None
            model = copy.deepcopy(opened.dense)
            model.load_state_dict(torch.load(control(folder, "magnitude", "one fall", seed, out), weights_only=True))
            ours = measured(svdc.to_dense(copy.deepcopy(opened.model)), opened, opened.model)
            yield (
                recipe,
                str(seed),
                "gradual magnitude pruning",
                {OURS: ours, "gradual magnitude pruning": measured(model, opened)},
            )


def compared(seeds: dict[str, dict[str, dict[str, Tensor]]], other: str) -> dict[str, Any]:
    """Figures of a group over its seeds."""
    runs = list(seeds.values())

    def mean(net: str, form: str) -> Tensor:
        return torch.stack([run[net][form] for run in runs]).mean(0)

    nets = {
        net: {
            form: {
                "error": 100 * float(mean(net, form).mean()),
                "lost": 100 * float((mean(net, form) - mean(net, "float32")).mean()),
            }
            for form in runs[0][net]
        }
        for net in (OURS, other)
    }
    less = {}
    for form in runs[0][OURS]:
        theirs = form.partition(",")[0]
        if form == "float32" or theirs not in runs[0][other]:
            continue
        gap = 100 * (mean(OURS, form) - mean(OURS, "float32") - mean(other, theirs) + mean(other, "float32"))
        less[form] = [float(gap.mean()), *paired_means(gap)]
    return {"seeds": list(seeds), "other": other, "nets": nets, "less": less}


def table(results: dict[str, Any]) -> str:
    """Markdown: a section for each group."""
    lines = ["# Few bits after noise, and without", "", "Written by `benchmarks/noise_aware.py`, which says how.", ""]
    for group, one in results["groups"].items():
        other = one["other"]
        lines += [f"## {group}, seeds {', '.join(one['seeds'])}", ""]
        lines += [f"| form | ours: error % | lost | {other}: error % | lost | ours less |", "|---|---|---|---|---|---|"]
        for form, ours in one["nets"][OURS].items():
            theirs = one["nets"][other][form.partition(",")[0]]
            less = "{:+.2f} [{:+.2f}, {:+.2f}]".format(*one["less"][form]) if form in one["less"] else ""
            cells = [
                form,
                f"{ours['error']:.2f}",
                f"{ours['lost']:+.2f}",
                f"{theirs['error']:.2f}",
                f"{theirs['lost']:+.2f}",
                less,
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    names = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    return "\n".join([*lines, f"{results['machine']['cpu']}; {names}.", ""])


def main() -> None:
    """Measure the groups in order; results are written after each pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs of benchmarks/mnist.py")
    parser.add_argument("--recipe", nargs="*", default=["mnist-lenet300"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--real", nargs="*", default=[], help="cases of benchmarks/real.py")
    parser.add_argument("--resnet-runs", type=Path, help="folder of the runs of benchmarks/real.py")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.resnet_runs = options.resnet_runs and options.resnet_runs.resolve()
    torch.set_num_threads(1)
    known: dict[str, dict[str, Any]] = {}
    for group, seed, other, found in pairs(options):
        known.setdefault(group, {})[seed] = found
        results = read(options.results)
        results.setdefault("groups", {})[group] = compared(known[group], other)
        results |= {"machine": machine(), "versions": versions()}
        write(options.results, results)
        options.results.with_suffix(".md").write_text(table(results), encoding="utf-8")
        print(group, seed, flush=True)


if __name__ == "__main__":
    main()
