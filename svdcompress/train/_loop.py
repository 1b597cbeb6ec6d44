"""The training loop: epochs in order, their figures, and a state to resume from."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from torch import nn

from svdcompress.errors import CheckpointError, SvdcError, TrainingError, shortened
from svdcompress.layers import variational_layers
from svdcompress.relevance import relevance
from svdcompress.train._ask import ask
from svdcompress.train._dropout import Rates, settle_dropout
from svdcompress.train._epoch import Rewind, train_epoch
from svdcompress.train._failed import explained_failure
from svdcompress.train._network import Network
from svdcompress.train._norms import keeps_norms, steadies
from svdcompress.train._right import refuse_wrong
from svdcompress.train._shared import shared_batches
from svdcompress.train._shrink import reshape
from svdcompress.train._standing import Fit, Row, Standing
from svdcompress.train._steps import Steps
from svdcompress.train._threads import settle
from svdcompress.train._work import Work

LOOK_EVERY = {"cpu": 1}
"""Batches between checks of the loss, by the kind of device; on others each check waits for the device, so they are fewer."""

SELDOM = 20
"""Batches between checks on devices that LOOK_EVERY does not name."""


class Loop:
    """One fit, which begins where its state file left off, or at the start if there is none."""

    def __init__(self, work: Work) -> None:
        self._started = time.monotonic()
        work.model.to(work.device)
        if isinstance(work.loss, nn.Module):  # it may hold class weights
            work.loss.to(work.device)
        if work.teacher is not None:
            work.teacher.ready(work.device, work.compiled)
        self._file = work.file
        saved = self._file.load()
        self._norms = keeps_norms(work) if saved is None else None
        self._steady = steadies(work, *self._norms) if self._norms is not None else (saved or {}).get("steady")
        if self._steady and work.steady is not None:  # as when the fit began, if this one goes on
            same = {"norms": "keep", "epochs": work.settings.epochs, "keep": work.settings.keep}
            work = replace(work, settings=work.steady.model_copy(update=same))
        self._work = work
        self._steps = Steps(work)
        asked = work.settings.dropout
        self._standing = Standing(
            work.total, keeps_norms=work.settings.norms == "keep", dropout="on" if asked == "auto" else asked
        )
        if work.shrink_from < work.settings.epochs:
            self._standing.total = work.total or relevance(work.model).total
        self._look_every = LOOK_EVERY.get(work.device.type, SELDOM)
        if not self._restored(saved):
            self._save()
        self._dropout = Rates(work.model)
        self._network = Network(work)  # after loading the state: DDP takes the parameters as it finds them
        self._steps.lay_out()
        self._rate = work.settings.lr
        if saved is not None and self._standing.epoch >= work.last:  # the run may have been resumed with another rate
            self._rate = saved.get("rate") or self._rate

    def run(self) -> Fit:
        """Train up to the last epoch; the model then has the weights of the last epoch, or of the best."""
        work, standing = self._work, self._standing
        if work.bars is not None:
            work.bars.start(work.stage, work.last, standing.epoch)
        try:
            if standing.epoch < work.last:
                refuse_wrong(work)
            if not standing.epoch:
                standing.keeps_norms, line = self._norms or keeps_norms(work)
                standing.said = [] if line is None else [[line, standing.keeps_norms]]
                if self._steady:
                    standing.said = [[self._steady, True]]
                standing.dropout, told = settle_dropout(work)
                standing.said += [] if told is None else [list(told)]
            if work.on_note is not None:
                for line, settled in standing.said:
                    work.on_note(line, settled)
            settle(work, trains=standing.epoch < work.last)
            answers = ask(work) if standing.epoch < work.last else None
            shared = shared_batches(work) if answers is None and standing.epoch < work.last else None
            while standing.epoch < work.last:
                rewinds = self._look_every > 1 and self._file.path is not None and work.world == 1
                fitted = work, self._network, self._steps, standing, answers, shared, self._dropout
                row = train_epoch(*fitted, look_every=self._look_every, rewinds=rewinds)
                if isinstance(row, Rewind):  # so that the error names the right step and layer
                    self._look_every = 1
                    self._restored(self._file.load())
                    continue
                self._finish(row)
        except (SvdcError, KeyboardInterrupt):
            raise
        except Exception as error:  # whatever the user's model, data or machine raises
            found = explained_failure(error, (work.stage, work.section), work.settings.batch_size, work.kept)
            if found is None:
                raise
            raise found from error
        finally:
            self._dropout.set(1.0)
            self._network.close()
        kept = standing.epoch
        if standing.best.weights is not None:
            work.model.load_state_dict(standing.best.weights)
            kept = standing.best.epoch
        return Fit(standing.history, kept, time.monotonic() - self._started, self._rate)

    def _finish(self, row: Row) -> None:
        """Finish an epoch: its figures, shrinking, saving."""
        work, standing, model = self._work, self._standing, self._work.model
        model.eval()
        if next(variational_layers(model), None) is not None:
            row["sparsity"] = standing.sparsity(relevance(model) if work.masks is None else work.masks(model))
        if work.validate is not None:
            metrics = work.validate(model)
            row.update({f"val_{name}": value for name, value in metrics.items()})
            if work.settings.keep == "best":
                standing.best.offer(model, metrics, row["epoch"])
        standing.history.append(row)
        standing.epoch += 1
        if work.on_epoch is not None:
            work.on_epoch(row)
        if work.bars is not None:
            work.bars.epoch(row)
        shrunk = self._shrunk()
        if shrunk or standing.epoch == work.last or self._file.due():
            self._save()

    def _shrunk(self) -> bool:
        """Shrink the model if it is time and there is something to remove; returns whether it did."""
        work, standing = self._work, self._standing
        # By the schedule's epochs, not by `last`: a fit that is continued must do what one long fit would.
        timely = work.shrink_from <= standing.epoch < work.settings.epochs and work.world == 1
        if not (timely and work.shrink is not None and work.shrink(work.model)):
            return False
        self._steps = Steps(work)
        self._network.renew()
        standing.best.forget()
        return True

    def _save(self) -> None:
        if self._work.rank == 0:
            self._file.save(self._state())

    def _state(self) -> dict[str, Any]:
        work = self._work
        surgery = getattr(work.model, "surgery", None) or {}
        model = {"model": work.model.state_dict(), "surgery": surgery}
        how = {"stage": work.stage, "steady": self._steady, "rate": work.settings.lr}
        return {**how, **model, **self._standing.state(), **self._steps.state()}

    def _restored(self, saved: dict[str, Any] | None) -> bool:
        """Restore the state of the file; False if there is none. Raises CheckpointError, TrainingError."""
        if saved is None:
            return False
        try:
            self._take(saved)
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            reason = shortened(f"{type(error).__name__}: {error}")
            raise CheckpointError(
                f"{self._file.path}: damaged, or from another model ({reason}); remove it to start this stage again"
            ) from error
        return True

    def _take(self, saved: dict[str, Any]) -> None:
        work = self._work
        if saved["stage"] != work.stage:
            raise TrainingError(f"the saved state belongs to the stage {saved['stage']}, not to {work.stage}")
        if saved.get("surgery"):
            reshape(work.model, saved["surgery"], saved["model"])
            self._steps = Steps(work)
        work.model.load_state_dict(saved["model"])
        self._steps.take(saved)
        self._standing.take(saved, work.device)
        if self._standing.epoch > work.last:
            raise TrainingError(
                f"{self._file.path}: it is at epoch {self._standing.epoch}, past the last one requested, {work.last}"
            )
