"""Refits the posterior with the plain evidence lower bound: beta = 1, masks frozen, N the number of examples."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from svdcompress.batch import call, for_gradients
from svdcompress.calibrate._kept import held
from svdcompress.layers import variational_layers
from svdcompress.likelihoods import Likelihood
from svdcompress.objective import ELBO
from svdcompress.sources import Examples, fitting

BATCH, KEPT = 100, 8
"""Examples in a batch, or fewer if those of this many batches would not fit into a pass without gradients: with gradients, the
outputs of all layers are kept."""

Fit = Callable[[nn.Module], Any]
"""Trains a model in place."""


def refit(
    model: nn.Module,
    examples: Examples,
    likelihood: Likelihood,
    *,
    epochs: int = 10,
    beta: float = 1.0,
    means: bool = True,
    lr: float = 1e-3,
    lr_log_sigma2: float = 3e-2,
    batch_size: int | None = None,
    seed: int = 0,
    device: Any = "cpu",
    fit: Fit | None = None,
) -> nn.Module:
    """A copy of the model, trained for `epochs` more epochs with the ELBO (Kingma & Welling 2014) and its masks frozen.

    beta: 1 is the bound itself; the beta that pruned the network may be another. means: False trains only the variances, so
    that the mean model does not change. batch_size: None is 100, or fewer if examples are large. fit: the caller's own training
    in place of this loop (Adam, learning rates that fall linearly to 0).
    """
    model = copy.deepcopy(model).to(device)
    layers = [layer for _, layer in variational_layers(model)]
    with held(model):
        masks = [layer.mask for layer in layers]
    for layer, mask in zip(layers, masks, strict=True):
        layer.mask = mask
    if fit is not None:
        fit(model)
        return model.eval()
    variances = list({id(one): one for layer in layers for one in layer.variance_parameters().values()}.values())
    theirs = {id(parameter) for parameter in variances}
    others = [p for p in model.parameters() if id(p) not in theirs and p.requires_grad]
    groups = [{"params": variances, "lr": lr_log_sigma2}, *([{"params": others, "lr": lr}] if means else [])]
    optimizer = torch.optim.Adam(groups)
    if batch_size is None:
        batch_size = max(1, fitting(model, examples, BATCH * KEPT, device=device) // KEPT)
    steps = epochs * math.ceil(len(examples) / batch_size)
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    elbo = ELBO(model, likelihood.loss, len(examples), beta)
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=devices), nullcontext() if means else for_gradients(model):
        torch.manual_seed(seed)
        for epoch in range(epochs):
            model.train(means)
            for layer in layers:
                layer.train()
            for inputs, targets in examples.batches(batch_size, shuffle=seed * 1000 + epoch, device=device):
                optimizer.zero_grad()
                elbo(call(model, inputs), targets).backward()
                optimizer.step()
                falling.step()
    return model.eval()
