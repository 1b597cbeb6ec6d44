"""Whether the dense model has learned anything: a model that ignores its inputs would be compressed to nothing.

Also whether it is better than a linear fit.
"""

from __future__ import annotations

import torch
from torch import nn

from svdcompress.likelihoods import likelihood_for
from svdcompress.pipeline._linear import linear_fit
from svdcompress.pipeline._some import some
from svdcompress.sources import Data, Examples, InMemory
from svdcompress.train import evaluate

EXAMPLES = 2000
"""The most validation examples that are used: they may have to be read from files."""


BETTER = 0.98
"""A model is better than a linear fit if any of its figures is below this fraction of the fit's."""


def no_skill(model: nn.Module, data: Data, device: torch.device | str = "cpu") -> str | None:
    """A warning if a model is no better than one and the same answer to all inputs, or hardly better than a linear fit, on some
    of the validation data; else None.

    That answer is the most common class, or the mean of the targets, of the same examples. A classifier must also be no
    better by its NLL: if one class is rare, its probabilities may be informative although its answers are not.
    """
    likelihood = likelihood_for(data.task, data.dim)
    seen = some(data.validation, EXAMPLES)
    try:
        targets = torch.cat([targets.reshape(len(targets), -1) for _, targets in seen.batches(EXAMPLES)])
        blind = likelihood.blind(targets, 1.0 if data.target_scale is None else data.target_scale[1])
    except RuntimeError:  # for example, targets of different shapes: no answer fits all
        return None
    metrics = evaluate(model, seen, likelihood, device=device, scale=data.target_scale)
    if any(metrics[name] < value or not value for name, value in blind.items()):
        return _hardly_better(model, data, seen, metrics)
    said = " and ".join(f"{name} {metrics[name]:.4g} (the same answer to all inputs: {blind[name]:.4g})" for name in blind)
    return (
        f"the dense model has learned nothing worth keeping: on the validation data {said}. Do its weights fit it, and is "
        "the data prepared as in its training (data.transform)? Does it need more dense.epochs, or another dense.lr?"
    )


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
