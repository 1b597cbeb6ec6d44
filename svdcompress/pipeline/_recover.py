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
    and recovers once more at SLOWER times the learning rate; if that is worse too, it stays as it was. Warnings say so. If it
    kept running statistics by `norms: auto` and its loss is not finite, it begins again with those of batches.

    file: the file of the small model as it is now. ended: the final beta of training (None: the recipe's); with auto,
    recovery has RECOVERY times that. stage, state: the name that determines noise and order, and the file for the training
    state, as in `Trainer.fit`. epochs: in place of the recipe's. again: asked before a second attempt, whether there is to be
    one.
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
    first = fitted(recover, context.steady, state)
    after = losses()
    if not surely_worse(before, after):
        return first
    _restore(context, small, file)
    what, unit = ("error", "%") if before.probabilities else ("RMSE", "")
    worse = (
        f"{stage}: {recover.epochs} epochs of recovery made the network worse (validation {what} {after.error:.4g}{unit}, "
        f"{before.error:.4g}{unit} before them), so it was restored"
    )
    large = "Steps this large destroy more than they recover"
    if not again():
        context.warn(f"{worse}. {large}: --set recover.lr={SLOWER * first.lr:g} (it was {first.lr:g})")
        first.kept_epoch = 0
        return first
    rate = SLOWER * first.lr
    slower, steadier = (_at(rate, section) for section in (recover, context.steady))
    assert slower is not None
    second = fitted(slower, steadier, state.with_name(f"{state.stem}-slower.pt"), quiet=True)
    after = losses()
    found = f"{after.error:.4g}{unit}"
    both = replace(second, history=[*first.history, *second.history], seconds=first.seconds + second.seconds)
    if surely_worse(before, after):
        _restore(context, small, file)
        context.warn(
            f"{worse}, and again after as many epochs at a learning rate of {rate:g} instead of {first.lr:g} ({found}). "
            f"{large}: --set recover.lr={SLOWER * rate:g}"
        )
        both.kept_epoch = 0
    else:
        context.warn(
            f"{worse}, and recovered at a learning rate of {rate:g} instead of {first.lr:g} ({found}). "
            f"--set recover.lr={rate:g} does so at once"
        )
    return both


def _at(rate: float, section: RecoverSection | None) -> RecoverSection | None:
    return None if section is None else section.model_copy(update={"lr": rate})


def _restore(context: Context, small: Small, file: Path) -> None:
    """Give the small model the weights that it was stored with, on the CPU."""
    small.model.cpu().eval()
    started = whole(checkpoint.load(file, make_model(context.recipe.model)), small.pruning)
    bare(small.model).load_state_dict(bare(started).state_dict())
