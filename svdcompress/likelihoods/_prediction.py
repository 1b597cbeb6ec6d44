"""The predictive distribution of a batch of inputs, with its decomposition."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

TASKS = ("classification", "binary", "regression", "gaussian")
"""What a model's output means: logits of classes, one logit each, values, or means and log variances."""


@dataclass(frozen=True, repr=False)
class Prediction:
    """Mean and uncertainties of the predictive distribution; float64, on the model's device.

    Shapes: B inputs, C classes or outputs. Where the model's output has further dimensions, they stay where they are.

    task: "classification", "binary", "regression" or "gaussian". samples: number of draws.
    mean: (B, C); probabilities for classification and binary, else values.
    variance: variance of a label (one-hot, or 0 and 1) or of an observation; aleatoric + epistemic.
    aleatoric: the part that stays with any amount of data. epistemic: the variance over the draws of the network.
        (B, C), or (B, C, C) covariance matrices when asked for in full.
    entropy: of the predictive distribution, in nats; (B,) for classification, (B, C) for binary, None else.
    expected_entropy: mean entropy of the draws. mutual_information: their difference, the uncertainty about the weights.

    Kwon et al. 2018 for classification and binary, Gal & Ghahramani 2016 for regression, Kendall & Gal 2017 for gaussian.
    """

    task: str
    samples: int
    mean: Tensor
    variance: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    entropy: Tensor | None = None
    expected_entropy: Tensor | None = None
    mutual_information: Tensor | None = None
    full: bool = False

    @property
    def std(self) -> Tensor:
        """Standard deviation of a label or an observation, the mean's shape."""
        return _diagonal(self.variance, self.full).sqrt()

    @property
    def epistemic_std(self) -> Tensor:
        """Standard deviation over the draws of the network, the mean's shape: for binary that of the probability."""
        return _diagonal(self.epistemic, self.full).sqrt()

    def __repr__(self) -> str:
        return f"Prediction({self.task}, mean of shape {tuple(self.mean.shape)}, {self.samples} samples)"

    def numpy(self) -> dict[str, np.ndarray]:
        """All arrays that have a meaning for the task, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value.cpu().numpy() for name, value in values.items() if isinstance(value, torch.Tensor)}


def _diagonal(tensor: Tensor, full: bool) -> Tensor:
    return (tensor.diagonal(dim1=-2, dim2=-1) if full else tensor).clamp_min(0)  # rounding may make a variance of 0 negative
