"""Makes fresh inputs like the examples, and checks whether two models agree on them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.batch import call, first_tensor, in_eval, map_tensors
from svdcompress.convert import as_it_was
from svdcompress.prune._compare import EXACT, MISTAKE, TOLERANCE, difference
from svdcompress.prune._copies import dense_copy
from svdcompress.prune._tensors import returned_in

MORE = 32
"""Most positions that are added to make inputs larger; a dimension is at most doubled."""


def resized(inputs: Any, batch: int) -> Any:
    """The inputs with another number of examples: rows of each tensor with as many as the first are repeated or dropped."""
    first = first_tensor(inputs)
    old = first.shape[0] if first.dim() else 0

    def fit(tensor: Tensor) -> Tensor:
        if old == 0 or tensor.dim() == 0 or tensor.shape[0] != old:
            return tensor
        return tensor[torch.arange(batch, device=tensor.device) % old]

    return map_tensors(inputs, fit)


def fresh(inputs: Any, seed: int, noise: bool = True) -> Any:
    """Inputs of the same shapes and dtypes with other values: normal noise of the same mean and spread, or resampled values
    (for tensors that are not floating point, or without `noise`)."""
    generator = torch.Generator().manual_seed(seed)

    def other(tensor: Tensor) -> Tensor:
        if noise and tensor.is_floating_point() and tensor.numel():
            drawn = torch.randn(tensor.shape, generator=generator).to(tensor)
            values = tensor.float()
            spread = float(values.std()) if values.numel() > 1 else 0.0
            if not torch.isfinite(values).all():
                return tensor
            return (values.mean() + (spread or 1.0) * drawn.float()).to(tensor.dtype)
        if tensor.is_complex() or not tensor.numel():
            return tensor
        order = torch.randint(tensor.numel(), (tensor.numel(),), generator=generator).to(tensor.device)
        return tensor.reshape(-1)[order].reshape(tensor.shape)

    return map_tensors(inputs, other)


def grown(inputs: Any) -> Iterator[Any]:
    """The inputs with more positions (pixels, steps, tokens), in the ways that may make sense for the model: larger in all
    dimensions after the channels, or in one dimension other than the batch. The existing values are repeated."""
    first = first_tensor(inputs)
    ways = [list(range(2, first.dim()))] if first.dim() > 3 else [[d] for d in range(first.dim() - 1, 0, -1)]
    for dims in ways:
        if first.device.type != "cpu" and len(dims) == 1:
            return  # a position beyond a table's end raises on the CPU, but can end the process on other devices

        def grow(tensor: Tensor, dims: list[int] = dims) -> Tensor:
            for d in dims:
                if tensor.dim() > d and tensor.shape[d] == first.shape[d]:
                    old = tensor.shape[d]
                    places = torch.arange(old + min(old, MORE), device=tensor.device) % old
                    tensor = tensor.index_select(d, places)
            return tensor

        yield map_tensors(inputs, grow)


def holed(inputs: Any, seed: int) -> Any | None:
    """The inputs with random zeros in tensors that look like masks (all ones, not floating point), the last example fully
    masked; None if no tensor looks like one."""
    generator = torch.Generator().manual_seed(seed)
    found = False

    def other(tensor: Tensor) -> Tensor:
        nonlocal found
        if tensor.is_floating_point() or tensor.is_complex() or tensor.numel() < 2 or not bool((tensor == 1).all()):
            return tensor
        found = True
        mask = (torch.rand(tensor.shape, generator=generator) > 0.3).to(tensor)
        mask[-1] = 0
        return mask

    result = map_tensors(inputs, other)
    return result if found else None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into `eval()`, without gradients; each module's mode is restored afterwards."""
    with in_eval(model), torch.no_grad():
        yield


class EquivalenceCheck:
    """Compares models with a reference on fresh inputs, with two batch sizes and with another size of other dimensions.

    cases: inputs on which the reference runs, with its outputs; only the examples if it runs on nothing else.
    training: inputs on which models have to run in `train()` too, if some branches run only there; None: they need not.
    """

    def __init__(self, reference: nn.Module, inputs: Any, batch: int, training: Any = None) -> None:
        self.reference, self.training = reference, training
        self.cases: list[tuple[Any, list[Tensor]]] = []
        with evaluating(reference):
            for seed, size in enumerate((1, 3) if batch == 2 else (max(batch, 1), batch + 1)):
                self._add(resized(inputs, size), seed)
            if len(self.cases) < 2:
                self._add(inputs, 2)
            for case in grown(resized(inputs, 1)):
                if self._add(case, 3):
                    break
            masked = holed(inputs, 4)
            if masked is not None:
                self._add(masked, None)
            if not self.cases:
                self.cases.append((inputs, _outputs(reference, inputs)))
        self.feed: Callable[[Any], Any] = lambda case: case
        self.worst = 0.0
        self.passed: nn.Module | None = None

    def _add(self, inputs: Any, seed: int | None) -> bool:
        """Add a case with new values; returns False if the reference cannot run on it. If outputs are not finite, as for noise
        under a logarithm, resampled values and then the inputs are tried; the case with most finite outputs is added."""
        wanted = [inputs] if seed is None else [fresh(inputs, seed), fresh(inputs, seed, noise=False), inputs]
        ran: list[tuple[Any, list[Tensor]]] = []
        for case in wanted:
            try:
                ran.append((case, _outputs(self.reference, case)))
            except Exception:  # values or sizes that the masked model cannot take either  # nosec B112
                continue
            if all(bool(torch.isfinite(t).all()) for t in ran[-1][1]):
                break
        if ran:
            best = max(ran, key=lambda pair: sum(int(torch.isfinite(t).sum()) for t in pair[1]))
            self.cases.append(best)
        return bool(ran)

    def agrees(self, model: nn.Module, tolerance: float = TOLERANCE) -> bool:
        """Whether the model computes what the reference does, up to rounding; sets `worst`, the largest absolute difference.

        tolerance: as a share of the outputs' size. Raises what the model raises.
        """
        self.worst = share = 0.0
        if self.training is not None:
            with as_it_was(model, True), torch.no_grad():
                call(model, self.feed(self.training))
        with evaluating(model):
            for case, expected in self.cases:
                absolute, relative = difference(_outputs(model, self.feed(case)), expected)
                self.worst, share = max(self.worst, absolute), max(share, relative)
        if share <= tolerance:
            return True
        return share <= MISTAKE and self._agrees_in_double(model)

    def _agrees_in_double(self, model: nn.Module) -> bool:
        """Whether models agree in double precision, which tells a deep network's rounding from a wrong channel."""
        try:
            cases = [map_tensors(case, lambda t: t.double() if t.is_floating_point() else t) for case, _ in self.cases]
            wide = copy.deepcopy(self.reference).double()
            with evaluating(wide):
                expected = [_outputs(wide, case) for case in cases]
            wide = dense_copy(model).double()
            with evaluating(wide):
                found = [_outputs(wide, self.feed(case)) for case in cases]
        except Exception:
            return False
        return all(difference(*pair)[1] <= EXACT for pair in zip(found, expected, strict=True))


def _outputs(model: nn.Module, inputs: Any) -> list[Tensor]:
    with torch.random.fork_rng():  # a model that draws in eval() draws the same each time
        torch.manual_seed(0)
        return [tensor.detach().clone() for tensor in returned_in(call(model, inputs))]
