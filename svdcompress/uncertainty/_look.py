"""A look at a model ahead of its draws: whether it takes the inputs, how wide it is, and whether draws may be rows of a batch.

Both answers are kept for a model as long as it consists of the same modules, with the same settings, and its inputs have the
same shape.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_leaves

from svdcompress.errors import DataError, SvdcError
from svdcompress.layers import Rows, Sampler, StochasticLayer
from svdcompress.sources import map_tensors
from svdcompress.uncertainty._inputs import device_of, take
from svdcompress.uncertainty._passes import Run, drawing

PROBE = 8  # inputs of the first pass
INPUTS, DRAWS = 3, 2  # of the passes that show whether draws may be rows
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
OTHER_TOLERANCE = 3e-2
PLAIN = (bool, int, float, str)
KEPT = 64  # answers for one model

_answers: WeakKeyDictionary[nn.Module, dict[Any, Any]] = WeakKeyDictionary()


class Look(NamedTuple):
    """widest: numbers in the widest activation, for each input. rowwise: whether draws may be rows of one batch."""

    widest: int
    rowwise: bool


def look(model: nn.Module, run: Run, task: str, x: Any, size: int, rows: bool = False) -> Look:
    """Look at a model in `eval()`. rows: find out whether draws may be rows, too, which takes a dozen passes of few inputs.

    Raises DataError where the model does not take the inputs.
    """
    leaves, form = tree_flatten(x)
    shapes = tuple((leaf.shape[_by_input(leaf, size) :], leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor))
    key = (task, str(form), shapes, tuple(map(_settings, model.modules())))
    layers = [module for module in model.modules() if isinstance(module, StochasticLayer)]
    known = _answers.setdefault(model, {})
    if len(known) > KEPT:
        known.clear()
    if key not in known:
        with drawing(layers, None):  # noise changes no shape, and the caller's generator is left alone
            known[key] = _widest(model, run, x, size)
    if rows and (key, "rows") not in known:
        known[key, "rows"] = _rowwise(layers, run, x, size, device_of(model))
    return Look(known[key], rows and known[key, "rows"])


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """Which module it is, and its attributes that are plain values: a switch may change what it does."""
    return id(module), *(value for value in vars(module).values() if type(value) in PLAIN)


def _by_input(tensor: Tensor, size: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == size


def _widest(model: nn.Module, run: Run, x: Any, size: int) -> int:
    some = min(size, PROBE)
    widest = 1

    def see(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal widest
        if isinstance(output, Tensor):
            widest = max(widest, output.numel() // some)

    hooks = [module.register_forward_hook(see) for module in model.modules()]
    try:
        run(take(x, 0, some, size))
    except SvdcError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise DataError(f"x does not fit {type(model).__name__}: {error}") from error
    finally:
        for hook in hooks:
            hook.remove()
    return widest


def _rowwise(layers: Sequence[StochasticLayer], run: Run, x: Any, size: int, device: torch.device) -> bool:
    """Whether draws as rows of one batch give what separate passes with the same noise give.

    A model that branches on values could do so for these inputs and not for others; vmap finds those.
    """
    x = map_tensors(x, lambda tensor: _few(tensor, size))
    generator = torch.Generator(device).manual_seed(0)
    try:
        with drawing(layers, Sampler(generator)), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of operations that vmap is slow at
            vmap(lambda _: run(x), randomness="different")(torch.empty(DRAWS))
        recorder = _Recorder(INPUTS, DRAWS, generator)
        with drawing(layers, recorder):
            together = [recorder.by_draw(leaf) for leaf in tree_leaves(run(x))]
        for index in range(DRAWS):
            with drawing(layers, _Replay(recorder.noises, index)):
                alone = tree_leaves(run(x))
            if not all(_same(many[index], one) for many, one in zip(together, alone, strict=True)):
                return False
    except Exception:  # whatever stops it: the model's own faults show in the passes themselves
        return False
    return True


def _few(tensor: Tensor, size: int) -> Tensor:
    """The first rows of a tensor that has one for each input, again and again if it has few."""
    return tensor[torch.arange(INPUTS, device=tensor.device) % size] if _by_input(tensor, size) else tensor


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    size = float(other.abs().nan_to_num(0, 0, 0).max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=0, atol=TOLERANCE.get(one.dtype, OTHER_TOLERANCE) * size, equal_nan=True)


class _Recorder(Rows):
    """Rows that keep their noise, in the order of the calls."""

    def __init__(self, inputs: int, draws: int, generator: torch.Generator) -> None:
        super().__init__(inputs, draws, generator)
        self.noises: list[Tensor] = []

    def _filled(self, *args: Any) -> Tensor:
        noise = super()._filled(*args)
        self.noises.append(noise.clone())  # a draw is made in place of its noise
        return noise


class _Replay(Sampler):
    """The noise of one of the draws that a _Recorder kept."""

    def __init__(self, noises: list[Tensor], index: int) -> None:
        super().__init__()
        self.rest = iter([noise[index] for noise in noises])

    def normal(self, like: Tensor) -> Tensor:
        return next(self.rest).reshape(like.shape)

    def bernoulli(self, shape: Any, rate: float, like: Tensor) -> Tensor:
        return (next(self.rest).reshape(shape) < rate).to(like.dtype)
