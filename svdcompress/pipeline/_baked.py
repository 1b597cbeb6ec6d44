"""The part of a run's preprocessing that its ONNX files do themselves: they take columns and give values as in the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.batch import map_tensors
from svdcompress.likelihoods import Classification, Likelihood, likelihood_for, likelihood_of, set_likelihood

NEGLIGIBLE = 1e-4
"""How far rounding may move a mean, in standard deviations of the target."""


class InUnits(nn.Module):
    """Wraps a model of standardized columns or targets so that it takes and returns them in their own units.

    mean, std: (features,) of the columns of the single input, or None. shift, scale: of the target.
    likelihood: what the outputs mean.
    """

    mean: Tensor | None
    std: Tensor | None

    def __init__(self, model: nn.Module, columns: Mapping[str, Any] | None, target: Any, likelihood: Likelihood) -> None:
        super().__init__()
        self.model = model
        for name in ("mean", "std"):
            value = None if columns is None else torch.tensor(columns[name], dtype=torch.float32)
            self.register_buffer(name, value, persistent=False)
        self.shift, self.scale = target or (0.0, 1.0)
        self.scaled, self.likelihood = target is not None, likelihood

    @property
    def arguments_of(self) -> nn.Module:
        """The inner model, whose argument names become the names of a file's inputs."""
        return self.model

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self.mean is not None and self.std is not None:
            inputs = ((inputs[0] - self.mean) / self.std,)
        output = self.model(*inputs, **named)
        if not self.scaled:
            return output
        whole = float(torch.tensor(self.shift, dtype=torch.float32))
        if abs(self.shift - whole) <= NEGLIGIBLE * self.scale:
            return self.likelihood.in_units(output, self.shift, self.scale)
        near = self.likelihood.in_units(output, self.shift - whole, self.scale)  # what float32 has no room for in the shift
        return self.likelihood.in_units(near, whole, 1.0)


@dataclass(frozen=True)
class Baked:
    """What the files do themselves. columns: mean and std of the inputs; target: mean and std of the targets; None: unchanged.

    preprocessing: what remains to be done outside the files, for their metadata.
    """

    columns: Mapping[str, Any] | None = None
    target: tuple[float, float] | None = None
    likelihood: Likelihood = field(default_factory=Classification)
    preprocessing: dict[str, Any] = field(default_factory=dict)

    def model(self, model: nn.Module) -> nn.Module:
        """The model as the files hold it."""
        if self.columns is None and self.target is None:
            return model
        units = InUnits(model, self.columns, self.target, self.likelihood).eval()
        own = likelihood_of(model)
        return units if own is None else set_likelihood(units, own.rescaled(self.target[1] if self.target else 1.0))

    def drawn(self, model: nn.Module) -> nn.Module:
        """The model that a Monte-Carlo file is made of: it gives standardized values, which `export_onnx` with `target_scale`
        converts once they are summed."""
        return replace(self, target=None).model(model)

    def standardized(self, output: Any) -> Any:
        """Convert outputs of a deterministic file to outputs of the model; float64 has room for shift and values."""
        if self.target is None:
            return output
        shift, scale = self.target
        wide = map_tensors(output, lambda tensor: tensor.double())
        return map_tensors(self.likelihood.in_units(wide, -shift / scale, 1 / scale), lambda tensor: tensor.float())

    def inputs(self, inputs: Any) -> Any:
        """Convert inputs of the model to inputs of the files."""
        if self.columns is None:
            return inputs
        mean, std = torch.tensor(self.columns["mean"]), torch.tensor(self.columns["std"])
        return map_tensors(inputs, lambda tensor: tensor * std + mean)

    def tau(self, tau: float | None) -> float | None:
        """Convert a precision from the units of the loss to those of the files."""
        return tau if tau is None or self.target is None else tau / self.target[1] ** 2


def baked(preprocessing: Mapping[str, Any], task: str, dim: int = 1) -> Baked:
    """What a run's files do themselves: standardize columns (unless other transforms follow) and rescale targets."""
    transform = list(preprocessing.get("transform") or ())
    mine = preprocessing.get("standardized") and "columns" in preprocessing and len(transform) == 1
    columns = transform[0]["normalize"] if mine else None
    scale = preprocessing.get("target_scale")
    left = dict(preprocessing)
    if scale:
        left["target_scale"] = None
    if columns is not None:
        left["transform"] = []
    return Baked(columns, tuple(scale) if scale else None, likelihood_for(task, dim), left)
