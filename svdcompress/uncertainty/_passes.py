"""Many draws of a model in one pass: what depends on no noise is computed once, the rest for all draws together.

If each row of a batch goes through the model by itself, draws are rows of one batch (see `_chain`). Otherwise the passes run
under `torch.func.vmap` over the draws. Either way a value is not repeated until it meets the first noise, so the first
stochastic layer computes its mean and variance once, and everything after it works on draws times inputs. A model that vmap
cannot handle (because it branches on values, say) is run draw by draw.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from svdcompress.layers import Rows, Sampler, StochasticLayer, drawing

Run = Callable[[Any], Any]
"""Maps a batch of inputs to the model's output, a tensor or a tuple of tensors."""


class DrawRunner:
    """Draws of a model's output for slices of a batch.

    run: the model. sampler: the source of its noise. antithetic: draws come in pairs of opposite noise. rowwise: the draws of
    a slice may be rows of one batch (see `_chain`).
    """

    def __init__(self, run: Run, layers: Sequence[StochasticLayer], sampler: Sampler, antithetic: bool, rowwise: bool) -> None:
        self.run, self.layers, self.antithetic = run, layers, antithetic
        self.sampler: Any = sampler  # one with a generator
        self.weights = sampler.members or bool(sampler.shared)  # whether weights are drawn, to be kept over all slices
        self._ways = [self._as_rows] * rowwise + [self._together, self._one_by_one]
        self._proven = False
        self._noises: list[Tensor] | None = None  # noise of the current weights, drawn together
        self._kept: dict[int, dict] = {}  # the same, drawn one by one

    def resample(self) -> None:
        """Make the next call draw new weights."""
        self._noises, self._kept = None, {}
        self.sampler.resample()

    def __call__(self, inputs: Any, size: int, count: int) -> Any:
        """`count` draws of the output for `size` inputs, (count, size, ...); weights are kept until `resample`."""
        while True:
            state = None if self._proven else self.sampler.generator.get_state()
            try:
                with drawing(self.layers, self.sampler):
                    output = self._ways[0](inputs, size, count)
                self._proven = True
                return output
            except Exception:  # vmap fails in many ways; an error of the model itself shows again in the last way
                if state is None or len(self._ways) == 1:
                    raise
                del self._ways[0]
                self.resample()
                self.sampler.generator.set_state(state)
            finally:
                self.sampler.sign = None

    # All draws as rows of one batch

    def _as_rows(self, inputs: Any, size: int, count: int) -> Any:
        rows = Rows(size, count, self.sampler.generator, self.antithetic, self.sampler.caches)
        with drawing(self.layers, rows):
            return tree_map(rows.by_draw, self.run(inputs))

    # All draws at once under vmap

    def _together(self, inputs: Any, size: int, count: int) -> Any:
        if not self.weights:
            return self._over_draws(lambda _: self.run(inputs), count, [])
        if self._noises is None:
            output, self._noises = self._over_draws(lambda _: self._first(inputs), count, [])
            return output
        return self._over_draws(lambda noises: self._again(inputs, noises), count, self._noises)

    def _over_draws(self, function: Callable[[list[Tensor]], Any], count: int, noises: list[Tensor]) -> Any:
        """Run `function` under vmap on the noises that weights were drawn with, (count, ...) each."""
        if not self.antithetic:
            return vmap(lambda _, given: function(given), randomness="different")(torch.empty(count), noises)

        def signed(sign: Tensor, given: list[Tensor]) -> Any:
            self.sampler.sign = sign
            return function(given)

        def pair(_: Tensor, given: list[Tensor]) -> Any:
            return vmap(signed, randomness="same")(signs, given)

        signs = torch.tensor([1.0, -1.0], device=self.sampler.generator.device)
        given = [noise.unflatten(0, (count // 2, 2)) for noise in noises]
        pairs = vmap(pair, randomness="different")(torch.empty(count // 2), given)
        return tree_map(lambda tensor: tensor.flatten(0, 1), pairs)

    def _first(self, inputs: Any) -> tuple[Any, list[Tensor]]:
        """Draw weights and run; the noise leaves vmap as a result, so that other slices can be run with it."""
        self.sampler.resample()
        output = self.run(inputs)
        leaves, self._form = tree_flatten(list(self.sampler.noises.values()))
        self._keys = list(self.sampler.noises)
        self.sampler.resample()
        return output, leaves

    def _again(self, inputs: Any, noises: list[Tensor]) -> Any:
        self.sampler.noises = dict(zip(self._keys, tree_unflatten(noises, self._form), strict=True))
        output = self.run(inputs)
        self.sampler.resample()
        return output

    # One draw after the other

    def _one_by_one(self, inputs: Any, size: int, count: int) -> Any:
        outputs = [self._one(inputs, index) for index in range(count)]
        return tree_map(lambda *draws: torch.stack(draws), *outputs)

    def _one(self, inputs: Any, index: int) -> Any:
        generator = self.sampler.generator
        if self.antithetic and index % 2 == 0:
            self._state = generator.get_state()
            self.sampler.sign = torch.ones((), device=generator.device)
        elif self.antithetic:
            generator.set_state(self._state)
            self.sampler.sign = -torch.ones((), device=generator.device)
        if self.weights:
            self.sampler.noises = self._kept.setdefault(index, {})
        return self.run(inputs)


_lock = threading.Lock()
_flipped: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # calls that hold a module in eval() that was in train()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in `eval()`, without gradients; afterwards each module is back in the mode that it was in.

    Modules in `eval()` are not touched. Those in `train()` return to it when the last of several threads is done.
    """
    with _lock:
        modules = [module for module in model.modules() if module.training or module in _flipped]
        for module in modules:
            _flipped[module] = _flipped.get(module, 0) + 1
            module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        with _lock:
            for module in modules:
                _flipped[module] -= 1
                if not _flipped[module]:
                    del _flipped[module]
                    module.training = True
