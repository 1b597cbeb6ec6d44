"""Trains a pruned model further, with its masks frozen, and undoes what made it worse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from svdcompress import checkpoint
from svdcompress.errors import explained, shortened
from svdcompress.files import unsealed
from svdcompress.objective import Constant
from svdcompress.pipeline._begin import Dense, Variational
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._damaged import resumable
from svdcompress.pipeline._judged import on_validation
from svdcompress.pipeline._recovery import slowed
from svdcompress.pipeline._search_kept import keep
from svdcompress.pipeline._select import bare, whole
from svdcompress.pipeline._smaller import Small
from svdcompress.recipe import RecoverSection
from svdcompress.search import Losses, surely_worse
from svdcompress.sources import make_model
from svdcompress.train import Fit, NotFinite, StateFile, broadcast, on_first

RECOVERY = 0.05
"""The beta of recovery where the recipe says auto, as a fraction of training's final beta. With frozen masks every remaining
weight is needed, and the pressure for sparsity would only add noise (recipes tuned by hand use 0.01 to 0.04)."""

SLOWER = 0.1
"""The learning rate of a second attempt, as a fraction of the one that made the network worse."""

LARGE = "Steps this large destroy more than they recover"


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
    rate: float | None = None,
    again: Callable[[], bool] = lambda: True,
    shared: bool = False,
) -> Fit | None:
    """Train the small model further, in place, with its masks frozen; returns None if the recipe has no epochs for it.

    If it surely has more validation errors afterwards, or its loss is not finite, the steps were too large: it is restored, and
    recovers once more at SLOWER times the learning rate. If that fails too, it stays as it was. Warnings say so. If it kept
    running statistics by `norms: auto` and its loss is not finite, it first begins again with those of batches.

    file: the file of the small model as it is now. ended: the final beta of training (None: the recipe's); with auto,
    recovery has RECOVERY times that. stage, state: the name that determines noise and order, and the file for the training
    state, as in `Trainer.fit`; what a second attempt has to know is kept beside it (`again_file`). epochs, rate: in place of
    the recipe's. again: asked before a second attempt, whether there is to be one. shared: as in `train.fit`.

    Raises NotFinite if the loss is not finite in both attempts, or is so because of the inputs, or if there are several
    processes.
    """
    recover = context.recipe.recover
    recover = recover.model_copy(
        update={"epochs": recover.epochs if epochs is None else epochs, "lr": recover.lr if rate is None else rate}
    )
    if not recover.epochs:
        return None
    beta = RECOVERY * (dense.beta if ended is None else ended) if recover.beta == "auto" else recover.beta
    total = sum(prod(shape) for shape in variational.shapes.values())
    steady = context.steady and slowed(context.steady, rate)
    state = state or context.state.folder / f"{stage}.pt"
    return _Recovery(context, dense, small, file, stage, state, recover, steady, beta, total, shared).run(again)


def again_file(state: Path) -> Path:
    """Where it is kept that a recovery has failed and why, while the second attempt trains. state: that of both."""
    return state.with_name(f"{state.stem}-again.json")


@dataclass
class _Recovery:
    context: Context
    dense: Dense
    small: Small
    file: Path
    stage: str
    state: Path
    settings: RecoverSection
    steady: RecoverSection | None
    beta: float
    total: int
    shared: bool

    def run(self, again: Callable[[], bool]) -> Fit:
        """One attempt, or two."""
        before = self._losses()
        file = again_file(self.state)
        failed = _read(file, self.state) if file.exists() else None
        first = failed or self._first(before)
        if isinstance(first, Fit):
            return first
        if failed is None:
            self._restore()
            if not again():
                lower = _lower(first.rate)
                self.context.warn(f"{self.stage}: {first.why}. {LARGE}: --set recover.lr={lower:g} (it was {first.rate:g})")
                return Fit(first.history, 0, lr=first.rate, lr_instead=lower)

            def begin_again() -> None:
                for old in (self.state, self._of_batches):
                    old.unlink(missing_ok=True)  # before `keep`: a stop in between must not take it for the second attempt's
                keep(file, first.model_dump())

            on_first(self.context.place, begin_again)
        return self._second(before, first)

    def _first(self, before: Losses) -> Fit | _Failed:
        settings, steady = self.settings, self.steady
        try:
            fit = self._fitted(settings, steady)
        except NotFinite as error:
            if error.rate is None or self.context.place.world > 1:
                raise
            rate, rows = error.rate, self._rows()
            finite, why = False, f"the loss of recovery was not finite {error.where}, so the network was restored"
        else:
            after = self._losses()
            if not self._worse(before, after):
                return fit
            finite, rate, rows = True, fit.lr, fit.history
            why = f"{settings.epochs} epochs of recovery made the network worse ({_told(before, after)}), so it was restored"
        set_later = rate not in (settings.lr, steady and steady.lr)  # the run was resumed with another rate after this attempt
        return _Failed(
            why=why,
            finite=finite,
            rate=rate,
            lower=settings.lr if set_later else _lower(rate),
            asked=settings.lr,
            norms="batch" if self._of_batches.exists() else settings.norms,
            history=rows,
        )

    def _second(self, before: Losses, first: _Failed) -> Fit:
        rate = first.lower
        if first.asked != self.settings.lr:  # the run was resumed with another one
            rate, saved = self.settings.lr, StateFile(self.state).load() or {}
            if saved.get("epoch") == self.settings.epochs:  # too late for it
                rate = saved.get("rate", rate)
        self.context.warn(
            f"{self.stage}: {first.why}. Recovery begins again at a learning rate of {rate:g} (it was {first.rate:g}); "
            f"--set recover.lr={rate:g} does so at once"
        )
        settings = self.settings.model_copy(update={"lr": rate, "norms": first.norms})
        if settings.lr_log_sigma2 is not None and rate == first.lower != first.asked:
            settings.lr_log_sigma2 *= SLOWER
        try:
            fit = self._fitted(settings, self.steady and slowed(self.steady, rate), quiet=True)
        except NotFinite as error:
            if error.rate is None or self.context.place.world > 1:
                raise
            if not first.finite:
                raise NotFinite(
                    f"{error} (This was the second attempt; at {first.rate:g}, {first.why}.)",
                    error.stage,
                    error.section,
                    where=error.where,
                ) from error
            fit, why = Fit(self._rows(), lr=rate), f"the loss of the second attempt was not finite {error.where}"
        else:
            after, why = self._losses(), ""
            if self._worse(before, after):
                why = f"the second attempt made the network worse, too ({_told(before, after)})"
        if why:
            self._restore()
            self.context.warn(f"{self.stage}: {why}, so it was restored again. {LARGE}: --set recover.lr={_lower(fit.lr):g}")
            fit.kept_epoch = 0
        instead = _lower(fit.lr) if why else fit.lr
        return replace(fit, history=[*first.history, *fit.history], lr_instead=instead)

    def _fitted(self, settings: RecoverSection, steady: RecoverSection | None, *, quiet: bool = False) -> Fit:
        try:
            return self._fit(settings, steady, self.state, quiet)
        except NotFinite as error:
            if not error.keeps_norms or settings.norms != "auto" or self.context.place.world > 1:
                raise
            self._restore()
            self.context.warn(
                f"{self.stage}: the loss was not finite {error.where}, with the running statistics of batch normalizations, "
                "which were kept (recover.norms=auto). So recovery began again with those of batches (--set "
                "recover.norms=batch does at once)"
            )
            return self._fit(settings.model_copy(update={"norms": "batch"}), steady, self._of_batches, True)

    @property
    def _of_batches(self) -> Path:
        """The state of a recovery that has begun again with the statistics of batches."""
        return self.state.with_name(f"{self.state.stem}-batch.pt")

    def _rows(self) -> list[dict[str, Any]]:
        """The saved epochs of an attempt that did not end."""
        used = self._of_batches if self._of_batches.exists() else self.state
        return (StateFile(used).load() or {}).get("history", [])

    def _fit(self, settings: RecoverSection, steady: RecoverSection | None, state: Path, quiet: bool) -> Fit:
        return self.dense.trainer.fit(
            self.small.model,
            self.stage,
            settings,
            section="recover",
            schedule=Constant(self.beta) if settings.noise else None,
            noise=settings.noise,
            lr_log_sigma2=settings.lr_log_sigma2,
            distill=settings.distill,
            student=bare(self.small.model),
            outputs_kept=self.small.pruning.get("outputs_kept"),
            total=self.total,
            shared=self.shared,
            steady=steady,
            state=state,
            quiet=quiet,
        )

    def _losses(self) -> Losses:
        return on_validation(self.context, self.dense.trainer.data, self.small.model.eval(), errors_alone=True)

    def _worse(self, before: Losses, after: Losses) -> bool:
        return broadcast(surely_worse(before, after))  # processes that disagree would wait for each other

    def _restore(self) -> None:
        """Give the small model the weights that it was stored with, on the CPU."""
        self.small.model.cpu().eval()
        started = whole(checkpoint.load(self.file, make_model(self.context.recipe.model)), self.small.pruning)
        bare(self.small.model).load_state_dict(bare(started).state_dict())


class _Failed(BaseModel):
    """A first attempt. why: in words. finite: whether its loss was. rate: its learning rate; lower: that of the second attempt,
    unless the run is resumed with another one than `asked`. norms: how the second one begins. history: its epochs."""

    model_config = ConfigDict(strict=True, extra="forbid")
    why: str
    finite: bool
    rate: float
    lower: float
    asked: float
    norms: Literal["auto", "keep", "batch"]
    history: list[dict[str, Any]]


def _read(file: Path, state: Path) -> _Failed:
    try:
        return _Failed.model_validate(unsealed(file.read_bytes()))
    except ValueError as error:  # pydantic's are ValueErrors, too
        reason = shortened(explained(error) if isinstance(error, ValidationError) else str(error))
        raise resumable(f"{file}: damaged ({reason}); remove it and {state.stem}*.pt beside it to recover again") from None


def _lower(rate: float) -> float:
    return float(f"{SLOWER * rate:.6g}")  # 0.3, not 0.30000000000000004: so that it can be asked for


def _told(before: Losses, after: Losses) -> str:
    what, unit = ("error", "%") if before.probabilities else ("RMSE", "")
    return f"validation {what} {after.error:.4g}{unit}, {before.error:.4g}{unit} before"
