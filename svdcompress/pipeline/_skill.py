"""Whether a model is better than one and the same answer to all inputs, which compresses to nothing, and than a linear fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from svdcompress.likelihoods import likelihood_for
from svdcompress.pipeline._linear import linear_fit
from svdcompress.pipeline._some import some
from svdcompress.sources import Data, Examples, InMemory, fitting
from svdcompress.train import evaluate

EXAMPLES = 2000
"""The most validation examples that are used: they may have to be read from files."""


LOST = 0.05
"""A small model has lost its skill if less than this fraction of the dense model's is left."""

GAINED = 0.99
"""A dense model has a skill to lose in a figure that is below this fraction of the one of a single answer."""

BETTER = 0.98
"""A model is better than a linear fit if any of its figures is below this fraction of the fit's."""


def no_skill(model: nn.Module, data: Data, device: torch.device | str = "cpu") -> str | None:
    """A warning if a dense model is no better than one and the same answer to all inputs, or hardly better than a linear fit,
    on some of the validation data; else None.

    That answer is the most common class, or the mean of the targets, of the same examples. A classifier must also be no
    better by its NLL: if one class is rare, its probabilities may be informative although its answers are not.
    """
    seen = some(data.validation, EXAMPLES)
    blind = _blind(data, seen)
    if not blind:
        return None
    metrics = evaluate(model, seen, likelihood_for(data.task, data.dim), device=device, scale=data.target_scale)
    if any(metrics[name] < value or not value for name, value in blind.items()):
        return _hardly_better(model, data, seen, metrics)
    said = " and ".join(f"{name} {metrics[name]:.4g} (the same answer to all inputs: {blind[name]:.4g})" for name in blind)
    divided = data.preprocessing.get("bytes")
    scaled = f"; bytes are {divided}" if divided else ""
    return (
        f"the dense model has learned nothing worth keeping: on the validation data {said}. Do its weights fit it, and is "
        f"the data prepared as in its training (data.transform{scaled})? Does it need more dense.epochs, or another dense.lr?"
    )


def lost_skill(dense: Mapping[str, Any], small: Mapping[str, Any], data: Data, searched: bool = True) -> str | None:
    """A warning if a small model is hardly better than one and the same answer to all inputs, and the dense one is; else None.

    Where one answer is much more common than the others, such a model can be within a budget for errors. Hardly better: of
    what the dense model gains over that answer, in each figure in which it gains at least GAINED, less than LOST is left.
    dense, small: their metrics on the validation data. searched: whether a search has found the small one.
    """
    blind = _blind(data, data.validation if isinstance(data.validation, InMemory) else some(data.validation, EXAMPLES))
    left = {
        name: (value - small[name]) / (value - dense[name]) for name, value in blind.items() if dense[name] < GAINED * value
    }
    if not left or max(left.values()) >= LOST:
        return None
    said = " and ".join(f"{name} {small[name]:.4g} (dense: {dense[name]:.4g}; one answer: {blind[name]:.4g})" for name in left)
    rare = " Errors hardly show this where one answer is much more common than the others." if "error" in left else ""
    less = "Allow less (--max-drop), or ask for a smaller factor (--goal)"
    kept = less if searched else "Remove less: a higher --threshold, or a lower --set train.beta.final=..."
    return (
        "the small model is hardly better than one and the same answer to all inputs: on the validation data "
        f"{said}.{rare} {kept}"
    )


def _blind(data: Data, seen: Examples) -> dict[str, float]:
    """The figures of the best single answer to all of the examples; {} if there is none."""
    likelihood = likelihood_for(data.task, data.dim)
    try:
        targets = torch.cat([targets.reshape(len(targets), -1) for _, targets in seen.batches(fitting(None, seen, EXAMPLES))])
        return likelihood.blind(targets, 1.0 if data.target_scale is None else data.target_scale[1])
    except RuntimeError:  # for example, targets of different shapes: no answer fits all
        return {}


def _hardly_better(model: nn.Module, data: Data, seen: Examples, metrics: dict[str, float]) -> str | None:
    """A warning if a linear fit does about as well; none for a model with a single layer, which is a linear model itself."""
    layers = [module for module in model.modules() if getattr(getattr(module, "weight", None), "dim", int)() >= 2]
    linear = linear_fit(data, seen) if isinstance(seen, InMemory) and len(layers) > 1 else None
    if linear is None or any(metrics[name] < BETTER * value or not value for name, value in linear.items()):
        return None
    said = " and ".join(f"{name} {metrics[name]:.4g} (linear fit: {linear[name]:.4g})" for name in linear)
    return (
        f"the dense model is hardly better than a linear fit to its data: on the validation data {said}. Does it need more "
        "dense.epochs, or another dense.lr? Otherwise a linear model would do, and is smaller than any network"
    )
