"""The likelihood that a model carries, so that `task` need not be given at each call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from svdcompress.batch import unwrapped
from svdcompress.errors import UsageError
from svdcompress.likelihoods._base import REGISTRY, Likelihood
from svdcompress.likelihoods._named import likelihood_for

_KEY = "_svdc_likelihood"


def set_likelihood(
    model: nn.Module, likelihood: str | Likelihood | None, *, dim: int | None = None, tau: Any = None
) -> nn.Module:
    """Set what a model's output means, once and for all: `mc_predict`, `mean_predict` and `export_onnx` then need no `task`.

    It stays with the model through copies, `prune`, `save` and `load`; a `task` that is given to a call takes precedence.

    likelihood: "classification", "binary", "regression" or "gaussian", or an instance of a likelihood, for example of your
        own subclass of `Likelihood`; None removes the model's likelihood.
    dim: the dimension of the output that holds the classes or heads; None: 1, or the instance's own.
    tau: for regression, the precision of the observations (1 over their noise variance).

    Returns the model. Raises UsageError for an unknown name, and for a class without a name of its own.
    """
    value = None if likelihood is None else likelihood_for(likelihood, dim, tau)
    if value is not None and REGISTRY.get(value.name) is not type(value):
        raise UsageError(
            f"likelihood: {type(value).__name__} has no name of its own; give the class one, as in name = 'poisson', so that "
            "checkpoints can say which it is"
        )
    object.__setattr__(unwrapped(model), _KEY, value)
    return model


def likelihood_of(model: nn.Module) -> Likelihood | None:
    """The likelihood that `set_likelihood`, a run or a checkpoint gave a model; None where it has none."""
    return getattr(unwrapped(model), _KEY, None)


def resolve(
    model: nn.Module, task: str | Likelihood | None, dim: int | None = None, tau: Any = None, default: str = "classification"
) -> Likelihood:
    """The likelihood of a call: the given task, else the model's own likelihood, else the default. A given task ignores the
    model's settings; without one, dim and tau change them."""
    return likelihood_for(task or likelihood_of(model) or default, dim, tau)


def own_likelihood(model: nn.Module, task: str | Likelihood, dim: int | None = None, tau: Any = None) -> Likelihood:
    """The likelihood that a model carries, with what calibration found, if it is of the task; else the task's own.

    dim, tau: settings of the task's own likelihood.
    """
    own, asked = likelihood_of(model), likelihood_for(task, dim, tau)
    return asked if own is None or own.name != asked.name else own


def as_stored(likelihood: Likelihood) -> dict[str, Any]:
    """Name and settings, JSON-able, for a manifest."""
    return {"name": likelihood.name, "settings": likelihood.settings()}


def from_stored(stored: Mapping[str, Any]) -> Likelihood:
    """The likelihood of a manifest. Raises UsageError for an unknown name and for settings that do not fit."""
    name, settings = stored["name"], stored["settings"]
    if name not in REGISTRY:
        raise UsageError(f"likelihood: {name!r} is not known here; define or import its class before you load the file")
    try:
        return REGISTRY[name](**settings)
    except (TypeError, ValueError) as error:
        raise UsageError(f"likelihood: the settings {settings!r} do not fit {name!r} ({error})") from error
