"""Losses by name: mean negative log likelihoods of a batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from svdcompress.errors import RecipeError
from svdcompress.likelihoods._named import likelihood_for
from svdcompress.recipe import TASKS, LossSection
from svdcompress.sources import import_name

Loss = Callable[[object, Tensor], Tensor]
"""A function of a model's output and the targets; returns a scalar."""


def make_loss(section: LossSection, *, tau: float = 1.0, class_weights: Tensor | None = None, dim: int = 1) -> Loss:
    """The loss that a recipe names, as a function of the model's whole output and the targets.

    tau: 1 / noise variance of a regression with mse: the loss is tau / 2 * MSE, the negative log likelihood up to a constant.
    class_weights: for cross-entropy (one for each class) and binary (a single one, for the positive class).
    dim: the dimension of the output that holds the classes (see `class_dim`). Positions of the class -100 do not count.
    """
    if ":" in section.name:
        own = import_name(section.name, RecipeError, "loss.name")
        return copy.deepcopy(own).cpu() if isinstance(own, nn.Module) else own  # the user's own stays on its device
    options: dict[str, Any] = {}
    if section.name in ("cross-entropy", "binary"):
        options["class_weights"] = class_weights
    if section.name == "cross-entropy":
        options["label_smoothing"] = section.label_smoothing
    likelihood = likelihood_for(TASKS[section.name], dim, tau if section.name == "mse" else None)
    return partial(likelihood.loss, **options)
