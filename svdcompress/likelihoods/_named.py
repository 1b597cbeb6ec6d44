"""The package's likelihoods by name."""

from __future__ import annotations

from typing import Any

from svdcompress.errors import UsageError
from svdcompress.likelihoods._base import REGISTRY, Likelihood
from svdcompress.likelihoods._binary import Binary
from svdcompress.likelihoods._classification import Classification
from svdcompress.likelihoods._gaussian import Gaussian
from svdcompress.likelihoods._regression import Regression

TASKS = tuple(kind.name for kind in (Classification, Binary, Regression, Gaussian))
"""What a model's output means: logits of classes, one logit each, values, or means and log variances."""


def likelihood_for(task: str | Likelihood, dim: int | None = None, tau: Any = None) -> Likelihood:
    """The likelihood of a name, or the given likelihood, with `dim` and `tau` replaced if they are given.

    dim: the dimension of classes or heads; None: 1, or the given likelihood's. tau: precision, for regression.
    Raises UsageError for an unknown name, and for a tau that the task does not have or that is not a precision.
    """
    if isinstance(task, Likelihood):
        kind, settings = type(task), task.settings()
    elif isinstance(task, str) and task in REGISTRY:
        kind, settings = REGISTRY[task], {}
    else:
        own = sorted(set(REGISTRY) - set(TASKS))
        raise UsageError(f"task: {task!r} is unknown; one of {', '.join([*TASKS, *own])}")
    if tau is not None and not kind.constant_noise:
        raise UsageError(f"tau: it is the constant precision of task 'regression', but the task is {kind.name!r}")
    given = {name: value for name, value in (("dim", dim), ("tau", tau)) if value is not None}
    return task if isinstance(task, Likelihood) and not given else kind(**{**settings, **given})
