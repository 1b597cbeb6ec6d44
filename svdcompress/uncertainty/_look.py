"""A first look at a model with some inputs: whether it takes them, how wide it is, which weights several positions share.

It leaves no trace on the model: what a pass computes is seen by a mode of torch's functions, which is this thread's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from svdcompress.batch import map_tensors
from svdcompress.errors import DataError, SvdcError, out_of_memory
from svdcompress.layers import Shapes, StochasticLayer, drawing, rows_meet, stochastic_layers, variational_among
from svdcompress.uncertainty._chain import rowwise
from svdcompress.uncertainty._inputs import check_rows

INPUTS, OTHERS = 8, 3
"""Inputs of a first pass at most, and of the second, whose number has to be another."""


class Look(NamedTuple):
    """widest: numbers in the widest activation, for each input. shared: layers whose weights have to be drawn."""

    widest: int
    shared: frozenset[StochasticLayer]


def look(model: nn.Module, run: Callable[[Any], Any], x: Any, size: int, layers: Sequence[StochasticLayer] = ()) -> Look:
    """Run some of a batch of `size` inputs x without noise, so that no generator is touched. Raises where they do not fit,
    and where the heads that `run` gives are not one row for each input.

    layers: among which the shared ones are looked for. A layer is not shared if its weight is used at as many positions as
    there are inputs, in passes with two numbers of them; a model that refuses the second one has all of them
    shared, and so has one whose rows meet, as in a mean over the batch.
    """
    stochastic = stochastic_layers(model)
    some, others = _two_sizes(size)
    first = _inputs(x, some, size)
    with fitting(model), drawing(stochastic, shapes := Shapes()), _Widths(model, some) as seen:
        output = run(first)
        check_rows(output, some)
    shared = shapes.not_once(layers, some)
    drawn = variational_among(layers)
    if len(shared) == len(drawn):
        return Look(seen.widest, frozenset(shared))  # there is none left to ask about

    def again(count: int) -> Any:
        nonlocal shapes
        with drawing(stochastic, shapes := Shapes()):
            return run(_inputs(x, count, size))

    try:
        other = again(others)
        shared |= shapes.not_once(layers, others)
        meet = rows_meet(output, other, (some, others), again)
    except Exception:  # whatever a model says to another batch size
        return Look(seen.widest, frozenset(layers))
    return Look(seen.widest, frozenset(drawn if meet else shared))


def is_whole(model: nn.Module, run: Callable[[Any], Any], x: Any, size: int) -> bool:
    """Whether a batch of `size` inputs x has to go through a model as one, since its rows meet. So it is not said of a model
    that refuses another batch size."""
    if rowwise(model, x):
        return False
    some, others = _two_sizes(size)

    def without_noise(count: int) -> Any:
        with drawing(stochastic_layers(model), None):
            return run(_inputs(x, count, size))

    try:
        return rows_meet(without_noise(some), without_noise(others), (some, others), without_noise)
    except Exception:  # whatever a model says to another batch size
        return False


def _two_sizes(size: int) -> tuple[int, int]:
    some = min(size, INPUTS)
    return some, OTHERS if some != OTHERS else OTHERS - 1


def _inputs(x: Any, count: int, size: int) -> Any:
    """So many inputs of a batch, the same ones again where it has fewer; what has another first dimension goes along."""

    def cut(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != size:
            return tensor
        return tensor[:count] if count <= size else tensor[torch.arange(count, device=tensor.device) % size]

    return map_tensors(x, cut)


class _Widths(TorchFunctionMode):
    """Notes the widest result, for each input, of torch's functions; tensors of other than the batch's rows do not count."""

    def __init__(self, model: nn.Module, inputs: int) -> None:
        super().__init__()
        self.inputs, self.widest = inputs, 1
        self._parameters = {parameter.shape for parameter in model.parameters()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result) if isinstance(result, tuple | list) else (result,):
            if isinstance(leaf, Tensor) and self._is_rows(leaf):
                self.widest = max(self.widest, leaf.numel() // self.inputs)
        return result

    def _is_rows(self, tensor: Tensor) -> bool:
        return tensor.dim() > 0 and tensor.shape[0] % self.inputs == 0 and tensor.shape not in self._parameters


@contextmanager
def fitting(model: nn.Module) -> Iterator[None]:
    """Whatever torch raises for inputs of a wrong shape is a DataError."""
    try:
        yield
    except SvdcError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if out_of_memory(error):
            raise
        raise DataError(f"x does not fit {type(model).__name__}: {error}") from error
