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
from svdcompress.sources._positions import IGNORED, classes_second, like

Loss = Callable[[object, Tensor], Tensor]
"""Of a model's output and the targets; a scalar."""


def make_loss(section: LossSection, *, tau: float = 1.0, class_weights: Tensor | None = None, dim: int = 1) -> Loss:
    """The loss that a recipe names, as a function of the model's whole output and the targets.

    tau: 1 / noise variance of a regression with mse: the loss is tau / 2 * MSE, the negative log likelihood up to a constant.
    class_weights: for cross-entropy (of each class) and binary (one: of the positive class).
    dim: the dimension of the output that holds the classes (see `class_dim`). Positions of the class -100 do not count.
    """
    if ":" in section.name:
        return import_name(section.name, RecipeError, "loss.name")
    if section.name == "cross-entropy":
        smoothing = section.label_smoothing

        def cross_entropy(output: object, target: Tensor) -> Tensor:
            weight = None if class_weights is None else class_weights.to(target.device)
            logits = classes_second(main_output(output), dim)
            if target.dim() > 1 and bool((target == IGNORED).all()):
                return logits.sum() * 0  # the mean over nothing
            return F.cross_entropy(logits, target, weight=weight, label_smoothing=smoothing, ignore_index=IGNORED)

        return cross_entropy
    if section.name == "binary":

        def binary(output: object, target: Tensor) -> Tensor:
            logit = main_output(output)
            weight = None if class_weights is None else class_weights[-1].to(target.device)
            return F.binary_cross_entropy_with_logits(logit, like(target, logit).to(logit.dtype), pos_weight=weight)

        return binary
    if section.name == "mse":

        def mse(output: object, target: Tensor) -> Tensor:
            mean = main_output(output)
            return 0.5 * tau * F.mse_loss(mean, like(target, mean))

        return mse

    def gaussian(output: object, target: Tensor) -> Tensor:
        return gaussian_nll(output, target, dim)

    return gaussian


def gaussian_nll(output: object, target: Tensor, dim: int = -1) -> Tensor:
    """-log N(target; mean, exp(log variance)) up to a constant; output and dim as `gaussian_heads` takes them."""
    mean, log_variance = gaussian_heads(output, dim)
    target = like(target, mean)
    return 0.5 * (log_variance + (target - mean).square() * torch.exp(-log_variance)).mean()


def gaussian_heads(output: object, dim: int = -1) -> tuple[Tensor, Tensor]:
    """Mean and log variance of a model with two heads: a pair, or one tensor whose dimension `dim` holds both halves."""
    if isinstance(output, tuple | list) and len(output) == 2:
        return output[0], output[1]
    mean, log_variance = main_output(output).chunk(2, dim=dim)
    return mean, log_variance
