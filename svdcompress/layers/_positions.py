"""Finds which weights meet each row of a batch once, and which are shared over positions, by tracing shapes.

Independent noise for each row (local reparameterization) is a draw of the weights only where each weight meets each row
once. Where a weight is used at several positions (a convolution, a Linear on tokens, a batch folded into rows, a module
called twice, a tied weight), those positions see the same weight, and only a draw of the weight itself is right. The same
holds where rows meet (a mean over the batch, attention between rows): independent noise would average out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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


Run = Callable[[int, bool], Any]
"""A model's forward pass on the first so many rows of the same inputs; True: in reverse order."""


def shared_over_positions(model: nn.Module, run: Run, batches: Sequence[int] = (2, 3)) -> set[StochasticLayer]:
    """The variational layers of a model whose weights have to be drawn; the others may draw noise for each row.

    A layer is left out of the set if its weight is used at as many positions (elements of the output over output channels,
    summed over all calls of all layers with that weight) as there are rows, at each of the batch sizes. All others are in
    it: those with more or fewer positions, and those that were not called, of which nothing is known. If rows meet (see
    `rows_meet`), all layers are in it.

    model: in `eval()`; it runs without noise and is not changed. run: its exceptions pass through, except those for the
    reverse order; rows are compared if it returns the output. batches: two or more sizes, at least one above 1: at a single
    size, positions might equal rows by chance.
    """
    layers = stochastic_layers(model)
    shared: set[StochasticLayer] = set()

    def without_noise(batch: int, backwards: bool) -> Any:
        nonlocal shared
        with torch.no_grad(), drawing(layers, shapes := Shapes()):
            output = run(batch, backwards)
        shared |= shapes.not_once(layers, batch)
        return output

    outputs = [without_noise(batch, False) for batch in batches[:-1]]
    last = turned(without_noise, batches[-1])
    drawn = variational_among(layers)
    if len(shared) < len(drawn) and rows_meet(outputs[0], *last, (batches[0], batches[-1]), without_noise):
        return drawn
    return shared


def variational_among(layers: Sequence[StochasticLayer]) -> set[StochasticLayer]:
    """The variational ones among the layers: those whose weights have a posterior."""
    return {layer for layer in layers if hasattr(layer, "variance_parameters")}


def turned(run: Run, batch: int) -> tuple[Any, bool]:
    """The pass in reverse order, and True; in order, and False, if the model refuses that (lengths that have to descend)."""
    try:
        return run(batch, True), True
    except Exception:  # whatever a model raises
        return run(batch, False), False


def rows_meet(one: Any, other: Any, backwards: bool, batches: tuple[int, int], again: Run) -> bool:
    """Whether a model's outputs for some rows depend on which other rows are in the batch, and in which places.

    one, other: outputs, in any structure, for the first rows of the same inputs, at two batch sizes. backwards: whether the
    rows of the other are in reverse order; without that, a row that depends on earlier ones alone looks independent. An
    output without rows, like a mean over all of them, must not depend on the batch at all, except for a single number beside
    outputs with rows, such as a loss. again: the pass that gave them: if its output differs from call to call, nothing can be
    said, and rows count as not meeting.
    """
    if not _differ(one, other, batches, backwards, None):
        return False
    return not _differ(one, again(batches[0], False), (batches[0], batches[0]), False, None)


def rows_differ(one: Any, other: Any, batches: tuple[int, int], limit: float, backwards: bool = False) -> bool:
    """Whether the rows that two outputs have in common differ; see `rows_meet`. limit: the relative difference allowed."""
    return _differ(one, other, batches, backwards, limit)


def _differ(one: Any, other: Any, batches: tuple[int, int], backwards: bool, limit: float | None) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and (len(one), len(other)) == batches:  # detections
        one, other = one[: min(batches)], (other[::-1] if backwards else other)[: min(batches)]
    leaves = zip(tree_leaves(one), tree_leaves(other), strict=False)
    pairs = [(a, b) for a, b in leaves if isinstance(a, Tensor) and isinstance(b, Tensor) and a.is_floating_point()]
    rows = any(a.dim() and b.dim() and (a.shape[0], b.shape[0]) == batches for a, b in pairs)
    for a, b in pairs:
        share = _rounding(a) if limit is None else limit
        if not (rows and a.dim() == 0) and not any(
            _close(x, y, share) for x, y in _in_common(a.detach(), b.detach(), batches, backwards)
        ):
            return True
    return False


def _in_common(a: Tensor, b: Tensor, batches: tuple[int, int], backwards: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of tensors of which one has to agree if rows don't meet: what two results have in common, if the rows are along
    any dimension of theirs, or several in the place of each along the first; no pair if they cannot be compared."""

    def common(dim: int, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        b = b.flip(dim) if backwards else b
        return a.narrow(dim, 0, min(batches)), b.narrow(dim, 0, min(batches))

    if a.dim() != b.dim():
        return
    apart = [dim for dim in range(a.dim()) if a.shape[dim] != b.shape[dim]]
    if batches[0] == batches[1] or not apart:
        if a.shape == b.shape:
            yield a, b
    elif len(apart) == 1 and (a.shape[apart[0]], b.shape[apart[0]]) == batches:
        yield common(apart[0], a, b)
    elif apart == [0] and a.shape[0] * batches[1] == b.shape[0] * batches[0] and a.shape[0] % batches[0] == 0:
        times = a.shape[0] // batches[0]
        yield common(0, a.unflatten(0, (batches[0], times)), b.unflatten(0, (batches[1], times)))
        yield common(1, a.unflatten(0, (times, batches[0])), b.unflatten(0, (times, batches[1])))


def _close(a: Tensor, b: Tensor, share: float) -> bool:
    a, b = (part.cpu().double().nan_to_num(0.0, 0.0, 0.0) for part in (a, b))
    return bool((a - b).abs().sum() <= share * a.abs().sum())


def _rounding(output: Tensor) -> float:
    """The relative difference that rounding may cause when another batch size changes the order of summation."""
    device, coarse = output.device.type, output.dtype
    if torch.is_autocast_enabled(device):
        coarse = torch.get_autocast_dtype(device)
    elif device == "cuda" and coarse == torch.float32:
        coarse = torch.float16  # as coarse as the TF32 of CUDA's convolutions
    return max(3e-4, 16 * torch.finfo(coarse).eps)
