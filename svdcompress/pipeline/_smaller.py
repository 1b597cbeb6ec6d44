"""From a trained variational model to a small one: threshold and prune; each step can be repeated with other choices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from svdcompress import checkpoint, report
from svdcompress.errors import CheckpointError
from svdcompress.likelihoods import likelihood_for, likelihood_of, set_likelihood
from svdcompress.pipeline import _figures
from svdcompress.pipeline._begin import Dense, Opened, Variational
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._damaged import cured
from svdcompress.pipeline._passes import Passes
from svdcompress.pipeline._round import rounded
from svdcompress.pipeline._select import bare, whole
from svdcompress.prune import prune
from svdcompress.relevance import Masks
from svdcompress.selection import Selection, check_some_left, choose
from svdcompress.sources import make_model
from svdcompress.train import on_first


@dataclass(frozen=True)
class Small:
    """A pruned model that takes whole inputs, and the report of its pruning."""

    model: nn.Module
    pruning: dict[str, Any]


def threshold_stage(context: Context, opened: Opened, dense: Dense, variational: Variational) -> Selection:
    """What stays, by the recipe. Raises PruneError if nothing does."""
    chosen = choose(variational.model, context.recipe, dense.trainer.validate, opened.inputs)
    tell_selection(context, variational, chosen)
    check_some_left(variational.model, chosen.masks, opened.data.validation)
    return chosen


def tell_selection(context: Context, variational: Variational, chosen: Selection) -> None:
    """Put what the report says about a choice into the results."""
    results = context.results

    def histograms() -> None:
        results.log_alpha = report.log_alpha_histograms(variational.model, chosen.asked)

    context.attempt("log alpha", histograms)
    results.threshold = chosen.threshold
    results.threshold_curve = chosen.curve


def prune_stage(context: Context, opened: Opened, model: nn.Module, masks: Masks, file: Path) -> Small:
    """The model without its dead units. file: where it is stored; it is loaded from there if a stopped run left it."""
    recipe = context.recipe

    def write() -> None:
        if file.exists():
            return
        settings, export = recipe.prune, recipe.export
        asked = {name: getattr(settings, name) for name in ("remove_inputs", "protect", "time_budget")}

        def make(round_to: int) -> nn.Module:
            return prune(model, opened.inputs, masks=masks, round_to=round_to, **asked)

        timed = export.onnx and recipe.report.latency
        feed = partial(_figures.feed, opened.data) if timed else None
        small, pruning = rounded(make, settings.round_to, opened.inputs, feed, export.opset)
        checkpoint.save(small, file, extra={"pruning": report.plain(pruning)})

    on_first(context.place, write)
    model = make_model(recipe.model)
    with cured(file, "remove it to prune again"):
        facts = (checkpoint.read_manifest(file).get("extra") or {}).get("pruning")  # written by the first process
        if not isinstance(facts, dict):
            raise CheckpointError(f"{file}: damaged, or of another version")
        return Small(whole(checkpoint.load(file, model), facts), facts)


def keep(context: Context, opened: Opened, small: Small) -> None:
    """Write model.safetensors."""
    data, pruning = opened.data, small.pruning
    with _figures.there(context.place.device, small.model):
        tau = Passes(small.model, data).noise_precision
    if likelihood_of(bare(small.model)) is None:  # calibration has not set one
        set_likelihood(bare(small.model), likelihood_for(data.task, data.dim, tau))
    extra: dict[str, Any] = {
        "recipe": context.recipe.model_dump(mode="json"),
        "preprocessing": data.preprocessing,
        "classes": data.classes,
        "tau": tau,
        "dim": data.dim,
        "data": context.state.facts.get("data"),
        "inputs": {name: pruning.get(name) for name in ("inputs_kept", "inputs_dim")},
    }
    checkpoint.save(bare(small.model), context.out / "model.safetensors", extra=extra)


def kept(context: Context, small: Small) -> Small:
    """The calibrated small model, as `keep` wrote it. small: the model before calibration."""
    loaded = checkpoint.load(context.out / "model.safetensors", make_model(context.recipe.model))
    return Small(whole(loaded, small.pruning).eval(), small.pruning)
