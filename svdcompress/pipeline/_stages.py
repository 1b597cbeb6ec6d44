"""The stages of a run, in order. Each continues from what a stopped run has left of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from svdcompress.pipeline._begin import Opened, convert_stage, dense_stage, open_stage, train_stage
from svdcompress.pipeline._calibrate import KEPT, calibrate_stage, measure_promises, promise_stage
from svdcompress.pipeline._columns import dropped
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._finish import (
    Finished,
    cost_stage,
    evaluate_stage,
    export_stage,
    figures_stage,
    report_stage,
    verify_stage,
)
from svdcompress.pipeline._late import Late
from svdcompress.pipeline._listening import listening
from svdcompress.pipeline._outcome import larger_file
from svdcompress.pipeline._passed_over import passed_over
from svdcompress.pipeline._recover import recover_stage
from svdcompress.pipeline._search import Search
from svdcompress.pipeline._search_start import for_objective
from svdcompress.pipeline._smaller import Small, keep, kept, prune_stage, tell_selection, threshold_stage
from svdcompress.train import on_first


def run_stages(context: Context) -> dict[str, Any]:
    """Run all stages; returns the contents of `report.json` (on the first process; {} on others)."""
    context.state.write_recipe(context.recipe)  # before the run can be stopped: from here on it can be resumed
    with context.stage("data"):
        opened = open_stage(context)
    with context.stage("dense"):
        dense = dense_stage(context, opened)
    with context.stage("convert"):
        context.recipe, said = for_objective(context.recipe)
        for line in [said, *passed_over(context.recipe)]:
            if line:
                context.note(line)
        variational = convert_stage(context, opened, dense)
    if context.recipe.search.wanted:
        with context.stage("search"):
            found = Search(context, opened, dense, variational).run()
            variational, selection, small = found.variational, found.selection, found.small
            tell_selection(context, variational, selection)
    else:
        with context.stage("train"):
            train_stage(context, opened, dense, variational)
        with context.stage("threshold"):
            selection = threshold_stage(context, opened, dense, variational)
        with context.stage("prune"):
            file = context.state.folder / "pruned.safetensors"
            small = prune_stage(context, opened, variational.model, selection.masks, file)
        with context.stage("recover"):
            if (fit := recover_stage(context, dense, variational, small, file)) is not None:
                context.history += fit.history
                context.results.recover_lr = fit.lr_instead
    context.results.pruning = {name: value for name, value in small.pruning.items() if name not in ("surgery", "outputs_kept")}
    if (gone := dropped(opened.data.preprocessing, small.pruning.get("inputs_kept"), opened.inputs)) is not None:
        context.results.pruning["columns_dropped"] = gone
        context.note(f"columns that the model no longer reads: {', '.join(gone) or 'none'} (prune.remove_inputs)")
    models = Finished(dense, variational, selection.masks, small)
    return on_first(context.place, partial(_last_stages, context, opened, models)) or {}


def _last_stages(context: Context, opened: Opened, models: Finished) -> dict[str, Any]:
    """What one process does alone; returns the contents of `report.json`."""
    late = Late(context, opened.data, models.dense.model)
    stopped = partial(context.check, "before the run's figures were done; what was trained is kept")
    heard = replace(opened, data=listening(opened.data, stopped))
    with context.stage("calibrate"):
        small = _calibrated(context, heard, models.small, late)
    models = replace(models, small=small)
    with context.stage("evaluate"):
        if late.known("evaluate", small.model) is None:
            with late.keeping("evaluate", small.model):
                evaluate_stage(context, heard, models)
    with context.stage("export"):
        files = export_stage(context, opened, models, late)
        for line in larger_file(context.results):  # not stored with the stage, as each sitting finds it again
            context.warn(line)
    with context.stage("figures"):  # from here on, only figures are missing
        if late.known("figures", small.model) is None:
            with late.keeping("figures", small.model):
                figures_stage(context, heard, models)
                context.attempt("the promises on the test data", partial(measure_promises, context, heard, small))
    with context.stage("cost"):
        cost_stage(context, opened, files)
    with context.stage("verify"):
        wrong = verify_stage(context, heard, models)
    with context.stage("report"):
        written = report_stage(context, opened)
    if not wrong:
        context.state.finish()
    else:  # a resumed run can then write the files again
        late.forget()
    if failed := wrong or files.error:
        raise failed
    return written


def _calibrated(context: Context, opened: Opened, small: Small, late: Late) -> Small:
    """Calibrate the small model and write model.safetensors; returns the model as the run's files contain it."""
    if late.known("calibrate", small.model) is not None:
        return kept(context, small)
    with late.keeping("calibrate", small.model, lambda: [context.out / name for name in ("model.safetensors", KEPT)]):
        done = calibrate_stage(context, opened, small)
        keep(context, opened, done)
        context.attempt("what validation data promise", partial(promise_stage, context, opened, done))
    return done
