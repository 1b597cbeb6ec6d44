"""The model as a step calls it: synchronized with the other processes, and compiled if asked for."""

from __future__ import annotations

from typing import Any

import torch

from svdcompress.objective import kl_divergence
from svdcompress.train._work import Work


class Network:
    """A model made ready for training; `called` computes its outputs, `synced` is what DDP averages the gradients of."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.synced: Any = work.accelerator.prepare_model(work.model) if work.world > 1 else work.model
        self.called: Any = self._compiled()

    def renew(self) -> None:
        """Compile anew, for a model of other shapes."""
        if self._work.compiled:
            torch.compiler.reset()  # after eight networks of other shapes torch would compile no more
        self.called = self._compiled()

    def close(self) -> None:
        """Leave the model as it was given, and in `eval()`."""
        work = self._work
        if self.synced is not work.model:
            work.accelerator.unwrap_model(self.synced, keep_fp32_wrapper=False)
            work.model.__dict__.pop("forward", None)  # what accelerate's mixed precision leaves on the instance
        work.model.eval()

    def _compiled(self) -> Any:
        if not self._work.compiled:
            return self.synced
        if self._work.elbo is not None:
            self._work.elbo.divergence = torch.compile(kl_divergence)
        return torch.compile(self.synced)
