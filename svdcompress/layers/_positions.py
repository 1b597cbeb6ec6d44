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

from svdcompress.layers._base import VariationalLayer


def shared_over_positions(
    model: nn.Module, run: Callable[[int], Any], batches: Sequence[int] = (2, 3)
) -> set[VariationalLayer]:
    """The variational layers of a model whose weights have to be drawn; the others may have noise for each row.

    A layer is left out of the set when its weight is used at as many positions (numbers of the output over output channels,
    summed over all calls of all layers with that weight) as there are rows, at each of the batch sizes. Anything else is in
    it: more positions, fewer, and layers that were not called, of which nothing is known.

    model: in `eval()`; it runs without noise and is not changed. run: its forward pass at a batch size; what it raises is
    raised. batches: two or more sizes, at least one above 1: at one size alone, positions might equal rows by chance.
    """
    layers = [module for module in model.modules() if isinstance(module, VariationalLayer)]
    shared: set[VariationalLayer] = set()
    for batch in batches:
        positions = positions_of_weights(layers, lambda batch=batch: run(batch))
        shared |= {layer for layer in layers if positions[weight_of(layer)] != batch}
    return shared


def weight_of(layer: VariationalLayer) -> tuple[int, int]:
    """What tells weights apart: tied layers have the same one."""
    return id(layer.weight), id(layer.log_sigma2)


@torch.no_grad()
def positions_of_weights(layers: Sequence[VariationalLayer], run: Callable[[], Any]) -> Counter[tuple[int, int]]:
    """Positions at which each weight is used in a pass; see `weight_of`."""
    positions: Counter[tuple[int, int]] = Counter()

    def look(layer: Any, args: Any, output: Tensor) -> None:
        groups, outputs = layer.canonical(layer.weight).shape[:2]
        positions[weight_of(layer)] += output.numel() // (groups * outputs)

    hooks = [layer.register_forward_hook(look) for layer in layers]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return positions
