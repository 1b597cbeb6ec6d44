"""The last stages of a run: figures on the test data, the files, what they cost, their checks, the report."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import Any

from torch import nn

from svdcompress import cost, report
from svdcompress.errors import VerifyError
from svdcompress.pipeline import _figures
from svdcompress.pipeline._begin import Dense, Opened, Variational
from svdcompress.pipeline._changes import changes
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._onnx import Files
from svdcompress.pipeline._outcome import nothing_smaller
from svdcompress.pipeline._smaller import Small
from svdcompress.pipeline._uncertainty import seconds_for, uncertainty
from svdcompress.pipeline._verify import self_check, set_aside
from svdcompress.recipe import dump_recipe
from svdcompress.relevance import Masks, hold


@dataclass(frozen=True)
class Finished:
    """The models that the figures are of; variational: the large one, its masks held."""

    dense: Dense
    variational: Variational
    masks: Masks
    small: Small

    @property
    def pair(self) -> dict[str, nn.Module]:
        """Dense and sparse, by what the report calls them."""
        return {"dense": self.dense.model, "sparse": self.small.model}


def evaluate_stage(context: Context, opened: Opened, models: Finished) -> None:
    """The first look at the test data, and counts."""
    results, data, device = context.results, opened.data, context.place.device
    dense, small, variational = models.dense.model, models.small.model, models.variational

    def metrics(name: str, model: nn.Module) -> None:
        with _figures.there(device, model):
            results[name]["validation"] = models.dense.trainer.metrics(model)
            results[name]["metrics"] = _figures.test_metrics(model, data)

    def count(name: str, model: nn.Module) -> None:
        results[name].update(cost.measure(model, opened.inputs).to_dict())

    def compared() -> None:
        with _figures.there(device, dense, small):
            results["changes"] = changes(dense, small, data, device)

    def keep(name: str, make: Callable[[], Any]) -> None:
        results[name] = make()

    for name, model in models.pair.items():
        results[name] = {}
        context.attempt(f"the {name} model on the test data", partial(metrics, name, model))
        context.attempt(f"the {name} model's size", partial(count, name, model))
    context.attempt("the intervals of the changes", compared)
    rows = partial(_figures.layer_rows, variational.shapes, models.masks, dense, small, opened.inputs)
    context.attempt("layers", partial(keep, "layers", rows))
    held = partial(hold, variational.model, models.masks)
    context.attempt("filters", partial(keep, "filters", lambda: report.first_filters(dense, held())))


def export_stage(context: Context, opened: Opened, models: Finished) -> Files:
    """The ONNX files, as far as the recipe asks for them."""
    files = Files(context.recipe, opened.data, opened.inputs, context.out, context.results, context.warn)
    if context.recipe.export.onnx:
        files.sparse(models.small.model)
        context.attempt("dense.onnx", partial(files.dense, models.dense.model))
    return files


def figures_stage(context: Context, opened: Opened, models: Finished) -> None:
    """Figures of the predictive distribution."""
    settings, seconds = context.recipe.uncertainty, context.results["seconds"]
    if not settings.samples:
        return
    trained = sum(seconds.get(stage, 0.0) for stage in ("dense", "train", "search", "recover"))
    dense, small = models.pair.values()

    def work() -> None:
        with _figures.there(context.place.device, dense, small):
            budget = seconds_for(settings.budget, trained)
            found = uncertainty(dense, small, opened.data, settings.samples, context.recipe.seed, budget)
        context.results.update(found)

    context.attempt("uncertainty", work)


def cost_stage(context: Context, opened: Opened, files: Files) -> None:
    """Latencies of the files, and all ratios."""
    results, recipe = context.results, context.recipe

    def work() -> None:
        results["compression"] = cost.compression(results["dense"], results["sparse"])
        if len(files.written) == 2 and recipe.report.latency:
            paths = {name: file.path for name, file in files.written.items()}
            paths |= files.small.measured if files.small else {}
            make_input = _figures.feed(opened.data, paths["dense"])
            times = cost.latencies(paths, make_input)
            for name in files.written:
                results[name]["latency_ms"] = times[name]
            if files.small:
                files.small.latencies(times, context.note)
            results["threads"] = 1
            results["compression"] = cost.compression(results["dense"], results["sparse"])
        results.setdefault("warnings", []).extend(nothing_smaller(recipe, results, context.history))

    context.attempt("latency and ratios", work)


def verify_stage(context: Context, opened: Opened, models: Finished) -> VerifyError | None:
    """Look at the files as somebody who has nothing else would. What is wrong gets another name, and is the run's error."""
    found = self_check(context.recipe, context.out, context.results, models.small.model, opened.data)
    context.results["verified"] = found.to_dict()
    for check in found.skipped:
        if not check.note.startswith("there is no"):
            context.warn(f"not checked: {check.file}: {check.name} ({check.note})")
    if not found.failed:
        return None
    wrong = set_aside(found)
    context.warn(str(wrong))
    return wrong


def report_stage(context: Context, opened: Opened) -> None:
    """report.json and report.html."""
    recipe, results, out = context.recipe, context.results, context.out
    results.update(
        name=out.name,
        description=recipe.description,
        task=recipe.task,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        examples={name: len(getattr(opened.data, name)) for name in ("train", "validation", "test")},
        history=context.history,
        recipe=dump_recipe(recipe),
        seed=recipe.seed,
        device=str(context.place.device),
        processes=context.place.world,
        versions=_figures.versions(),
    )
    results.update(report.stamped(results, out))
    report.write_json(out / "report.json", results)

    def draw() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fonts and the like are not the user's business
            report.write(out, results)

    if recipe.report.html:
        context.attempt("report.html", draw)
        report.write_json(out / "report.json", results)  # with what the drawing had to say
