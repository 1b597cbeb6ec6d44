"""Finds which weights meet each row of a batch once, and which are shared over positions, by tracing shapes.

Independent noise for each row (local reparameterization) is a draw of the weights only where each weight meets each row
once. Where a weight is used at several positions (a convolution, a Linear on tokens, a batch folded into rows, a module
called twice, a tied weight), those positions see the same weight, and only a draw of the weight itself is right. The same
holds where rows meet (a mean over the batch, attention between rows): independent noise would average out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from svdcompress.layers._sampling import Sampler, StochasticLayer, drawing, stochastic_layers, weight_of


def positions(layer: StochasticLayer, output: Tensor) -> int:
    """The number of positions at which a variational layer's weight was used for an output."""
    groups, outputs = layer.canonical(layer.weight).shape[:2]
    return output.numel() // max(groups * outputs, 1)


class Shapes(Sampler):
    """Counts positions in the outputs of layers, which do not draw."""

    def __init__(self) -> None:
        super().__init__()
        self.positions: Counter[tuple[int, ...]] = Counter()

    def saw(self, layer: StochasticLayer, output: Tensor) -> None:
        """Count the positions in a variational layer's output."""
        self.positions[weight_of(layer)] += positions(layer, output)

    def not_once(self, layers: Sequence[StochasticLayer], batch: int) -> set[StochasticLayer]:
        """The variational layers among these whose weight was not used at as many positions as the batch has rows."""
        return {layer for layer in variational_among(layers) if self.positions[weight_of(layer)] != batch}


def shared_over_positions(model: nn.Module, run: Callable[[int], Any], batches: Sequence[int] = (2, 3)) -> set[StochasticLayer]:
    """The variational layers of a model whose weights have to be drawn; the others may draw noise for each row.

    A layer is left out of the set if its weight is used at as many positions (elements of the output over output channels,
    summed over all calls of all layers with that weight) as there are rows, at each of the batch sizes. All others are in
    it: those with more or fewer positions, and those that were not called, of which nothing is known. If rows meet (see
    `rows_meet`), all layers are in it.

    model: in `eval()`; it runs without noise and is not changed. run: its forward pass at a batch size, on the first rows of
    the same inputs; its exceptions pass through, and rows are compared if it returns the output. batches: two or more sizes,
    at least one above 1: at a single size, positions might equal rows by chance.
    """
    layers = stochastic_layers(model)
    shared: set[StochasticLayer] = set()
    outputs: list[Any] = []

    def without_noise(batch: int) -> Any:
        nonlocal shared
        with torch.no_grad(), drawing(layers, shapes := Shapes()):
            output = run(batch)
        shared |= shapes.not_once(layers, batch)
        return output

    for batch in batches:
        outputs.append(without_noise(batch))
    drawn = variational_among(layers)
    if len(shared) < len(drawn) and rows_meet(outputs[0], outputs[-1], (batches[0], batches[-1]), without_noise):
        return drawn
    return shared


def variational_among(layers: Sequence[StochasticLayer]) -> set[StochasticLayer]:
    """The variational ones among the layers: those whose weights have a posterior."""
    return {layer for layer in layers if hasattr(layer, "variance_parameters")}


def rows_meet(one: Any, other: Any, batches: tuple[int, int], again: Callable[[int], Any]) -> bool:
    """Whether a model's outputs for some rows depend on how many other rows are in the batch.

    one, other: outputs, in any structure, at two batch sizes, for batches that begin with the same rows. again: the pass
    that gave them, at a batch size: if its output differs from call to call, nothing can be said, and rows count as not
    meeting.
    """
    if not rows_differ(one, other, batches):
        return False
    return not rows_differ(one, again(batches[0]), (batches[0], batches[0]))


def rows_differ(one: Any, other: Any, batches: tuple[int, int], limit: float | None = None) -> bool:
    """Whether the rows that two outputs have in common differ; tensors with other numbers of rows are left out.

    one, other: in any structure, with these numbers of rows. limit: the relative difference that is allowed; None: what
    rounding may cause.
    """
    common = min(batches)
    for a, b in zip(tree_leaves(one), tree_leaves(other), strict=False):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.is_floating_point() and a.dim() and b.dim()):
            continue
        if (a.shape[0], b.shape[0]) != batches:
            continue
        if a.shape[1:] != b.shape[1:]:
            return True
        share = _rounding(a) if limit is None else limit
        a, b = (part[:common].detach().cpu().double().nan_to_num(0.0, 0.0, 0.0) for part in (a, b))
        if bool((a - b).abs().sum() > share * a.abs().sum()):
            return True
    return False


def _rounding(output: Tensor) -> float:
    """The relative difference that rounding may cause when another batch size changes the order of summation."""
    device, coarse = output.device.type, output.dtype
    if torch.is_autocast_enabled(device):
        coarse = torch.get_autocast_dtype(device)
    elif device == "cuda" and coarse == torch.float32:
        coarse = torch.float16  # as coarse as the TF32 of CUDA's convolutions
    return max(3e-4, 16 * torch.finfo(coarse).eps)
