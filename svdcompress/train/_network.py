"""The model as a training step calls it: synchronized with the other processes, and compiled if requested."""

from __future__ import annotations

from typing import Any

import torch

from svdcompress.batch import call
from svdcompress.convert import as_it_was
from svdcompress.objective import kl_divergence
from svdcompress.train._work import Work


class Network:
    """A model prepared for training: `called` computes its outputs, `synced` is the module whose gradients DDP averages."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._models = [work.model] if work.teacher is None else [work.model, work.teacher.model]
        self._format = _faster_format(work)
        self._laid_out(self._format)
        if self._format is not None and not self._runs():  # such as a model that flattens its outputs by `view`
            self._laid_out(torch.contiguous_format)
            self._format = None
            if work.on_note is not None:
                work.on_note(
                    f"{work.section}: channels-last convolutions would be faster, but this model does not run with them", True
                )
        self.synced: Any = work.accelerator.prepare_model(work.model) if work.world > 1 else work.model
        self.called: Any = self._compiled()

    def renew(self) -> None:
        """Lay out and compile the model again after its shapes have changed."""
        self._laid_out(self._format)  # surgery may have left another layout
        if self._work.compiled:
            torch.compiler.reset()  # torch stops compiling after eight networks of other shapes
        self.called = self._compiled()

    def close(self) -> None:
        """Undo what was done to the models, and leave the trained one in `eval()`."""
        work = self._work
        if self.synced is not work.model:
            work.accelerator.unwrap_model(self.synced, keep_fp32_wrapper=False)
            work.model.__dict__.pop("forward", None)  # what accelerate's mixed precision leaves on the instance
        if self._format is not None:
            self._laid_out(torch.contiguous_format)
        work.model.eval()

    def _laid_out(self, memory: torch.memory_format | None) -> None:
        if memory is None:
            return
        for model in self._models:
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.dim() == 4:  # those of 3-d convolutions have no such layout
                    tensor.data = tensor.data.contiguous(memory_format=memory)

    def _runs(self) -> bool:
        """Whether the models run in their layout. A model that runs in none fails in its first step."""
        work = self._work
        inputs, _ = work.first_batch("layout")
        for model in self._models:
            with as_it_was(model, False), torch.no_grad(), work.autocast():
                try:
                    call(model, inputs)
                except RuntimeError:
                    return False
        return True

    def _compiled(self) -> Any:
        if not self._work.compiled:
            return self.synced
        if self._work.elbo is not None:
            self._work.elbo.divergence = torch.compile(kl_divergence)
        return torch.compile(self.synced)


def _faster_format(work: Work) -> torch.memory_format | None:
    """Channels last for 2-d convolutions on a GPU, otherwise None.

    Not on a CPU: with torch 2.13 some convolutions in that layout are silently wrong there, or crash the process; in bfloat16,
    gradients of dilated ones and of kernels of 64 x 1 are NaN. It would save a fifth of a bfloat16 step at most.
    """
    image = any(parameter.dim() == 4 for parameter in work.model.parameters())
    return torch.channels_last if image and work.device.type == "cuda" else None
