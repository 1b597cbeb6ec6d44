"""Which whole residual branches go, in order: those first without which the outputs move least for what they cost."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from svdcompress.batch import call, first_tensor, main_output, to_device
from svdcompress.hooks import hooked
from svdcompress.layers import VariationalLayer, variational_layers
from svdcompress.prune import Analysis
from svdcompress.relevance import Masks
from svdcompress.selection._readers import readers
from svdcompress.selection._residual import Branch, branches
from svdcompress.selection._sensitivity import as_mean, elsewhere

BATCHES, FEWEST = 64, 8
"""The most batches of examples on which branches are judged, and the fewest."""

MOST = 5 * 10**12
"""Multiply-accumulates that this may take, about two minutes on one core, before fewer batches than BATCHES are used."""

TOGETHER = 8
"""Batches that run as one, if they have the same shapes: small ones cost more by their number than by their size."""

PASSES = 3
"""How often a branch is tried, about: once at first, and again when it comes up as the best one."""

LEAST_MOVE = 1e-9
"""The least share of the outputs' variance that a branch counts for: of those that change nothing, the dearest goes first."""


class Depth:
    """The residual branches of a model that can go as a whole.

    killable: bool per root, the units that may go. examples: batches of inputs; without any it is not known which branches
    matter least. device: where the model runs on them (None: where it is). size: what is left without some branches, by
    measure.
    """

    def __init__(
        self,
        model: nn.Module,
        analysis: Analysis,
        killable: np.ndarray,
        masks: Masks,
        examples: Sequence[Any] | None,
        device: torch.device | None,
        size: Callable[[Sequence[Branch]], Mapping[str, float]],
    ) -> None:
        self.model, self.analysis, self.killable, self.masks = model, analysis, killable, masks
        self.examples, self.device, self.size = examples, device, size
        self._order: dict[str, list[Branch]] = {}

    @cached_property
    def ends(self) -> dict[Branch, str]:
        """The branches, with the name of the layer at the end of each."""
        names = {id(consumer): names[0] for consumer, names in readers(self.model, self.analysis) if names}
        ends = {branch: id(self.analysis.consumers[branch.writer]) for branch in branches(self.analysis, self.killable)}
        return {branch: names[end] for branch, end in ends.items() if end in names}

    def order(self, measure: str) -> list[Branch]:
        """The branches in the order in which they should go; none without examples."""
        if self.examples is None or not self.ends:
            return []
        if measure not in self._order:
            whole, found = self.size([])[measure], list(self.ends.items())
            with elsewhere(self.model, self.device), as_mean(self.model, self.masks):
                each = len(first_tensor(self.examples[0])) * self.size([])["macs"] * PASSES * len(found)
                some = self.examples[: max(FEWEST, min(BATCHES, int(MOST / max(each, 1.0))))]
                self._order[measure] = in_order(self.model, found, some, lambda gone: whole - self.size(gone)[measure])
        return self._order[measure]

    def left(self, measure: str) -> list[float]:
        """What is left without the first branch, the first two and so on; without examples, only what is left without all."""
        found = self.order(measure)
        if not found:
            return [self.size(list(self.ends))[measure]] if self.ends else []
        return [self.size(found[:count])[measure] for count in range(1, len(found) + 1)]

    def of_part(self, measure: str, limit: float, part: float) -> list[Branch]:
        """The branches that go for a part of the way to a limit (of its logarithm): the fewest that get there, or all."""
        if not self.ends:
            return []
        now, everything = self.size([])[measure], list(self.ends)
        if part < 1:
            limit = now * (max(limit, 1e-9) / now) ** part if limit < now else now
        if self.size(everything)[measure] > limit:
            return everything  # in whatever order
        found = self.order(measure)
        least, most = 0, len(found)
        while least < most:
            middle = (least + most) // 2
            least, most = (least, middle) if self.size(found[:middle])[measure] <= limit else (middle + 1, most)
        return found[:least]


