"""Fresh inputs like the examples, and whether two models agree on them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.prune._trace import tensors_in
from svdcompress.sources import call, first_tensor, map_tensors

TOLERANCE = 1e-5
"""Largest difference, relative to the largest output (at least 1), that counts as rounding in float32."""


def resized(inputs: Any, batch: int) -> Any:
    """The inputs with another number of examples: rows of every tensor that has as many as the first one, repeated."""
    first = first_tensor(inputs)
    old = first.shape[0] if first.dim() else 0

    def fit(tensor: Tensor) -> Tensor:
        if old == 0 or tensor.dim() == 0 or tensor.shape[0] != old:
            return tensor
        return tensor[torch.arange(batch, device=tensor.device) % old]

    return map_tensors(inputs, fit)


def fresh(inputs: Any, seed: int) -> Any:
    """Inputs of the same shapes and dtypes with other values: normal noise of the same mean and spread, or resampled."""
    generator = torch.Generator().manual_seed(seed)

    def draw(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.numel():
            noise = torch.randn(tensor.shape, generator=generator).to(tensor)
            values = tensor.float()
            spread = float(values.std()) if values.numel() > 1 else 0.0
            if not torch.isfinite(values).all():
                return tensor
            return (values.mean() + (spread or 1.0) * noise.float()).to(tensor.dtype)
        if tensor.is_complex() or not tensor.numel():
            return tensor
        order = torch.randint(tensor.numel(), (tensor.numel(),), generator=generator).to(tensor.device)
        return tensor.reshape(-1)[order].reshape(tensor.shape)

    return map_tensors(inputs, draw)


def holed(inputs: Any, seed: int) -> Any | None:
    """The inputs with zeros in what looks like a mask (all ones, not floating point), the last example masked throughout;
    None where nothing looks like one."""
    generator = torch.Generator().manual_seed(seed)
    found = False

    def draw(tensor: Tensor) -> Tensor:
        nonlocal found
        if tensor.is_floating_point() or tensor.is_complex() or tensor.numel() < 2 or not bool((tensor == 1).all()):
            return tensor
        found = True
        mask = (torch.rand(tensor.shape, generator=generator) > 0.3).to(tensor)
        mask[-1] = 0
        return mask

    result = map_tensors(inputs, draw)
    return result if found else None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in `eval()`, without gradients; each module's mode is put back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


class Judge:
    """Compares models with a reference on fresh inputs and on another batch size.

    cases: inputs on which the reference runs, and what it says; the examples where it runs on nothing else.
    """

    def __init__(self, reference: nn.Module, inputs: Any, batch: int) -> None:
        self.reference = reference
        other = batch - 1 if batch > 1 else batch + 1
        wanted = [fresh(inputs, 1), fresh(resized(inputs, other), 2)]
        masked = holed(inputs, 3)
        wanted += [] if masked is None else [masked]
        self.cases: list[tuple[Any, list[Tensor]]] = []
        with evaluating(reference):
            for case in wanted:
                try:
                    self.cases.append((case, _outputs(reference, case)))
                except Exception:  # values or batch sizes that the masked model cannot take either
                    continue
            if not self.cases:
                self.cases.append((inputs, _outputs(reference, inputs)))
        self.feed: Callable[[Any], Any] = lambda case: case
        self.worst = 0.0
        self.passed: nn.Module | None = None

    def error(self, model: nn.Module) -> float:
        """Largest absolute difference, infinite where shapes differ or one is NaN and the other isn't; raises what the
        model raises."""
        worst = 0.0
        with evaluating(model):
            for case, expected in self.cases:
                worst = max(worst, _difference(_outputs(model, self.feed(case)), expected))
        return worst

    @property
    def scale(self) -> float:
        """Size of the outputs: the largest absolute value, at least 1."""
        values = [t[torch.isfinite(t)].abs().max().item() for _, out in self.cases for t in out if torch.isfinite(t).any()]
        return max([1.0, *values])

    def agrees(self, model: nn.Module) -> bool:
        """Whether the model computes what the reference does, up to rounding; sets `worst`."""
        self.worst = self.error(model)
        if self.worst <= TOLERANCE * self.scale:
            return True
        if self.worst > 0.01 * self.scale:
            return False
        return self._agrees_in_double(model)

    def _agrees_in_double(self, model: nn.Module) -> bool:
        """In double precision rounding is far from a mistake: this tells a deep network's rounding from a wrong channel."""
        try:
            wide, reference = copy.deepcopy(model).double(), copy.deepcopy(self.reference).double()
            worst = scale = 0.0
            with evaluating(wide), evaluating(reference):
                for case, _ in self.cases:
                    case = map_tensors(case, lambda t: t.double() if t.is_floating_point() else t)
                    expected = _outputs(reference, case)
                    worst = max(worst, _difference(_outputs(wide, self.feed(case)), expected))
                    scale = max([scale, 1.0, *(float(t.abs().max()) for t in expected if t.numel())])
        except Exception:
            return False
        return worst <= 1e-6 * scale


def _outputs(model: nn.Module, inputs: Any) -> list[Tensor]:
    with torch.random.fork_rng():  # a model that draws in eval() draws the same each time
        torch.manual_seed(0)
        return [tensor.detach().clone() for tensor in tensors_in(call(model, inputs))]


def _difference(found: list[Tensor], expected: list[Tensor]) -> float:
    if [t.shape for t in found] != [t.shape for t in expected]:
        return float("inf")
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        if not a.is_floating_point() and not a.is_complex():
            worst = max(worst, 0.0 if torch.equal(a, b) else float("inf"))
            continue
        if a.numel() == 0:
            continue
        if not torch.equal(torch.isfinite(a), torch.isfinite(b)):
            return float("inf")
        worst = max(worst, float(torch.nan_to_num(a - b).abs().max()))
    return worst
