"""Running statistics of normalisation layers, taken anew for a model that was cut, and put back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from svdcompress.batch import call
from svdcompress.sources import Examples, batch_length
from svdcompress.train import norms

BATCH = 128
"""Examples that one estimate is of; the mean over all of them is taken."""

NAMES = ("running_mean", "running_var", "num_batches_tracked")


def normalisations(model: nn.Module) -> list[_BatchNorm]:
    """Layers whose running statistics are those of the model that they were trained in."""
    return [layer for layer in norms(model) if isinstance(layer, _BatchNorm)]


def mixed(count: int) -> Tensor:
    """An order by chance, always the same: of data that lie class by class a batch tells the variance within a class."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))


@contextmanager
def adapted(model: nn.Module, examples: Examples, device: Any) -> Iterator[None]:
    """The model with the statistics that it has on examples as it now is, masks and all; everything else computes as in
    `eval()`. A network that was cut says next to nothing with its former ones, whatever was cut, and which of several cuts is
    the best is seen with new ones before any training (Li et al. 2020, EagleEye, arXiv 2007.02491, section 3.3).

    model: where `device` is. Without such layers nothing is computed.
    """
    layers = normalisations(model)
    if not layers or len(examples) < 2:
        yield
        return
    model.eval()
    before = [({name: getattr(layer, name).clone() for name in NAMES}, layer.momentum) for layer in layers]
    try:
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # a plain mean over the batches
            layer.train()
        with torch.no_grad():
            for inputs, _ in examples.subset(mixed(len(examples))).batches(BATCH, device=device):
                if batch_length(inputs) > 1:  # one has no variance
                    call(model, inputs)
        model.eval()
        yield
    finally:
        for layer, (numbers, momentum) in zip(layers, before, strict=True):
            for name, number in numbers.items():
                getattr(layer, name).copy_(number)
            layer.momentum = momentum
            layer.eval()
