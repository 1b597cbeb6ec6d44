"""What a short fine-tuning through the command does to trained networks, with former and with today's default prior groups.

    python benchmarks/pretrained.py --resnet FOLDER --cifar FOLDER [--only NAME ...] [--runs runs/benchmarks/pretrained]

The folder of --resnet holds resnet20-12fca82f.th of akamaster/pytorch_resnet_cifar10, that of --cifar train.tar.gz and
test.tar.gz. The network was trained on all of CIFAR-10's training images; it is fine-tuned on 6,000 of them for five epochs,
with one fixed half of the test images for choices and the other for the reported figures. The small BERT is trained here, for
a minute (benchmarks/models/tokens.py), and fine-tuned with learning rates as for a large one. A finished run is not repeated,
and a stopped one is resumed; results are written after each to benchmarks/results/pretrained.json and pretrained.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from mnist import cpu, read
from models import tokens
from torch import nn

HERE = Path(__file__).resolve().parent
NORMALIZE = "{normalize: {mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225]}}"
PLAIN = ["uncertainty.samples=0", "report.latency=false", "export.monte_carlo=false", "recover.epochs=2"]
MIX = "convert.share={weight: 0.8, input: 0.1, output: 0.1}"
BERT = [MIX, "train.batch_size=25", "recover.batch_size=25", "recover.lr=1e-4"]
CASES: dict[str, tuple[str, list[str]]] = {
    "resnet20-weight": ("ResNet-20, share weight", ["convert.share=weight"]),
    "resnet20-output": ("ResNet-20, share output", ["convert.share=output"]),
    "resnet20-mix": ("ResNet-20, 0.8 weight, 0.1 input, 0.1 output", [MIX]),
    "resnet20-default": ("ResNet-20, the default (0.8 weight, 0.2 input)", []),
    "bert-2e-5": ("BERT, lr 2e-5", [*BERT, "train.lr=2e-5"]),
    "bert-2e-5-threshold": ("BERT, lr 2e-5, threshold 0", [*BERT, "train.lr=2e-5", "convert.threshold=0"]),
    "bert-2e-4": ("BERT, lr 2e-4", [*BERT, "train.lr=2e-4"]),
}


def arguments(name: str, settings: list[str], options: argparse.Namespace) -> list[str]:
    """The command's arguments for one case."""
    if name.startswith("bert"):
        made = ["--model", str(HERE / "models" / "tokens.py:bert"), "--data", str(HERE / "models" / "tokens.py:data")]
        made += ["--data-arg", "train=1500", "--weights", str(bert(options.runs))]
    else:
        data = ["--data-arg", f"folder={options.cifar}", "--data-arg", f"cache={options.runs / 'cifar.npz'}"]
        made = ["--model", str(HERE / "models" / "resnet_cifar.py:resnet20"), "--weights", str(options.resnet)]
        made += ["--data", str(HERE / "models" / "cifar10.py:data"), *data]
        settings = [f"data.transform=[{NORMALIZE}]", "data.augment=[{crop: 4}, flip]", *settings]
    return [*made, "--epochs", "5", "--device", "cpu", *(part for each in (*PLAIN, *settings) for part in ("--set", each))]


