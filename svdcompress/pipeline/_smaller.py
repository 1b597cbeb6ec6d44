"""From a trained variational model to a small one: threshold, prune, recover; each can be done again with another choice."""

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
from svdcompress.relevance import Masks
from svdcompress.search import surely_worse
from svdcompress.selection import Selection, check_some_left, choose
from svdcompress.sources import make_model
from svdcompress.train import Fit, wait

RECOVERY = 0.05
"""Of the beta that training ended with, what recovery goes on with where the recipe says auto. With frozen masks all that is
left is needed, and what pressed for sparsity is only noise (recipes tuned by hand have 0.01 to 0.04 of it)."""


@dataclass(frozen=True)
class Small:
    """A pruned model that takes whole inputs, and what pruning said of it."""

    model: nn.Module
    pruning: dict[str, Any]


def threshold_stage(context: Context, opened: Opened, dense: Dense, variational: Variational) -> Selection:
    """What stays, as the recipe says; raises PruneError where that is nothing."""
    chosen = choose(variational.model, context.recipe, dense.trainer.validate, opened.inputs)
    tell_selection(context, variational, chosen)
    check_some_left(variational.model, chosen.masks, opened.data.validation)
    return chosen


def tell_selection(context: Context, variational: Variational, chosen: Selection) -> None:
    """What the report says of a choice."""
    results = context.results

    def histograms() -> None:
        results.log_alpha = report.log_alpha_histograms(variational.model, chosen.asked)

    context.attempt("log alpha", histograms)
    results.threshold = chosen.threshold
    results.threshold_curve = chosen.curve


def prune_stage(context: Context, opened: Opened, model: nn.Module, masks: Masks, file: Path) -> Small:
    """The model without its dead units. file: what a stopped run left of it, else where it is kept."""
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
    facts = (checkpoint.read_manifest(file).get("extra") or {}).get("pruning")  # the first process's
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
    """Train the small model on, in place, with its masks frozen; None where the recipe has no epochs for it.

    Where it surely has more validation errors afterwards, it is as it was before, with a warning: steps that were too large
    for the little that was lost.

    file: that of the small model as it is. ended: where the beta of training ended (None: where the recipe says); auto is
    RECOVERY times that. stage, state: the name that its noise and order are drawn by, and the file of its state, as
    `Trainer.fit` has them. epochs: other than the recipe's.
    """
    recover = context.recipe.recover
    if epochs is not None:
        recover = recover.model_copy(update={"epochs": epochs})
    if not recover.epochs:
        return None
    beta = RECOVERY * (dense.beta if ended is None else ended) if recover.beta == "auto" else recover.beta
    before = on_validation(context, dense.trainer.data, small.model.eval(), errors_alone=True)
    fit = dense.trainer.fit(
        small.model,
        stage,
        recover,
        section="recover",
        schedule=Constant(beta) if recover.noise else None,
        noise=recover.noise,
        lr_log_sigma2=recover.lr_log_sigma2,
        distill=recover.distill,
        student=bare(small.model),
        outputs_kept=small.pruning.get("outputs_kept"),
        total=sum(prod(shape) for shape in variational.shapes.values()),
        state=state,
    )
    after = on_validation(context, dense.trainer.data, small.model, errors_alone=True)
    if surely_worse(before, after):
        started = whole(checkpoint.load(file, make_model(context.recipe.model)), small.pruning)
        bare(small.model).load_state_dict(bare(started).state_dict())
        what, unit = ("error", "%") if before.probabilities else ("RMSE", "")
        context.warn(
            f"{stage}: {recover.epochs} epochs of recovery made the network worse (validation {what} {after.error:.4g}{unit}, "
            f"{before.error:.4g}{unit} before them), so it is as it was before. Steps this large unlearn more than was lost: "
            f"--set recover.lr={recover.lr / 10:g} (it was {recover.lr:g})"
        )
        fit.kept_epoch = 0
    return fit


def keep(context: Context, opened: Opened, small: Small) -> None:
    """Write model.safetensors."""
    data, pruning = opened.data, small.pruning
    with _figures.there(context.place.device, small.model):
        tau = Passes(small.model, data).noise_precision
    if likelihood_of(bare(small.model)) is None:  # it was not calibrated
        set_likelihood(bare(small.model), likelihood_for(data.task, data.dim, tau))
    extra: dict[str, Any] = {
        "recipe": context.recipe.model_dump(mode="json"),
        "preprocessing": data.preprocessing,
        "classes": data.classes,
        "tau": tau,
        "dim": data.dim,
        "inputs": {name: pruning.get(name) for name in ("inputs_kept", "inputs_dim")},
    }
    checkpoint.save(bare(small.model), context.out / "model.safetensors", extra=extra)


def kept(context: Context, small: Small) -> Small:
    """The small model that `keep` wrote, calibrated. small: the same before that."""
    loaded = checkpoint.load(context.out / "model.safetensors", make_model(context.recipe.model))
    return Small(whole(loaded, small.pruning).eval(), small.pruning)
