"""The last stages of a run: figures on the test data, the files, what they cost, their checks, the report."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import Any

from torch import nn

from svdcompress import cost, report
from svdcompress.errors import VerifyError
from svdcompress.pipeline import _figures
from svdcompress.pipeline._as_chosen import other_than_chosen
from svdcompress.pipeline._begin import Dense, Opened, Variational
from svdcompress.pipeline._changes import changes
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._late import Late
from svdcompress.pipeline._measure import BATCHES, THREADS
from svdcompress.pipeline._onnx import Files
from svdcompress.pipeline._outcome import hardly_faster, nothing_smaller, padded_in_code, slower_file, without_weights
from svdcompress.pipeline._passes import Passes
from svdcompress.pipeline._recall import lost_classes, recall
from svdcompress.pipeline._results import Side
from svdcompress.pipeline._skill import lost_skill
from svdcompress.pipeline._smaller import Small
from svdcompress.pipeline._uncertainty import seconds_for, uncertainty
from svdcompress.pipeline._verify import self_check, set_aside
from svdcompress.recipe import dump_recipe
from svdcompress.relevance import Masks, hold


@dataclass(frozen=True)
class Finished:
    """The models that figures are computed from. variational: the model before pruning. masks: what the pruning kept."""

    dense: Dense
    variational: Variational
    masks: Masks
    small: Small


def evaluate_stage(context: Context, opened: Opened, models: Finished) -> None:
    """Evaluate both models, on the test data for the first time, and count their sizes."""
    results, data, device = context.results, opened.data, context.place.device
    dense, small, variational = models.dense.model, models.small.model, models.variational
    passes = {model: Passes(model, data) for model in (dense, small)}

    def metrics(side: Side, model: nn.Module) -> None:
        with _figures.there(device, model):
            side.validation = passes[model].validation_metrics()
            side.metrics = passes[model].test_metrics()

    def count(side: Side, model: nn.Module) -> None:
        side.counts = cost.measure(model, opened.inputs)

    def compared() -> None:
        with _figures.there(device, dense, small):
            results.changes = changes(passes[dense], passes[small], data)

    def recalled() -> None:
        with _figures.there(device, dense, small):
            results.recall = recall(passes[dense], passes[small], data)

    def skill() -> None:
        before, after = results.dense.validation, results.sparse.validation
        if before and after and not context.recipe.loss.class_weights:  # which trade errors for those of rare classes
            said = lost_skill(before, after, data, context.recipe.search.wanted)
            results.warnings += [said] if said else []
            if said:
                return  # it has lost all classes but one
        if (said := lost_classes(results, context.recipe, data)) is not None:
            context.warn(said)

    def chosen() -> None:
        if (said := other_than_chosen(results, data)) is not None:
            context.warn(said)

    def layers() -> None:
        results.layers = _figures.layer_rows(variational.shapes, models.masks, dense, small, opened.inputs)

    def filters() -> None:
        results.filters = report.first_filters(dense, hold(variational.model, models.masks))

    for name, side, model in (("dense", results.dense, dense), ("sparse", results.sparse, small)):
        context.attempt(f"the {name} model on the test data", partial(metrics, side, model))
        context.attempt(f"the {name} model's size", partial(count, side, model))
    context.attempt("the intervals of the changes", compared)
    context.attempt("the recall of each class", recalled)
    context.attempt("one answer to all inputs", skill)
    context.attempt("the chosen trial", chosen)
    context.attempt("layers", layers)
    context.attempt("filters", filters)


def export_stage(context: Context, opened: Opened, models: Finished, late: Late) -> Files:
    """Write the ONNX files that the recipe asks for."""
    files = Files(context.recipe, opened.data, opened.inputs, context.out, context.results, context.warn)
    small = models.small.model
    if not context.recipe.export.onnx:
        return files
    if (known := late.known("export", small)) is not None:
        files.take(known)
        return files
    with late.keeping("export", small, lambda: sorted(context.out.glob("*.onnx*"))) as more:
        files.sparse(small)
        context.attempt("dense.onnx", partial(files.dense, models.dense.model))
        more |= files.told() if files.error is None else {"unfinished": True}
    return files


def figures_stage(context: Context, opened: Opened, models: Finished) -> None:
    """Figures of the predictive distribution."""
    settings, seconds = context.recipe.uncertainty, context.results.seconds
    if not settings.samples:
        return
    trained = sum(seconds.get(stage, 0.0) for stage in ("dense", "train", "search", "recover"))
    dense, small = models.dense.model, models.small.model

    def work() -> None:
        with _figures.there(context.place.device, dense, small):
            budget = seconds_for(settings.budget, trained)
            found = uncertainty(dense, small, opened.data, settings.samples, context.recipe.seed, budget)
        results = context.results
        results.uncertainty, results.calibration, results.uncertainty_of, results.doubts = found

    context.attempt("uncertainty", work)


def cost_stage(context: Context, opened: Opened, files: Files) -> None:
    """Latencies of the files, and all compression ratios."""
    results, recipe = context.results, context.recipe

    def work() -> None:
        results.compression = cost.compression(results.dense.to_dict(), results.sparse.to_dict())
        if len(files.written) == 2 and recipe.report.latency:
            paths = dict(files.written)
            paths |= files.small.measured if files.small else {}
            make_input = _figures.feed(opened.data, paths["dense"])
            own = recipe.search.latency_batch  # the batch size that the search was for is reported, too
            times = cost.latencies(paths, make_input, sorted({*BATCHES, own or BATCHES[0]}), threads=THREADS)
            results.dense.latency_ms, results.sparse.latency_ms = times["dense"], times["sparse"]
            if files.small:
                files.small.latencies(times, context.note)
            results.threads, results.clock = THREADS, cost.clock_name(THREADS)
            results.compression = cost.compression(results.dense.to_dict(), results.sparse.to_dict())
        results.warnings.extend(slower_file(results))
        results.warnings.extend(nothing_smaller(recipe, results, context.history))
        results.warnings.extend(hardly_faster(results, recipe.export.sets))
        results.warnings.extend(padded_in_code(results))
        for line in without_weights(results):
            context.note(line)

    context.attempt("latency and ratios", work)


def verify_stage(context: Context, opened: Opened, models: Finished) -> VerifyError | None:
    """Check the files as someone with nothing else would. Files that fail are renamed; returns the run's error, or None."""
    found = self_check(context.recipe, context.out, context.results.to_dict(), models.small.model, opened.data)
    context.results.verified = found.to_dict()
    for check in found.skipped:
        if not check.note.startswith("there is no"):
            context.warn(f"not checked: {check.file}: {check.name} ({check.note})")
    if not found.failed:
        return None
    wrong = set_aside(found)
    context.warn(str(wrong))
    return wrong


def report_stage(context: Context, opened: Opened) -> dict[str, Any]:
    """Write report.json and report.html; returns the content of the former."""
    recipe, out = context.recipe, context.out
    about = dict(
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
    stamp = report.stamped({}, out)
    results = {**context.results.to_dict(), **about, **stamp}
    report.write_json(out / "report.json", results)

    def pictures() -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")  # fonts and the like are not the user's business
            warnings.simplefilter("always", report.SectionWarning)
            report.write(out, results)
        for told in (each.message for each in caught):
            assert isinstance(told, report.SectionWarning)
            context.results.failed[f"report.html: {told.section}"] = told.reason
            context.warn(f"{told}; svdc report {out} --debug shows where it failed")

    if recipe.report.html:
        context.attempt("report.html", pictures)
        results = {**context.results.to_dict(), **about, **stamp}
        report.write_json(out / "report.json", results)  # again, with a failure to draw
    return results
