"""A first look at a model with some inputs: whether it accepts them, how wide it is, which weights several positions share.

It leaves no trace on the model: a torch function mode, which belongs to this thread alone, observes what a pass computes.
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
from svdcompress.layers import Shapes, StochasticLayer, drawing, rows_meet, stochastic_layers, turned, variational_among
from svdcompress.uncertainty._chain import rowwise
from svdcompress.uncertainty._inputs import check_rows

INPUTS, OTHERS = 8, 3
"""The most inputs of the first pass, and the inputs of the second, which must differ in number."""


class Look(NamedTuple):
    """widest: numbers per input in the widest activation. shared: layers whose weights have to be drawn."""

    widest: int
    shared: frozenset[StochasticLayer]


def look(model: nn.Module, run: Callable[[Any], Any], x: Any, size: int, layers: Sequence[StochasticLayer] = ()) -> Look:
    """Run part of a batch of `size` inputs x without noise, so that no generator is touched.

    layers: those searched for shared ones. A layer is not shared if its weight is used at as many positions as there are
    inputs, in two passes with different numbers of inputs. All are shared if the model refuses the second pass or if its rows
    meet, as in a mean over the batch.

    Raises DataError for inputs that do not fit, and ModelError if the heads that `run` gives do not have one row for each
    input.
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
        return Look(seen.widest, frozenset(shared))  # no layer is left to decide on

    def again(count: int, backwards: bool) -> Any:
        nonlocal shapes
        with drawing(stochastic, shapes := Shapes()):
            return run(_inputs(x, count, size, backwards))

    try:
        other = turned(again, others)
        shared |= shapes.not_once(layers, others)
        meet = rows_meet(output, *other, (some, others), again)
    except Exception:  # whatever a model raises for another batch size
        return Look(seen.widest, frozenset(layers))
    return Look(seen.widest, frozenset(drawn if meet else shared))


def is_whole(model: nn.Module, run: Callable[[Any], Any], x: Any, size: int) -> bool:
    """Whether a batch of `size` inputs x has to go through a model as a whole because its rows meet. False for a model that
    refuses another batch size."""
    if rowwise(model, x):
        return False
    some, others = _two_sizes(size)

    def without_noise(count: int, backwards: bool) -> Any:
        with drawing(stochastic_layers(model), None):
            return run(_inputs(x, count, size, backwards))

    try:
        return rows_meet(without_noise(some, False), *turned(without_noise, others), (some, others), without_noise)
    except Exception:  # whatever a model raises for another batch size
        return False


def _two_sizes(size: int) -> tuple[int, int]:
    some = min(size, INPUTS)
    return some, OTHERS if some != OTHERS else OTHERS - 1


def _inputs(x: Any, count: int, size: int, backwards: bool = False) -> Any:
    """`count` inputs of a batch, repeated if it has fewer; tensors with another first dimension are kept whole."""

    def cut(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != size:
            return tensor
        rows = tensor[:count] if count <= size else tensor[torch.arange(count, device=tensor.device) % size]
        return rows.flip(0) if backwards else rows

    return map_tensors(x, cut)


class _Widths(TorchFunctionMode):
    """Records the widest result of torch's functions, in numbers per input; tensors without the batch's rows do not count."""

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
    """Turns whatever torch raises for inputs of a wrong shape into a DataError."""
    try:
        yield
    except SvdcError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if out_of_memory(error):
            raise
        raise DataError(f"x does not fit {type(model).__name__}: {error}") from error
