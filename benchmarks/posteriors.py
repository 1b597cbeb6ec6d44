"""Which posterior of a small network pays off: all of them on existing runs, on validation and test data.

    python benchmarks/posteriors.py RUN [RUN ...] [--samples 50] [--again] [--leave-out by-layer refit laplace]

Each row is a posterior with the temperature that was fitted together with it on the run's validation data. "held": the NLL of
these data by five-fold cross-validation, by which a choice would be made; test: NLL, ECE (15 bins), error in percent; "less":
the test NLL minus that of the mean with its temperature, with its 95% interval over the test examples. Written to
benchmarks/results/posteriors.json and posteriors.md after each row; stored runs are not measured again without --again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from svdcompress.calibrate import Curvature, Draws
from svdcompress.likelihoods import Likelihood, likelihood_for
from svdcompress.pipeline import open_run, versions
from svdcompress.sources import Data
from svdcompress.uncertainty import paired_means, quality

c: Any = importlib.import_module("svdcompress.calibrate")  # the package also has a function of this name

RESULTS = Path(__file__).resolve().parent / "results"
PRIORS = tuple(float(step) for step in range(-2, 13))
REFITS = (1.0, 0.1, 0.01)
LARGE = 5000
"""From this many training examples on, a refit has 5 epochs instead of 20; curvatures use at most this many."""

Row = tuple[str, Draws, Draws, float, float, dict[str, Any]]
"""Name, validation draws, test draws, log temperature, held NLL, what else was fitted."""


def rows(folder: Path, samples: int, out: list[str]) -> Iterator[Row]:
    """All contenders of a run, except for the groups that are left out."""
    opened = open_run(folder)
    data, model = opened.data, opened.model
    likelihood = likelihood_for(data.task, data.dim)
    for name, one in (("dense", opened.dense), ("mean", model)):
        yield from tempered(name, one, data, likelihood, 0)
    yield from tempered("samples", model, data, likelihood, samples)
    yield from scaled("samples", model, data, likelihood, samples, (False,) if "by-layer" in out else (False, True))
    epochs = 20 if len(data.train) < LARGE else 5
    for beta in () if "refit" in out else REFITS:
        other = c.refit(model, data.train, likelihood, epochs=epochs, beta=beta)
        name = f"refit, beta {beta:g}"
        yield from list(tempered(f"{name}, mean", other, data, likelihood, 0))[1:]
        yield from scaled(name, other, data, likelihood, samples, by_layer=(False,))
    if "laplace" not in out:
        with c.held(model):
            yield from laplace(model, data, likelihood, samples)


def tempered(name: str, model: nn.Module, data: Data, likelihood: Likelihood, samples: int) -> Iterator[Row]:
    """A model as it is, and with its fitted temperature."""
    held, test = (c.draws_of(model, part, likelihood, samples) for part in (data.validation, data.test))
    plain = float(c.nll_rows(likelihood, held, 0.0).mean())
    yield name, held, test, 0.0, plain, {}
    fitted = c.fit_setting(lambda _: held, likelihood, (0.0,))
    yield f"{name}, temperature", held, test, fitted.log_knob, fitted.judged, {}


def scaled(
    name: str, model: nn.Module, data: Data, likelihood: Likelihood, samples: int, by_layer: tuple[bool, ...] = (False, True)
) -> Iterator[Row]:
    """A model with its variances multiplied by fitted scales: one scale for all layers, or one for each."""
    for each in by_layer:
        with c.held(model):
            scales, fitted = c.fit_scale(model, data.validation, likelihood, samples, by_layer=each)
            base = c.log_variances(model)
            c.with_scales(model, base, scales)
            held, test = (c.draws_of(model, part, likelihood, samples) for part in (data.validation, data.test))
            c.with_scales(model, base, dict.fromkeys(base, 0.0))
        more = {"scale": {layer: math.exp(log) for layer, log in scales.items()}}
        yield f"{name}, scaled{' by layer' if each else ''}", held, test, fitted.log_knob, fitted.judged, more


def laplace(model: nn.Module, data: Data, likelihood: Likelihood, samples: int) -> Iterator[Row]:
    """Laplace approximations, by joint draws of the weights."""
    kept = c.kept_of(model)
    most = min(LARGE, len(data.train))
    made: dict[str, Callable[[], Curvature]] = {
        name: (lambda name=name: c.gauss_newton(model, kept, data.train, likelihood, name, most=most))
        for name in ("diagonal", "last-layer", "full")
    }
    made["Kronecker"] = lambda: c.kronecker(model, kept, data.train, likelihood, most=most)
    for name, make in made.items():
        curvature = make()
        posteriors: dict[str, Callable[[float], Any]] = {
            name: lambda prior, curvature=curvature: c.Joint(kept, curvature, math.exp(prior))
        }
        if name == "full":
            for rank in (16, 64):
                posteriors[f"low rank {rank}"] = lambda prior, rank=rank, curvature=curvature: c.LowRank(
                    kept, *c.low_rank(curvature, rank, math.exp(prior))
                )
        for form, posterior in posteriors.items():

            def draw(prior: float, part: Any, posterior: Any = posterior) -> Draws:
                return c.joint_draws(model, posterior(prior), part, likelihood, samples)

            fitted = c.fit_setting(lambda prior, draw=draw: draw(prior, data.validation), likelihood, PRIORS)
            held, test = draw(fitted.setting, data.validation), draw(fitted.setting, data.test)
            more = {"prior precision": math.exp(fitted.setting), "weights": len(kept)}
            yield f"Laplace, {form}", held, test, fitted.log_knob, fitted.judged, more


def measured(folder: Path, samples: int, out: list[str], keep: Callable[[dict[str, Any]], None]) -> None:
    """Measure all rows of a run; `keep` gets them, JSON-able, after each one."""
    found: dict[str, Any] = {}
    reference = None
    started = time.perf_counter()
    likelihood = likelihood_for("classification")
    for name, _, test, log_t, held, more in rows(folder, samples, out):
        p = (test.outputs.double() * math.exp(-log_t)).softmax(-1).mean(0)
        nll = c.nll_rows(likelihood, test, log_t)
        reference = nll if name == "mean, temperature" else reference
        row = {**quality(p, test.targets), "held": held, "temperature": math.exp(log_t), **more}
        if reference is not None and nll is not reference:
            row["less"] = [float((nll - reference).mean()), *paired_means(nll - reference)]
        row["seconds"] = time.perf_counter() - started
        found[name] = row
        print(f"{folder.name}: {name}: held {held:.4f} test {row['nll']:.4f} ece {row['ece']:.4f}", flush=True)
        keep(found)
        started = time.perf_counter()


def table(results: dict[str, Any]) -> str:
    """The results of all runs as Markdown."""
    lines = ["# Posteriors of small networks", "", "Written by `benchmarks/posteriors.py`."]
    together: dict[str, list[dict[str, Any]]] = {}
    for run, found in results["runs"].items():
        together.setdefault(run.rpartition("-")[0], []).append(found["rows"])
    for recipe, runs in together.items():
        if len(runs) > 1:
            lines += ["", f"## {recipe}, means of {len(runs)} runs", "", "| posterior | held NLL | test NLL | ECE | error |"]
            lines.append("|---|---|---|---|---|")
            for name in runs[0]:
                mean = {key: sum(rows[name][key] for rows in runs) / len(runs) for key in ("held", "nll", "ece", "error")}
                lines.append(f"| {name} | {mean['held']:.4f} | {mean['nll']:.4f} | {mean['ece']:.4f} | {mean['error']:.2f}% |")
    for run, found in results["runs"].items():
        lines += ["", f"## {run}", "", "| posterior | temperature | held NLL | test NLL | less than the mean | ECE | error |"]
        lines.append("|---|---|---|---|---|---|---|")
        for name, row in found["rows"].items():
            less = row.get("less")
            told = f"{less[0]:+.4f} ({less[1]:+.4f} to {less[2]:+.4f})" if less else ""
            figures = f"{row['temperature']:.2f} | {row['held']:.4f} | {row['nll']:.4f} | {told} | {row['ece']:.4f}"
            lines.append(f"| {name} | {figures} | {row['error']:.2f}% |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--again", action="store_true", help="measure runs again that are there")
    parser.add_argument("--leave-out", nargs="*", default=[], choices=["by-layer", "refit", "laplace"])
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    file = RESULTS / "posteriors.json"
    results = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"runs": {}}
    for folder in given.runs:
        if folder.name in results["runs"] and not given.again:
            continue

        def keep(found: dict[str, Any], folder: Path = folder) -> None:
            results["runs"][folder.name] = {"samples": given.samples, "versions": versions(), "rows": found}
            file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            (RESULTS / "posteriors.md").write_text(table(results), encoding="utf-8")

        measured(folder, given.samples, given.leave_out, keep)


if __name__ == "__main__":
    main()