@torch.no_grad()
def in_order(
    model: nn.Module,
    found: Sequence[tuple[Branch, str]],
    examples: Sequence[Any],
    saved: Callable[[Sequence[Branch]], float],
) -> list[Branch]:
    """The branches in the order in which they should go.

    Greedy: at each step the branch goes that adds least to the squared change of the outputs per cost saved, given those that
    are gone. A silent layer gives its mean output instead, as reconstruction makes it. What a branch adds is computed again
    only when it comes up as the best one. (Dropping whole layers by their effect on the outputs: Veit et al. 2016,
    arXiv 1605.06431; Men et al. 2024, arXiv 2403.03853.)

    model: in `eval()`, with its masks held. found: each branch, and the name of the layer at its end. examples: batches of
    inputs. saved: what goes with some branches, in the unit of the goal.
    """
    layers: dict[str, VariationalLayer] = dict(variational_layers(model))
    device = next(model.parameters()).device
    batches = [to_device(each, device) for each in together(examples, TOGETHER)]
    means = _means([(name, layers[name]) for _, name in found], model, batches)
    found = [(branch, name) for branch, name in found if name in means]  # one that doesn't run is no branch
    wanted = [main_output(call(model, each)).float() for each in batches]
    flat = torch.cat([each.reshape(-1) for each in wanted])
    spread = float((flat - flat.mean()).square().sum()) or 1.0
    names = {branch: name for branch, name in found}

    def moved(gone: Sequence[Branch]) -> float:
        with hooked(_constant(layers[names[branch]], means[names[branch]]) for branch in gone):
            outputs = (main_output(call(model, each)).float() for each in batches)
            return sum(float((now - then).square().sum()) for now, then in zip(outputs, wanted, strict=True)) / spread

    order: list[Branch] = []
    now, cost = 0.0, 0.0

    def tried(number: int) -> tuple[float, int, int, float]:
        """What a branch adds per cost saved, its number, how many are gone, and the change of the outputs without it, too."""
        gone = [*order, found[number][0]]
        then, more = moved(gone), saved(gone) - cost
        return max(then - now, LEAST_MOVE) / more if more > 0 else math.inf, number, len(order), then

    heap = [tried(number) for number in range(len(found))]
    heapq.heapify(heap)
    while heap:
        key, number, gone, then = heapq.heappop(heap)
        if gone < len(order):
            heapq.heappush(heap, tried(number))
            continue
        if key == math.inf:  # none of those that are left saves anything
            break
        order.append(found[number][0])
        now, cost = then, saved(order)
    return order


def together(batches: Sequence[Any], count: int) -> list[Any]:
    """Batches joined by up to `count`, as far as their tensors have the same shapes; a tensor without examples stays as it is.

    >>> [tuple(each.shape) for each in together([torch.zeros(2, 3)] * 5, 4)]
    [(8, 3), (2, 3)]
    """
    found: list[Any] = []
    for start in range(0, len(batches), count):
        some = batches[start : start + count]
        flat, forms = zip(*(tree_flatten(each) for each in some), strict=True)
        size = len(first_tensor(some[0]))
        alike = all(form == forms[0] for form in forms) and all(_alike(leaves) for leaves in zip(*flat, strict=True))
        if not alike:
            found += some
            continue
        joined = [
            torch.cat(leaves) if isinstance(leaves[0], Tensor) and leaves[0].shape[:1] == (size,) else leaves[0]
            for leaves in zip(*flat, strict=True)
        ]
        found.append(tree_unflatten(joined, forms[0]))
    return found


def _alike(leaves: Sequence[Any]) -> bool:
    first = leaves[0]
    if isinstance(first, Tensor):
        return all(isinstance(leaf, Tensor) and leaf.shape == first.shape for leaf in leaves)
    return all(type(leaf) is type(first) and leaf == first for leaf in leaves)


def _means(layers: Sequence[tuple[str, nn.Module]], model: nn.Module, batches: Iterable[Any]) -> dict[str, Tensor]:
    """The mean output of each layer, per channel and broadcastable to it."""
    totals: dict[str, tuple[Tensor, int]] = {}

    def note(name: str) -> Any:
        def hook(layer: nn.Module, given: Any, output: Tensor) -> None:
            kept = _channels(layer, output)
            total, rows = totals.get(name, (torch.zeros(()), 0))
            added = output.double().sum([dim for dim in range(output.dim()) if dim != kept], keepdim=True)
            totals[name] = total.to(added) + added, rows + output.numel() // output.shape[kept]

        return hook

    with hooked(layer.register_forward_hook(note(name)) for name, layer in layers):
        for each in batches:
            call(model, each)
    return {name: (total / rows).float() for name, (total, rows) in totals.items()}


def _channels(layer: nn.Module, output: Tensor) -> int:
    """The dimension of a layer's output that holds its units."""
    return output.dim() - 1 - (len(layer.kernel_size) if isinstance(layer, nn.modules.conv._ConvNd) else 0)


def _constant(layer: nn.Module, mean: Tensor) -> RemovableHandle:
    """Make a layer give a constant."""

    def hook(layer: nn.Module, given: Any, output: Tensor) -> Tensor:
        return mean.to(output.dtype).expand_as(output).clone()  # a model may write to it

    return layer.register_forward_hook(hook)