def bert(runs: Path) -> Path:
    """The file of the trained BERT's weights, which the first call makes."""
    file = runs / "bert.safetensors"
    if not file.is_file():
        from svdcompress.sources import save_weights

        torch.manual_seed(0)
        model, steps = tokens.bert(), 500
        optimizer = torch.optim.AdamW(model.parameters(), 5e-4)
        for step in range(steps):
            x, y = tokens.examples(64, 1000 + step)
            for group in optimizer.param_groups:
                group["lr"] = 5e-4 * min(1, step / 100, (steps - step) / 200)
            nn.functional.cross_entropy(model(**x).logits, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        save_weights(model, file)
    return file


def run(name: str, settings: list[str], options: argparse.Namespace) -> dict[str, Any] | None:
    """The report of one run, from its folder if it is there already; None if it failed."""
    out = options.runs / name
    if not (out / "report.json").is_file():
        command = [sys.executable, "-m", "svdcompress", "sparsify", "--out", str(out)]
        command += ["--resume"] if (out / "recipe.yaml").is_file() else arguments(name, settings, options)
        if subprocess.run(command, cwd=HERE.parent).returncode:
            return None
    return json.loads((out / "report.json").read_text(encoding="utf-8"))


def figures(report: dict[str, Any]) -> dict[str, Any]:
    """What the table needs from one run's report."""
    dense, sparse, layers = report["dense"], report["sparse"], report["layers"]
    trained = [row for row in report["history"] if row["stage"] == "train"]
    return {
        "error": sparse["metrics"]["error"],
        "dense_error": dense["metrics"]["error"],
        "validation": {name: side["validation"]["error"] for name, side in (("dense", dense), ("sparse", sparse))},
        "gone": 1 - sum(layer["weights"] for layer in layers) / sum(layer["weights_before"] for layer in layers),
        "parameters": [dense["parameters"], sparse["parameters"]],
        "macs": [dense["macs"], sparse["macs"]],
        "epochs": [{key: row[key] for key in ("sparsity", "nll", "val_error")} for row in trained],
        "reach": report.get("reach"),
        "warnings": report.get("warnings") or [],
        "seconds": round(sum(report["seconds"].values())),
    }


def table(found: dict[str, dict[str, Any]], facts: dict[str, Any]) -> str:
    """Markdown: a row for each run."""
    lines = ["# Trained networks, fine-tuned shortly", "", "Written by `benchmarks/pretrained.py`; one run each.", ""]
    lines += ["| run | weights gone | parameters | MACs | error % (dense) | within reach, seen before | wall-clock |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, one in found.items():
        sizes, macs = one["parameters"], one["macs"]
        within = f"{100 * one['reach']['within']:.0f}%" if one["reach"] else ""
        cells = [CASES[name][0], f"{100 * one['gone']:.0f}%", f"{sizes[0]:,} to {sizes[1]:,}"]
        cells += [f"{macs[0] / 1e6:.1f} M to {macs[1] / 1e6:.1f} M", f"{one['error']:.2f} ({one['dense_error']:.2f})"]
        lines.append(f"| {' | '.join([*cells, within, '%.0f min' % (one['seconds'] / 60)])} |")
    lines += ["", f"{facts['cpu']}, {facts['cores']} cores, one thread, beside other work: take times as upper bounds.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resnet", type=Path, help="resnet20-12fca82f.th, or the folder that holds it")
    parser.add_argument("--cifar", type=Path, help="folder of train.tar.gz and test.tar.gz")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--runs", type=Path, default=HERE.parent / "runs" / "benchmarks" / "pretrained")
    options = parser.parse_args()
    options.runs = options.runs.resolve()
    options.runs.mkdir(parents=True, exist_ok=True)
    if options.resnet is not None and options.resnet.is_dir():
        options.resnet = options.resnet / "resnet20-12fca82f.th"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found, failed = {}, []
    for name, (_, settings) in CASES.items():
        there = (options.runs / name / "report.json").is_file()
        if not there and (name not in options.only or (name.startswith("resnet") and not (options.resnet and options.cifar))):
            continue
        report = run(name, settings, options)
        if report is None:
            failed.append(name)
            continue
        found[name] = figures(report)
        known = read(HERE / "results" / "pretrained.json").get("runs", {}) | found  # keeps the results of other calls
        found = {each: known[each] for each in CASES if each in known}
        facts = {"cpu": cpu(), "cores": os.cpu_count(), "versions": report["versions"]}
        text = json.dumps({"machine": facts, "runs": found}, indent=1) + "\n"
        (HERE / "results" / "pretrained.json").write_text(text, encoding="utf-8")
        (HERE / "results" / "pretrained.md").write_text(table(found, facts), encoding="utf-8")
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
