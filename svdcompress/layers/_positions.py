"""Where a weight meets each row of a batch once, and where it is shared over positions: found by tracing shapes.

Noise of its own for each row (the local reparameterisation) is a draw of the weights only where each weight meets each row
once. Where a weight is used at several positions (a convolution, a Linear on tokens, a batch folded into rows, a module
called twice, a tied weight), those positions see the same weight, and only a draw of the weight itself is right. So it is where
rows meet (a mean over the batch, attention between rows): independent noise would average out.
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
    """At how many positions a variational layer's weight was used for an output."""
    groups, outputs = layer.canonical(layer.weight).shape[:2]
    return output.numel() // max(groups * outputs, 1)


class Shapes(Sampler):
    """Takes note of what layers put out; they do not draw."""

    def __init__(self) -> None:
        super().__init__()
        self.positions: Counter[tuple[int, ...]] = Counter()

    def saw(self, layer: StochasticLayer, output: Tensor) -> None:
        """A variational layer's output in a pass."""
        self.positions[weight_of(layer)] += positions(layer, output)

    def not_once(self, layers: Sequence[StochasticLayer], batch: int) -> set[StochasticLayer]:
        """The variational layers among these whose weight was not used at as many positions as the batch has rows."""
        return {layer for layer in variational_among(layers) if self.positions[weight_of(layer)] != batch}


def shared_over_positions(model: nn.Module, run: Callable[[int], Any], batches: Sequence[int] = (2, 3)) -> set[StochasticLayer]:
    """The variational layers of a model whose weights have to be drawn; the others may have noise for each row.

    A layer is left out of the set when its weight is used at as many positions (numbers of the output over output channels,
    summed over all calls of all layers with that weight) as there are rows, at each of the batch sizes. Anything else is in
    it: more positions, fewer, and layers that were not called, of which nothing is known. All of them are in it where rows
    meet (see `rows_meet`).

    model: in `eval()`; it runs without noise and is not changed. run: its forward pass at a batch size, on the first rows of
    the same inputs; what it raises is raised, and rows are compared where it returns the output. batches: two or more sizes, at
    least one above 1: at one size alone, positions might equal rows by chance.
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
    """Those of the layers that have a posterior of their weights."""
    return {layer for layer in layers if hasattr(layer, "variance_parameters")}


def rows_meet(one: Any, other: Any, batches: tuple[int, int], again: Callable[[int], Any]) -> bool:
    """Whether a model's outputs for some rows depend on how many others are beside them.

    one, other: outputs, in any structure, of two batch sizes that begin with the same rows. again: the pass that gave them, at
    a batch size: a model whose output differs from call to call tells nothing by it, and counts as one whose rows do not meet.
    """
    if not rows_differ(one, other, batches):
        return False
    return not rows_differ(one, again(batches[0]), (batches[0], batches[0]))


def rows_differ(one: Any, other: Any, batches: tuple[int, int], limit: float | None = None) -> bool:
    """Whether the rows that two outputs have in common differ; what has other rows is left out.

    one, other: in any structure, of these numbers of rows. limit: the share of itself that an output may move by; None:
    what rounding does.
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
    """How far an output may move, in shares of itself, where another batch size is summed in another order."""
    device, coarse = output.device.type, output.dtype
    if torch.is_autocast_enabled(device):
        coarse = torch.get_autocast_dtype(device)
    elif device == "cuda" and coarse == torch.float32:
        coarse = torch.float16  # which is as coarse as the TF32 of its convolutions
    return max(3e-4, 16 * torch.finfo(coarse).eps)
