"""Losses by name: mean negative log likelihoods of a batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from svdcompress.errors import RecipeError
from svdcompress.recipe import LossSection
from svdcompress.sources._call import main_output
from svdcompress.sources._names import import_name

Loss = Callable[[object, Tensor], Tensor]
"""Of a model's output and the targets; a scalar."""


def make_loss(section: LossSection, *, tau: float = 1.0, class_weights: Tensor | None = None) -> Loss:
    """The loss that a recipe names, as a function of the model's whole output and the targets.

    tau: 1 / noise variance of a regression with mse: the loss is tau / 2 * MSE, the negative log likelihood up to a constant.
    class_weights: for cross-entropy (of each class) and binary (one: of the positive class).
    """
    if ":" in section.name:
        return import_name(section.name, RecipeError, "loss.name")
    if section.name == "cross-entropy":
        smoothing = section.label_smoothing

        def cross_entropy(output: object, target: Tensor) -> Tensor:
            weight = None if class_weights is None else class_weights.to(target.device)
            return F.cross_entropy(main_output(output), target, weight=weight, label_smoothing=smoothing)

        return cross_entropy
    if section.name == "binary":

        def binary(output: object, target: Tensor) -> Tensor:
            logit = main_output(output)
            weight = None if class_weights is None else class_weights[-1].to(target.device)
            return F.binary_cross_entropy_with_logits(logit, target.to(logit.dtype).view_as(logit), pos_weight=weight)

        return binary
    if section.name == "mse":

        def mse(output: object, target: Tensor) -> Tensor:
            mean = main_output(output)
            return 0.5 * tau * F.mse_loss(mean, target.view_as(mean))

        return mse
    return gaussian_nll


def gaussian_nll(output: object, target: Tensor) -> Tensor:
    """-log N(target; mean, exp(log variance)) up to a constant; the output is (mean, log variance), or their concatenation."""
    mean, log_variance = gaussian_heads(output)
    target = target.view_as(mean)
    return 0.5 * (log_variance + (target - mean).square() * torch.exp(-log_variance)).mean()


def gaussian_heads(output: object) -> tuple[Tensor, Tensor]:
    """Mean and log variance of a model with two heads: a pair, or one tensor whose last dimension holds both halves."""
    if isinstance(output, tuple | list) and len(output) == 2:
        return output[0], output[1]
    mean, log_variance = main_output(output).chunk(2, dim=-1)
    return mean, log_variance
