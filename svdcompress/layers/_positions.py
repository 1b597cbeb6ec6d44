"""Where a weight meets each row of a batch once, and where it is shared over positions: found by tracing shapes.

Noise of its own for each row (the local reparameterisation) is a draw of the weights only where each weight meets each row
once. Where a weight is used at several positions (a convolution, a Linear on tokens, a batch folded into rows, a module
called twice, a tied weight), those positions see the same weight, and only a draw of the weight itself is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.layers._sampling import Sampler, StochasticLayer, drawing, stochastic_layers, weight_of


class Shapes(Sampler):
    """Takes note of what layers put out; they do not draw."""

    def __init__(self) -> None:
        super().__init__()
        self.positions: Counter[tuple[int, ...]] = Counter()

    def saw(self, layer: StochasticLayer, output: Tensor) -> None:
        """A variational layer's output in a pass."""
        groups, outputs = layer.canonical(layer.weight).shape[:2]
        self.positions[weight_of(layer)] += output.numel() // max(groups * outputs, 1)

    def not_once(self, layers: Sequence[StochasticLayer], batch: int) -> set[StochasticLayer]:
        """The variational layers among these whose weight was not used at as many positions as the batch has rows."""
        found = (layer for layer in layers if hasattr(layer, "variance_parameters"))
        return {layer for layer in found if self.positions[weight_of(layer)] != batch}


def shared_over_positions(model: nn.Module, run: Callable[[int], Any], batches: Sequence[int] = (2, 3)) -> set[StochasticLayer]:
    """The variational layers of a model whose weights have to be drawn; the others may have noise for each row.

    A layer is left out of the set when its weight is used at as many positions (numbers of the output over output channels,
    summed over all calls of all layers with that weight) as there are rows, at each of the batch sizes. Anything else is in
    it: more positions, fewer, and layers that were not called, of which nothing is known.

    model: in `eval()`; it runs without noise and is not changed. run: its forward pass at a batch size; what it raises is
    raised. batches: two or more sizes, at least one above 1: at one size alone, positions might equal rows by chance.
    """
    layers = stochastic_layers(model)
    shared: set[StochasticLayer] = set()
    for batch in batches:
        with torch.no_grad(), drawing(layers, shapes := Shapes()):
            run(batch)
        shared |= shapes.not_once(layers, batch)
    return shared
