"""Reconstruction in a search: what stays of a model is fitted to make up for the units that go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.batch import call, to_device
from svdcompress.convert import as_it_was
from svdcompress.hooks import hooked
from svdcompress.layers import variational_layers
from svdcompress.pipeline._begin import Opened
from svdcompress.pipeline._figures import there
from svdcompress.pipeline._some import places, some
from svdcompress.reconstruction import ROWS, Reconstruction, reconstruct, reconstructed
from svdcompress.relevance import Masks
from svdcompress.sources import Examples

EXAMPLES, FEWEST = 1024, 64
"""The most and the fewest training examples that layers are fitted to, in one batch; memory decides in between."""

TRIED = 4
"""Ways that are only compared, not yet used, are fitted to this many times fewer examples and rows."""

NUMBERS = 2**25
"""The most numbers that the outputs of the widest layer may have, over all examples: 128 MB for each of the few layer outputs
that are in memory at a time."""


def examples_for(model: nn.Module, inputs: Any) -> int:
    """How many examples a model is fitted to, by the widest output of its layers. inputs: of an example."""
    return max(FEWEST, min(EXAMPLES, NUMBERS // max(_widest(model, inputs), 1)))


class Reconstructor:
    """Cuts models with reconstruction. examples: the number of training examples to use, from `examples_for`."""

    def __init__(self, opened: Opened, examples: int, device: torch.device) -> None:
        self.device = device
        train = opened.data.train
        few = some(train, examples)
        self.inputs, _ = next(iter(few.batches(len(few))))
        part = max(1, len(few) // TRIED)
        self.tried_on = places(len(train), examples)[places(len(few), part)]
        self.fewer, _ = next(iter(some(few, part).batches(part)))

    def others(self, train: Examples) -> Examples:
        """The training examples that ways are not fitted to while they are compared; all if there are no others."""
        unseen = torch.ones(len(train), dtype=torch.bool)
        unseen[self.tried_on] = False
        return train.subset(unseen.nonzero().squeeze(1)) if unseen.any() else train

    def cut(self, model: nn.Module, masks: Masks, before: Masks | None) -> Reconstruction:
        """Change the means of a model, which is on the CPU, to make up for what masks remove. before: the masks so far."""
        with there(self.device, model):
            return reconstruct(model, to_device(self.inputs, self.device), masks, before=before)

    @contextmanager
    def trying(self, model: nn.Module, masks: Masks, before: Masks | None) -> Iterator[None]:
        """Within it, the model is about as `cut` would leave it, with the masks held; it is restored afterwards. It has to be
        on the device already."""
        with reconstructed(model, to_device(self.fewer, self.device), masks, before=before, rows=ROWS // TRIED):
            yield


@torch.no_grad()
def _widest(model: nn.Module, inputs: Any) -> int:
    """The largest number of values that any layer outputs for one example."""
    found, first = [0], next(iter(model.parameters()))

    def note(layer: Any, given: Any, output: Tensor) -> None:
        found.append(output[0].numel() if output.dim() > 1 else output.numel())

    hooks = (layer.register_forward_hook(note) for _, layer in variational_layers(model))
    with as_it_was(model, False), hooked(hooks):
        call(model, to_device(inputs, first.device))
    return max(found)
