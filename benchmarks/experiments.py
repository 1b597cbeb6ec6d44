"""Runs the lectures' experiments at the size of their recipes: figures as tables, pictures as small PNGs.

    python benchmarks/experiments.py --data FOLDER_OF_THE_IDX_FILES [--only leak --only ...] [--runs FOLDER]

They run one after another, smallest first, each through `svdc sparsify` with one thread; a finished one is not repeated.
After each, benchmarks/results/experiments.json and experiments.md are written again, and its pictures go to
results/experiments/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from svdcompress.experiments._rotated_digit import surest_mistake

HERE = Path(__file__).resolve().parent
NAMES = ("bayes-linear", "leak", "flow", "vae", "rotated-digit", "co2")
DIGITS = ("vae", "rotated-digit")
"""The experiments that need MNIST."""


def run(name: str, data: str | None, runs: Path) -> dict[str, Any] | None:
    """The report of one experiment, from its folder if it is there already; None if it failed or has no data."""
    out = runs / name
    if not (out / "report.json").is_file():
        if name in DIGITS and data is None:
            print(f"{name}: needs --data", file=sys.stderr)
            return None
        shutil.rmtree(out, ignore_errors=True)  # left by an interrupted run: an experiment starts over
        command = [
            sys.executable,
            "-m",
            "svdcompress",
            "sparsify",
            str(HERE.parent / "recipes" / f"{name}.yaml"),
            "--out",
            str(out),
        ]
        command += ["--data", f"mnist:{data}"] if name in DIGITS else []
        if subprocess.run(command, cwd=HERE.parent, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode:
            return None
    return json.loads((out / "report.json").read_text(encoding="utf-8"))


def bayes_linear(report: dict[str, Any]) -> list[str]:
    lines = ["| design | largest difference of a mean from the exact one, in its standard deviations | "]
    lines[0] += "variance over the exact one | over that of a weight with the others known | kept of 8 |"
    lines.append("|---|---:|---:|---:|---:|")
    for name, design in report["designs"].items():
        triples = list(zip(design["mean"], design["exact_mean"], design["exact_variance"], strict=True))
        shift = max(abs(mean - exact) / variance**0.5 for mean, exact, variance in triples)
        spans = []
        for other in ("exact_variance", "conditional_variance"):
            ratios = [a / b for a, b in zip(design["variance"], design[other], strict=True)]
            spans.append(f"{min(ratios):.2f} to {max(ratios):.2f}")
        lines.append(f"| {name} | {shift:.3f} | {spans[0]} | {spans[1]} | {sum(design['kept'])} |")
    if "curve" in report:
        lines += curve(report)
    return lines


def curve(report: dict[str, Any]) -> list[str]:
    nets = report["curve"]
    heads = list(next(iter(nets.values())))
    text = "A curve with a gap: the share of it within each net's 95% band, without noise, and the band's standard deviation."
    lines = ["", text, "", f"| net | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    for name, net in nets.items():
        cells = [f"{100 * value:.0f}%" if head.startswith("coverage") else f"{value:.3f}" for head, value in net.items()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    found = report["curve_sparsity"]
    return [*lines, "", f"The sparse net keeps {found['kept']:,} of {found['weights']:,} weights."]


def flow(report: dict[str, Any]) -> list[str]:
    lines = [
        "| estimate from the sensors | error, over what varies | velocities within the 95% band | its standard deviation |"
    ]
    lines.append("|---|---:|---:|---:|")
    for name, model in report["models"].items():
        lines.append(f"| {name} | {model['relative_error']:.3f} | {100 * model['covered']:.1f}% | {model['std']:.3f} |")
    return [*lines, "", f"Sparse model: {report['sparsity']['kept']:,} of {report['sparsity']['weights']:,} weights."]


def leak(report: dict[str, Any]) -> list[str]:
    lines = ["| net | leak of | AUROC | leak probability | its standard deviation | before the onset | after |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for name, net in report["nets"].items():
        for size, scores in net["tonnes"].items():
            onset = report["onset"][name][size]
            area = f"{scores['auroc']:.3f}" if "auroc" in scores else "-"
            row = f"| {name} | {int(size):,} t | {area} | {scores['probability']:.3f} | {scores['std']:.3f} "
            lines.append(row + f"| {onset['before']:.3f} | {onset['after']:.3f} |")
    if "signal_to_noise" in report:
        ratios = [
            f"{int(size):,} t {entry['snr_db']:+.1f} dB ({entry['snr_differences_db']:+.1f} dB)"
            for size, entry in report["signal_to_noise"].items()
        ]
        lines += ["", f"Variance of the leak's CO2 over nature's, in brackets of the differences: {', '.join(ratios)}."]
    lines += [
        "",
        f"Sparse net: {report['sparsity']['kept']:,} of {report['sparsity']['weights']:,} weights. Scores over all series:",
    ]
    return [*lines, "", *_scores(report["nets"])]


def vae(report: dict[str, Any]) -> list[str]:
    lines = ["| model | bound, nats | mean squared error | from few pixels | its standard deviation | within two of these |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for name, model in report["models"].items():
        row = f"| {name} | {model['bound']:.1f} | {model['mse']:.4f} | {model['few_mse']:.4f} | {model['few_std']:.3f} "
        lines.append(row + f"| {100 * model['few_covered']:.1f}% |")
    return [*lines, "", f"Sparse model: {report['sparsity']['kept']:,} of {report['sparsity']['weights']:,} weights."]


def rotated_digit(report: dict[str, Any]) -> list[str]:
    turned, degrees = report["turned"], report["turned"]["degrees"]
    shown = [place for place, angle in enumerate(degrees) if round(angle) % 30 == 0]
    lines = ["| | " + " | ".join(f"{degrees[place]:.0f}°" for place in shown) + " |", "|---|" + "---:|" * len(shown)]
    sampled = [name for name in ("MC dropout", "sparse variational", "sparse, widened") if name in turned]
    for name in sampled:
        rows = {"mutual information": "mutual_information", "confidence": "confidence"}
        for label, key in rows.items():
            lines.append(f"| {name}, {label} | " + " | ".join(f"{turned[name][key][place]:.3f}" for place in shown) + " |")
    lines.append("| dense, confidence | " + " | ".join(f"{turned['dense']['confidence'][place]:.3f}" for place in shown) + " |")
    for name in ("dense", *sampled):
        lines.append(f"| {name}, digit seen | " + " | ".join(str(turned[name]["label"][place]) for place in shown) + " |")
    mistakes = []
    for name in ("dense", *sampled):
        found = surest_mistake(turned[name], degrees)
        if found:
            mistakes.append(f"{name} a {found['label']} at {found['degrees']:.0f}° ({found['confidence']:.2f} sure)")
    lines += ["", f"Surest and wrong: {', '.join(mistakes)}."] if mistakes else []
    if "widened" in report:
        factor = report["widened"]["factor"]
        lines += ["", f"Widened: variances times {factor:g}, the most that held-out digits do not speak against."]
    lines += [
        "",
        f"Sparse net: {report['sparsity']['kept']:,} of {report['sparsity']['weights']:,} weights. On the test digits:",
    ]
    return [*lines, "", *_scores(report["calibration"])]


def co2(report: dict[str, Any]) -> list[str]:
    lines = [
        "| net | RMSE, known months | held back | band, known months | held back | beyond the record | coverage, held back |"
    ]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for name, net in report["nets"].items():
        keys = ("rmse_known_ppm", "rmse_held_back_ppm", "band_known_ppm", "band_held_back_ppm", "band_beyond_ppm")
        cells = [*(f"{net[key]:.2f}" for key in keys), f"{100 * net['coverage_held_back']:.0f}%"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    text = "In ppm; a band is the net's standard deviation. Coverage: the months held back that lie within the 95% intervals, "
    text += f"noise included; 95% would be right. Sparse net: {report['sparsity']['kept']:,} of "
    return [*lines, "", text + f"{report['sparsity']['weights']:,} weights."]


TABLES: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "bayes-linear": bayes_linear,
    "leak": leak,
    "flow": flow,
    "vae": vae,
    "rotated-digit": rotated_digit,
    "co2": co2,
}


def _scores(nets: dict[str, Any]) -> list[str]:
    lines = ["| net | error | NLL | Brier | ECE |", "|---|---:|---:|---:|---:|"]
    for name, scores in nets.items():
        lines.append(f"| {name} | {scores['error']:.2f}% | {scores['nll']:.3f} | {scores['brier']:.3f} | {scores['ece']:.4f} |")
    return lines


def machine() -> dict[str, Any]:
    """The machine and versions that a run was made with."""
    import torch

    name = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor())
    return {"cpu": name, "cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}


def _cpuinfo() -> list[str]:
    file = Path("/proc/cpuinfo")
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []


def write(reports: dict[str, dict[str, Any]], results: Path, runs: Path) -> None:
    """Write experiments.json and experiments.md, and copy the pictures next to them."""
    for sizes in reports.get("leak", {}).get("onset", {}).values():  # hundreds of numbers that the picture shows
        for size in sizes.values():
            size.pop("track", None)
    (results / "experiments").mkdir(parents=True, exist_ok=True)
    (results / "experiments.json").write_text(json.dumps(reports, indent=1) + "\n", encoding="utf-8")
    text = [
        "# The lectures' experiments, at the size of their recipes",
        "",
        "Made by `python benchmarks/experiments.py --data FOLDER`.",
    ]
    for name, report in reports.items():
        made = report["machine"]
        seconds = report["seconds"]  # of each stage; a single number in older reports
        seconds = sum(seconds.values()) if isinstance(seconds, dict) else seconds
        settings = ", ".join(f"{key} {value}" for key, value in report["settings"].items())
        text += [
            "",
            f"## {name}",
            "",
            f"{settings}; seed {report['seed']}. {seconds:.0f} s on one core of {made['cpu']}",
        ]
        text[-1] += f" (torch {made['torch']}, Python {made['python']}), beside other work."
        text += ["", *TABLES[name](report)]
        for picture in report.get("plots") or [each["file"] for each in report["pictures"]]:
            if (runs / name / picture).is_file():
                shutil.copyfile(runs / name / picture, results / "experiments" / picture)
            text += ["", f"![{name}](experiments/{picture})"]
    (results / "experiments.md").write_text("\n".join(text) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", help="folder of MNIST's IDX files")
    parser.add_argument("--only", action="append", choices=NAMES, help="this experiment (may be given again)")
    parser.add_argument("--runs", type=Path, default=Path("runs/experiments"), help="where the runs' folders go")
    given = parser.parse_args()
    results, runs = HERE / "results", given.runs.absolute()
    stored = results / "experiments.json"
    reports = json.loads(stored.read_text(encoding="utf-8")) if stored.is_file() else {}
    for name in given.only or NAMES:
        report = run(name, given.data, runs)
        if report is not None:
            reports[name] = {**report, "machine": machine()}
            write({key: reports[key] for key in NAMES if key in reports}, results, runs)


if __name__ == "__main__":
    main()
