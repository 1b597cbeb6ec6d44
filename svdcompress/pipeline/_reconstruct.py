"""In a search, what stays of a model makes up for the units that go: on which examples, where, and whether."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.batch import call, to_device
from svdcompress.convert import as_it_was
from svdcompress.layers import variational_layers
from svdcompress.pipeline._begin import Opened
from svdcompress.pipeline._figures import there
from svdcompress.pipeline._some import some
from svdcompress.reconstruction import ROWS, Reconstruction, reconstruct, reconstructed
from svdcompress.relevance import Masks

EXAMPLES, FEWEST = 1024, 64
"""Training examples that layers are fitted to, in one batch: as many as memory allows between these."""

TRIED = 4
"""A way that is only tried is fitted to so many times fewer examples and rows: ways are compared for it, not used."""

NUMBERS = 2**25
"""Of the outputs of the widest layer, for all of the examples: each of the few that are there at a time takes 128 MB then."""


class Reconstructor:
    """Cuts with reconstruction. model: any of the shapes of those that will be cut; examples are chosen by it."""

    def __init__(self, opened: Opened, model: nn.Module, device: torch.device) -> None:
        self.device = device
        train = opened.data.train
        count = max(FEWEST, min(EXAMPLES, NUMBERS // max(_widest(model, opened.inputs), 1)))
        few = some(train, count)
        self.inputs, _ = next(iter(few.batches(len(few))))
        part = some(few, max(1, len(few) // TRIED))
        self.fewer, _ = next(iter(part.batches(len(part))))

    def cut(self, model: nn.Module, masks: Masks, before: Masks | None) -> Reconstruction:
        """Change the means of a model, which lies on the CPU, for masks; before: what was left of it."""
        with there(self.device, model):
            return reconstruct(model, to_device(self.inputs, self.device), masks, before=before)

    @contextmanager
    def trying(self, model: nn.Module, masks: Masks, before: Masks | None) -> Iterator[None]:
        """The model, where it is to compute, much as `cut` would leave it, with the masks held; as it was afterwards."""
        with reconstructed(model, to_device(self.fewer, self.device), masks, before=before, rows=ROWS // TRIED):
            yield


@torch.no_grad()
def _widest(model: nn.Module, inputs: Any) -> int:
    """Numbers that the widest layer gives for one example."""
    found, first = [0], next(iter(model.parameters()))

    def note(layer: Any, given: Any, output: Tensor) -> None:
        found.append(output[0].numel() if output.dim() > 1 else output.numel())

    handles = [layer.register_forward_hook(note) for _, layer in variational_layers(model)]
    try:
        with as_it_was(model, False):
            call(model, to_device(inputs, first.device))
    finally:
        for handle in handles:
            handle.remove()
    return max(found)
