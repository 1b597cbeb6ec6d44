"""From a trained variational model to a small one: threshold, prune, recover; each step can be repeated with other choices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from torch import nn

from svdcompress import checkpoint, report
from svdcompress.errors import CheckpointError
from svdcompress.likelihoods import likelihood_for, likelihood_of, set_likelihood
from svdcompress.objective import Constant
from svdcompress.pipeline import _figures
from svdcompress.pipeline._begin import Dense, Opened, Variational
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._judged import on_validation
from svdcompress.pipeline._passes import Passes
from svdcompress.pipeline._round import rounded
from svdcompress.pipeline._select import bare, whole
from svdcompress.prune import prune
from svdcompress.recipe import RecoverSection
from svdcompress.relevance import Masks
from svdcompress.search import surely_worse
from svdcompress.selection import Selection, check_some_left, choose
from svdcompress.sources import make_model
from svdcompress.train import Fit, NotFinite, wait

RECOVERY = 0.05
"""The beta of recovery where the recipe says auto, as a fraction of training's final beta. With frozen masks every remaining
weight is needed, and the pressure for sparsity would only add noise (recipes tuned by hand use 0.01 to 0.04)."""


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
    if context.place.first and not file.exists():
        settings, export = recipe.prune, recipe.export
        asked = {name: getattr(settings, name) for name in ("remove_inputs", "protect", "time_budget")}

        def make(round_to: int) -> nn.Module:
            return prune(model, opened.inputs, masks=masks, round_to=round_to, **asked)

        timed = export.onnx and recipe.report.latency
        feed = partial(_figures.feed, opened.data) if timed else None
        small, pruning = rounded(make, settings.round_to, opened.inputs, feed, export.opset)
        checkpoint.save(small, file, extra={"pruning": report.plain(pruning)})
    wait()
    facts = (checkpoint.read_manifest(file).get("extra") or {}).get("pruning")  # written by the first process
    if not isinstance(facts, dict):
        raise CheckpointError(f"{file}: damaged, or of another version; remove it to prune again")
    return Small(whole(checkpoint.load(file, make_model(recipe.model)), facts), facts)


def recover_stage(
    context: Context,
    dense: Dense,
    variational: Variational,
    small: Small,
    file: Path,
    *,
    ended: float | None = None,
    stage: str = "recover",
    state: Path | None = None,
    epochs: int | None = None,
) -> Fit | None:
    """Train the small model further, in place, with its masks frozen; returns None if the recipe has no epochs for it.

    If it surely has more validation errors afterwards, it is restored with a warning: the steps were too large for the little
    that was lost. If it kept running statistics by `norms: auto` and its loss is not finite, it begins again with those of
    batches.

    file: the file of the small model as it is now. ended: the final beta of training (None: the recipe's); with auto,
    recovery has RECOVERY times that. stage, state: the name that determines noise and order, and the file for the training
    state, as in `Trainer.fit`. epochs: in place of the recipe's.
    """
    recover = context.recipe.recover
    if epochs is not None:
        recover = recover.model_copy(update={"epochs": epochs})
    if not recover.epochs:
        return None
    beta = RECOVERY * (dense.beta if ended is None else ended) if recover.beta == "auto" else recover.beta
    before = on_validation(context, dense.trainer.data, small.model.eval(), errors_alone=True)
    state = state or context.state.folder / f"{stage}.pt"

    def fit_with(settings: RecoverSection, state: Path, **more: Any) -> Fit:
        return dense.trainer.fit(
            small.model,
            stage,
            settings,
            section="recover",
            schedule=Constant(beta) if settings.noise else None,
            noise=settings.noise,
            lr_log_sigma2=settings.lr_log_sigma2,
            distill=settings.distill,
            student=bare(small.model),
            outputs_kept=small.pruning.get("outputs_kept"),
            total=sum(prod(shape) for shape in variational.shapes.values()),
            steady=context.steady,
            state=state,
            **more,
        )

    try:
        fit = fit_with(recover, state)
    except NotFinite as error:
        if not error.keeps_norms or recover.norms != "auto" or context.place.world > 1:
            raise
        _restore(context, small, file)
        context.warn(
            f"{stage}: the loss was not finite {error.where}, with the running statistics of batch normalizations, which were "
            "kept (recover.norms=auto). So recovery began again with those of batches (--set recover.norms=batch does at once)"
        )
        fit = fit_with(recover.model_copy(update={"norms": "batch"}), state.with_name(f"{state.stem}-batch.pt"), quiet=True)
    after = on_validation(context, dense.trainer.data, small.model, errors_alone=True)
    if surely_worse(before, after):
        _restore(context, small, file)
        what, unit = ("error", "%") if before.probabilities else ("RMSE", "")
        context.warn(
            f"{stage}: {recover.epochs} epochs of recovery made the network worse (validation {what} {after.error:.4g}{unit}, "
            f"{before.error:.4g}{unit} before them), so it was restored. Steps this large destroy more than they recover: "
            f"--set recover.lr={fit.lr / 10:g} (it was {fit.lr:g})"
        )
        fit.kept_epoch = 0
    return fit


def _restore(context: Context, small: Small, file: Path) -> None:
    """Give the small model the weights that it was stored with, on the CPU."""
    small.model.cpu().eval()
    started = whole(checkpoint.load(file, make_model(context.recipe.model)), small.pruning)
    bare(small.model).load_state_dict(bare(started).state_dict())


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
