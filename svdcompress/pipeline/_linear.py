"""A linear fit to the training data, as a baseline that a network should beat."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from svdcompress.likelihoods import likelihood_for
from svdcompress.sources import Data, InMemory

EXAMPLES = 2000
"""The most training examples that it is fitted to."""

MOST_WEIGHTS = 50_000
"""The most inputs times outputs, for which the fit takes about a second."""

STRENGTHS = (1e-3, 1e-1)
"""Strengths of the L2 penalty, on standardized inputs; the better one is chosen on a held-out fifth of the examples."""


def linear_fit(data: Data, held: InMemory) -> dict[str, float] | None:
    """Metrics of ridge or logistic regression on flattened inputs, on the examples `held`; None if that is not cheap.

    They have the names and units of `evaluate`: error and nll, or rmse.
    """
    train = data.train
    if not isinstance(train, InMemory) or not isinstance(train.inputs, Tensor) or not train.inputs.is_floating_point():
        return None
    if train.targets.dim() > (1 if likelihood_for(data.task).classes else 2):
        return None
    outputs = data.outputs if likelihood_for(data.task).classes else train.targets[0].numel()
    if train.inputs[0].numel() * outputs > MOST_WEIGHTS or len(train) < 10:
        return None
    chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[:EXAMPLES]
    x, y = train.inputs[chosen].flatten(1).double(), train.targets[chosen]
    mean, std = x.mean(0), x.std(0).clamp_min(1e-8)
    x, x_held = (x - mean) / std, (held.inputs.flatten(1).double() - mean) / std
    part = len(x) // 5
    fits = [_fit(x[part:], y[part:], outputs, data.task, strength) for strength in STRENGTHS]
    best = min(fits, key=lambda fit: _figures(fit(x[:part]), y[:part], data)["loss"])
    return {name: value for name, value in _figures(best(x_held), held.targets, data).items() if name != "loss"}


def _fit(x: Tensor, y: Tensor, outputs: int, task: str, strength: float) -> nn.Linear:
    layer = nn.Linear(x.shape[1], outputs).double()
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
        if not likelihood_for(task).probabilities:
            values = y.double().reshape(len(y), -1)
            layer.bias.copy_(values.mean(0))
            gram = x.T @ x / len(x) + strength * torch.eye(x.shape[1], dtype=x.dtype)
            layer.weight.copy_(torch.linalg.solve(gram, x.T @ (values - layer.bias) / len(x)).T)
            return layer
    with torch.enable_grad():
        search = torch.optim.LBFGS(layer.parameters(), max_iter=60, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            search.zero_grad()
            value = _nll(layer(x), y, task) + 0.5 * strength * layer.weight.square().sum()
            value.backward()
            return value

        search.step(loss)  # type: ignore[arg-type]
    return layer


def _nll(logits: Tensor, y: Tensor, task: str) -> Tensor:
    if likelihood_for(task).classes:
        return F.cross_entropy(logits, y)
    return F.binary_cross_entropy_with_logits(logits, y.double().reshape(logits.shape))


@torch.no_grad()
def _figures(output: Tensor, y: Tensor, data: Data) -> dict[str, float]:
    if not likelihood_for(data.task).probabilities:
        square = float((output - y.double().reshape(output.shape)).square().mean())
        return {"rmse": (1.0 if data.target_scale is None else data.target_scale[1]) * square**0.5, "loss": square}
    wrong = output.argmax(1) != y if likelihood_for(data.task).classes else (output > 0) != (y.reshape(output.shape) > 0.5)
    nll = float(_nll(output, y, data.task))
    return {"error": 100 * float(wrong.double().mean()), "nll": nll, "loss": nll}
