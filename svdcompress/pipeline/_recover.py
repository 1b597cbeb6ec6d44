"""Trains a pruned model further, with its masks frozen, and undoes what made it worse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from svdcompress import checkpoint
from svdcompress.objective import Constant
from svdcompress.pipeline._begin import Dense, Variational
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._judged import on_validation
from svdcompress.pipeline._select import bare, whole
from svdcompress.pipeline._smaller import Small
from svdcompress.recipe import RecoverSection
from svdcompress.search import Losses, surely_worse
from svdcompress.sources import make_model
from svdcompress.train import Fit, NotFinite

RECOVERY = 0.05
"""The beta of recovery where the recipe says auto, as a fraction of training's final beta. With frozen masks every remaining
weight is needed, and the pressure for sparsity would only add noise (recipes tuned by hand use 0.01 to 0.04)."""

SLOWER = 0.1
"""The learning rate of a second attempt, as a fraction of the one that made the network worse."""


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
    again: Callable[[], bool] = lambda: True,
) -> Fit | None:
    """Train the small model further, in place, with its masks frozen; returns None if the recipe has no epochs for it.

    If it surely has more validation errors afterwards, the steps were too large for the little that was lost: it is restored
    and recovers once more at SLOWER times the learning rate; if that is worse too, it stays as it was. Warnings say so. It also
    recovers once more if its loss is not finite: with the statistics of batches if it kept running ones by `norms: auto`, else
    at SLOWER times the learning rate.

    file: the file of the small model as it is now. ended: the final beta of training (None: the recipe's); with auto,
    recovery has RECOVERY times that. stage, state: the name that determines noise and order, and the file for the training
    state, as in `Trainer.fit`. epochs: in place of the recipe's. again: asked before a second attempt, whether there is to be
    one.

    Raises NotFinite if the loss is not finite in the second attempt either, or is so because of the inputs, or if there are
    several processes.
    """
    recover = context.recipe.recover
    if epochs is not None:
        recover = recover.model_copy(update={"epochs": epochs})
    if not recover.epochs:
        return None
    beta = RECOVERY * (dense.beta if ended is None else ended) if recover.beta == "auto" else recover.beta
    state = state or context.state.folder / f"{stage}.pt"

    def losses() -> Losses:
        return on_validation(context, dense.trainer.data, small.model.eval(), errors_alone=True)

    def fit_with(settings: RecoverSection, steady: RecoverSection | None, state: Path, **more: Any) -> Fit:
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
            steady=steady,
            state=state,
            **more,
        )

    def fitted(settings: RecoverSection, steady: RecoverSection | None, state: Path, **more: Any) -> Fit:
        try:
            return fit_with(settings, steady, state, **more)
        except NotFinite as error:
            if not error.keeps_norms or settings.norms != "auto" or context.place.world > 1:
                raise
            _restore(context, small, file)
            context.warn(
                f"{stage}: the loss was not finite {error.where}, with the running statistics of batch normalizations, which "
                "were kept (recover.norms=auto). So recovery began again with those of batches (--set recover.norms=batch does "
                "at once)"
            )
            batch = settings.model_copy(update={"norms": "batch"})
            return fit_with(batch, steady, state.with_name(f"{state.stem}-batch.pt"), quiet=True)

    before = losses()
    what, unit = ("error", "%") if before.probabilities else ("RMSE", "")
    fits: list[Fit] = []
    try:
        fits.append(fitted(recover, context.steady, state))
    except NotFinite as error:
        if error.rate is None or context.place.world > 1 or not again():
            raise
        second, rate = True, error.rate
        why = f"{stage}: the loss of recovery was not finite {error.where}, so the network was restored"
    else:
        after = losses()
        if not surely_worse(before, after):
            return fits[0]
        second, rate = again(), fits[0].lr
        told = f"validation {what} {after.error:.4g}{unit}, {before.error:.4g}{unit} before them"
        why = f"{stage}: {recover.epochs} epochs of recovery made the network worse ({told}), so it was restored"
    _restore(context, small, file)
    large = "Steps this large destroy more than they recover"
    if not second:
        context.warn(f"{why}. {large}: --set recover.lr={SLOWER * rate:g} (it was {rate:g})")
        return replace(fits[0], kept_epoch=0)
    lower = SLOWER * rate
    slower, steadier = recover.model_copy(update={"lr": lower}), _at(lower, context.steady)
    fits.append(fitted(slower, steadier, state.with_name(f"{state.stem}-slower.pt"), quiet=True))
    after = losses()
    result = replace(fits[-1], history=[row for fit in fits for row in fit.history], seconds=sum(fit.seconds for fit in fits))
    reached = f"{after.error:.4g}{unit}"
    if surely_worse(before, after):
        _restore(context, small, file)
        context.warn(
            f"{why}, and again after as many epochs at a learning rate of {lower:g} instead of {rate:g} ({reached}). {large}: "
            f"--set recover.lr={SLOWER * lower:g}"
        )
        return replace(result, kept_epoch=0)
    context.warn(
        f"{why}, and recovered at a learning rate of {lower:g} instead of {rate:g} ({reached}). "
        f"--set recover.lr={lower:g} does so at once"
    )
    return result


def _at(rate: float, section: RecoverSection | None) -> RecoverSection | None:
    return None if section is None else section.model_copy(update={"lr": rate})


def _restore(context: Context, small: Small, file: Path) -> None:
    """Give the small model the weights that it was stored with, on the CPU."""
    small.model.cpu().eval()
    started = whole(checkpoint.load(file, make_model(context.recipe.model)), small.pruning)
    bare(small.model).load_state_dict(bare(started).state_dict())
