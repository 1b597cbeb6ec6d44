"""Running statistics of normalization layers, re-estimated for a model that was cut and restored afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from svdcompress.batch import call
from svdcompress.pipeline._some import mixed
from svdcompress.sources import Examples, batch_length, fitting
from svdcompress.train import norms

BATCH = 128
"""Examples in each batch, or fewer (two at least) if they are large; the statistics are the mean over all batches."""

NAMES = ("running_mean", "running_var", "num_batches_tracked")


def normalisations(model: nn.Module) -> list[_BatchNorm]:
    """The batch normalization layers, whose running statistics are those of the model as it was trained."""
    return [layer for layer in norms(model) if isinstance(layer, _BatchNorm)]


@contextmanager
def adapted(model: nn.Module, examples: Examples, device: Any) -> Iterator[None]:
    """While the body runs, give the model the running statistics of `examples` as it is now, masks included; everything else
    computes as in `eval()`. With its old statistics a cut network predicts next to nothing, whatever was cut; with new ones,
    the best of several cuts shows before any training (Li et al. 2020, EagleEye, arXiv 2007.02491, section 3.3).

    model: on `device`. Without batch normalization layers, or with fewer than two examples, nothing is computed.
    """
    layers = normalisations(model)
    if not layers or len(examples) < 2:
        yield
        return
    model.eval()
    size = max(2, fitting(model, examples, BATCH, device=device))
    before = [({name: getattr(layer, name).clone() for name in NAMES}, layer.momentum) for layer in layers]
    try:
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # a plain mean over the batches
            layer.train()
        with torch.no_grad():
            for inputs, _ in mixed(examples).batches(size, device=device):
                if batch_length(inputs) > 1:  # a single example has no variance
                    call(model, inputs)
        model.eval()
        yield
    finally:
        for layer, (numbers, momentum) in zip(layers, before, strict=True):
            for name, number in numbers.items():
                getattr(layer, name).copy_(number)
            layer.momentum = momentum
            layer.eval()
