"""Example inputs: their names in the file, their batch dimension, and batches of other sizes for the checks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.errors import ExportError
from svdcompress.export._axes import Axes, OpenAxes


class Signature:
    """How a model is called: which of its arguments are tensors (inputs of the file) and which are fixed values.

    names: input names in the file: "input" for a single positional tensor, else the argument names.
    tensors: the examples, float32 where they are floating, on the CPU, batch first, in the order of `names`.
    open: the dimensions besides the batch whose sizes the file leaves open.
    """

    def __init__(self, model: nn.Module, example_inputs: Any, dynamic_axes: Axes | None = None) -> None:
        if isinstance(example_inputs, Tensor):
            example_inputs = (example_inputs,)
        if isinstance(example_inputs, Mapping):
            self._arguments: dict[int | str, Any] = dict(example_inputs.items())
        elif isinstance(example_inputs, Sequence) and not isinstance(example_inputs, str):
            self._arguments = dict(enumerate(example_inputs))
        else:
            kind = type(example_inputs).__name__
            raise ExportError(
                f"example_inputs: give a tensor, a tuple of positional inputs or a dict of keyword inputs, not {kind}"
            )
        self._keys = [key for key, value in self._arguments.items() if isinstance(value, Tensor)]
        self.names = _names(model, self._keys)
        self.tensors = [_plain(self._arguments[key]) for key in self._keys]
        self._arguments = {key: None if key in self._keys else value for key, value in self._arguments.items()}
        self.batch = _batch(self.names, self.tensors)
        self.open = OpenAxes(self.names, self.tensors, dynamic_axes)
        if self.open:
            self.open.find(lambda tensors: self.call(model, tensors), [tensor[:1] for tensor in self.tensors])

    def call(self, model: nn.Module, tensors: Sequence[Tensor]) -> Any:
        """The model's output for these inputs, fixed arguments filled in."""
        arguments = {**self._arguments, **dict(zip(self._keys, tensors, strict=True))}
        positional = [value for key, value in arguments.items() if isinstance(key, int)]
        return model(*positional, **{key: value for key, value in arguments.items() if isinstance(key, str)})

    def resized(self, batch: int) -> list[Tensor]:
        """The examples repeated or cut to another batch size, values unchanged. Open dimensions have the size that `open`
        gives batches of this size."""
        rows = [tensor[torch.arange(batch) % self.batch].clone() for tensor in self.tensors]
        return self.open.at(rows, self.open.of_check(batch))

    def moved(self, batch: int) -> list[Tensor]:
        """As `resized`, with noise added to floating inputs and the integers of each row in an order of their own, so that no
        two rows are alike."""
        generator = torch.Generator().manual_seed(batch)

        def moved(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point():
                return _moved(tensor, generator)
            order = torch.rand(tensor.flatten(1).shape, generator=generator).argsort(1) if tensor.dim() > 1 else None
            return tensor if order is None else tensor.flatten(1).gather(1, order).view(tensor.shape)

        return [moved(tensor) for tensor in self.resized(batch)]

    def tried(self, batch: int, answer: Callable[[list[Tensor]], dict[str, Tensor]]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Inputs of a batch size that can tell models apart, and PyTorch's outputs for them.

        As `resized`, with noise added to floating inputs, so that rows differ even if the example is all zeros. Noise can
        make a square root or a logarithm NaN, and any NaN counts as equal to another. In that case the examples' own values
        are tried in another order, then as they are, then without their signs. The first variant whose outputs are all
        finite is taken, otherwise the one with the most finite numbers.

        answer: from inputs to PyTorch's outputs by name. If it fails for every variant, its first exception is raised.
        """
        best: tuple[int, list[Tensor], dict[str, Tensor]] | None = None
        failed: Exception | None = None
        for change in _CHANGES if any(tensor.is_floating_point() for tensor in self.tensors) else [_as_it_is]:
            generator = torch.Generator().manual_seed(batch)
            tensors = [change(tensor, generator) if tensor.is_floating_point() else tensor for tensor in self.resized(batch)]
            try:
                with torch.no_grad():
                    outputs = {name: value.clone() for name, value in answer(tensors).items()}
            except Exception as error:  # a model that refuses such values
                failed = failed or error
                continue
            finite = sum(int(value.isfinite().sum()) for value in outputs.values())
            if best is None or finite > best[0]:
                best = finite, tensors, outputs
            if finite == sum(value.numel() for value in outputs.values()):
                break
        if best is None:
            assert failed is not None  # at least the examples as they are were tried
            raise failed
        return best[1], best[2]


def _names(model: nn.Module, keys: list[int | str]) -> list[str]:
    """Names of the inputs. A wrapper that takes any arguments names the model whose arguments they are as `arguments_of`."""
    if not keys:
        raise ExportError("example_inputs: contain no tensor")
    if keys == [0]:
        return ["input"]
    try:
        parameters = list(inspect.signature(getattr(model, "arguments_of", model).forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [key if isinstance(key, str) else known[key] if key < len(known) else f"input_{key}" for key in keys]


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    return tensor.float() if tensor.is_floating_point() else tensor


def _batch(names: list[str], tensors: list[Tensor]) -> int:
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.dim() == 0:
            raise ExportError(f"example_inputs: {name!r} is a scalar tensor; its first dimension must be the batch")
        if tensor.shape[0] == 0:
            raise ExportError(f"example_inputs: {name!r} has a batch of 0 rows; give at least one")
        if tensor.is_floating_point() and tensor.isnan().any():
            raise ExportError(f"example_inputs: {name!r} holds NaN")
    sizes = {tensor.shape[0] for tensor in tensors}
    if len(sizes) > 1:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in zip(names, tensors, strict=True))
        raise ExportError(f"example_inputs: the first dimension must be the batch, the same in all of them ({shapes})")
    return sizes.pop()


def _moved(tensor: Tensor, generator: torch.Generator) -> Tensor:
    return tensor + torch.randn(tensor.shape, generator=generator) * _spread(tensor)


def _spread(tensor: Tensor) -> Tensor:
    """How far noise moves a tensor: three tenths of its standard deviation. The columns of a table (N, columns) have units
    of their own; for a constant column its absolute value is used, and for a column of zeros the median of the others."""
    if not tensor.numel():
        return torch.ones(1)
    columns = tensor.double() if tensor.dim() == 2 else tensor.double().reshape(-1, 1)
    finite = columns.isfinite()
    count, values = finite.sum(0).clamp_min(1), columns.where(finite, 0)
    size, mean = values.abs().sum(0) / count, values.sum(0) / count
    variance = (values - mean).where(finite, 0).square().sum(0) / (count - 1).clamp_min(1)
    varies = columns.where(finite, math.inf).amin(0) < columns.where(finite, -math.inf).amax(0)
    spreads = variance.sqrt().where(varies, size).float()
    known = spreads[spreads > 0]
    return 0.3 * spreads.where(spreads > 0, float(known.median()) if len(known) else 1 / 0.3)


def _shuffled(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not tensor.numel():
        return tensor
    return tensor.flatten()[torch.randint(tensor.numel(), (tensor.numel(),), generator=generator)].reshape(tensor.shape)


def _as_it_is(tensor: Tensor, generator: torch.Generator) -> Tensor:
    return tensor


def _positive(tensor: Tensor, generator: torch.Generator) -> Tensor:
    return tensor.abs()


_CHANGES = [_moved, _shuffled, _as_it_is, _positive]
"""The changes to a floating input, in the order in which they are tried; see `Signature.tried`."""
