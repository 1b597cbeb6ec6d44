"""Chooses which parameters have gradients, and gives all of them one where several processes average them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from svdcompress.layers import VariationalLayer, variational_layers


@contextmanager
def means_alone(model: nn.Module) -> Iterator[None]:
    """While the body runs, no log variance is trained: no gradient, no place in an optimizer, nothing for DDP to wait for."""
    layers = [layer for _, layer in variational_layers(model)]
    trained = [layer for layer in layers if any(own.requires_grad for own in layer.variance_parameters().values())]
    for layer in trained:
        _train(layer, False)
    try:
        yield
    finally:
        for layer in trained:  # by layer: shrinking makes new parameters
            _train(layer, True)


def _train(layer: VariationalLayer, wanted: bool) -> None:
    for own in layer.variance_parameters().values():
        own.requires_grad_(wanted)


def nothing(model: nn.Module) -> Tensor:
    """0, with a gradient of 0 for each parameter that is trained.

    DDP waits for a gradient of every trained parameter, but a layer that a batch does not reach has none. DDP's own search for
    unused parameters (find_unused_parameters) looks only at the model's output, but the KL covers all variational layers.
    """
    return torch.cat([p.reshape(-1)[:0] for p in model.parameters() if p.requires_grad]).sum()
