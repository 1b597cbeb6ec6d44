"""A model's output as its file gives it: with its temperature, and with further outputs computed from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.batch import main_output
from svdcompress.export._outputs import Named, named_outputs
from svdcompress.likelihoods import Likelihood, Statistics

Further = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""A function from a file's own outputs by name to more outputs, float32."""


def finished(reference: nn.Module, likelihood: Likelihood, further: Further | None = None) -> nn.Module:
    """Apply the mean model's temperature to the output of `reference`, and add further outputs, in place; returns it.

    reference: an `eval_copy`. A hook does this, so that the model's own arguments keep their names.
    """
    own = likelihood.of_mean()
    if own.temperature != 1 or further is not None:
        reference.register_forward_hook(_Finish(own, further))
    return reference


class _Finish:
    def __init__(self, likelihood: Likelihood, further: Further | None) -> None:
        self.likelihood, self.further = likelihood, further

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.likelihood.temperature != 1:
            tempered = self.likelihood.tempered(output)
            single = isinstance(tempered, Tensor)
            output = _replaced(output, main_output(output), tempered) if single else tempered
        if self.further is None:
            return output
        outputs = named_outputs(output)
        return Named({**outputs, **self.further(outputs)})


def _replaced(value: Any, old: Tensor, new: Tensor) -> Any:
    """The same structure with one tensor replaced by another."""
    if value is old:
        return new
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Mapping):
        fields = {field.name: _replaced(getattr(value, field.name), old, new) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    if isinstance(value, Mapping):
        return {key: _replaced(item, old, new) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_replaced(item, old, new) for item in value)
    return value


class Completed(Statistics):
    """Statistics with outputs in the targets' units, and with further outputs.

    Sums stay in the model's units: if targets are large compared with their deviation, float32 has no room for both. The
    further outputs are computed from the mean as it is in float64, too.

    target_scale: what the targets were standardized with; None: they were not.
    """

    def __init__(self, inner: Statistics, target_scale: tuple[float, float] | None, further: Further | None) -> None:
        super().__init__(inner.likelihood, inner.parts)
        self.inner, self.target_scale, self.further = inner, target_scale, further

    def of_draw(self, output: Any) -> tuple[Tensor, ...]:
        return self.inner.of_draw(output)

    def outputs(self, sums: tuple[Tensor, ...], samples: Tensor) -> dict[str, Tensor]:
        found = self.inner.outputs(sums, samples)
        if self.target_scale is not None:
            shift, scale = torch.tensor(self.target_scale, dtype=torch.float64).unbind()  # plain numbers would become float32
            wide = {name: value.double() for name, value in found.items()}
            found = {name: value * scale + shift if name == "mean" else value * scale**2 for name, value in wide.items()}
        if self.further is not None:
            found = {**found, **self.further(found)}
        return {name: value.to(torch.float32) for name, value in found.items()}
