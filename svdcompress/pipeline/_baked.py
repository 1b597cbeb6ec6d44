"""What of a run's preprocessing its ONNX files do themselves: columns in and values out as they stand in the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.batch import map_tensors
from svdcompress.likelihoods import Classification, Likelihood, likelihood_for, likelihood_of, set_likelihood


class InUnits(nn.Module):
    """A model of standardised columns or targets that takes and gives them as they are.

    mean, std: of the columns (features,) of the one input that there is then, or None. shift, scale: of the target.
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
        """The model whose arguments it takes, for the names of a file's inputs."""
        return self.model

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self.mean is not None and self.std is not None:
            inputs = ((inputs[0] - self.mean) / self.std,)
        output = self.model(*inputs, **named)
        if not self.scaled:
            return output
        return self.likelihood.in_units(output, self.shift, self.scale)


@dataclass(frozen=True)
class Baked:
    """See the module. columns: mean and std of the inputs; target: mean and standard deviation of the targets; None: as it is.

    preprocessing: what is left to be done outside the files, for their metadata.
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

    def inputs(self, inputs: Any) -> Any:
        """Inputs as the files take them, from those that the model takes."""
        if self.columns is None:
            return inputs
        mean, std = torch.tensor(self.columns["mean"]), torch.tensor(self.columns["std"])
        return map_tensors(inputs, lambda tensor: tensor * std + mean)

    def tau(self, tau: float | None) -> float | None:
        """A precision in the units of the loss as one in those of the files."""
        return tau if tau is None or self.target is None else tau / self.target[1] ** 2


def baked(preprocessing: Mapping[str, Any], task: str, dim: int = 1) -> Baked:
    """What the files of a run do with standardised columns (unless other transforms follow) and with scaled targets."""
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
