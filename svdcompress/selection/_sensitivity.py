"""How far a model's outputs move when a whole unit goes, estimated by the gradient of a gate on the unit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from svdcompress.batch import call, for_gradients, main_output, map_tensors
from svdcompress.errors import UsageError
from svdcompress.layers import VariationalLayer, variational_layers
from svdcompress.prune import Analysis, Consumer, oriented
from svdcompress.relevance import Masks, hold
from svdcompress.selection._readers import readers


def sensitivity(
    model: nn.Module,
    analysis: Analysis,
    masks: Masks,
    examples: Iterable[object],
    device: torch.device | None = None,
    seed: int = 0,
) -> np.ndarray:
    """Per root, how fast the outputs change with a gate on it: `|d outputs / d gate|`, root mean square over the examples.

    The gate multiplies the unit wherever it is read, so its derivative is the sum of `w * d/dw` over the weights that read
    it, except those by which a unit reads itself (depthwise convolutions, after which it is read again). For a unit that no
    other weight reads (queries and keys), the sum is over the weights that write it. The derivative is that of the outputs
    projected on random signs, one projection per batch: the mean of its square is that of the whole Jacobian (Hutchinson
    1990), whatever the batch size, and more batches make the estimate more precise. With outputs in place of a loss, this is
    the Fisher information of Theis et al. 2018 (arXiv 1801.05787) and Molchanov et al. 2019 (arXiv 1906.10771, eq. 8) for a
    constant curvature; it needs no labels, and doesn't vanish where a network fits all of its examples.

    model: is in `eval()` with its masks held while this runs, and is restored afterwards. examples: inputs, a few at a time.
    device: where the model runs; None: where it is.

    Raises UsageError without any batch, and for outputs without gradients or with gradients that are not finite.
    """
    layers: dict[str, VariationalLayer] = dict(variational_layers(model))
    read_by = [(consumer, names[0]) for consumer, names in readers(model, analysis) if names]
    others = [_others(analysis, consumer) for consumer, _ in read_by]
    is_read = np.zeros(analysis.count, bool)
    for (consumer, _), other in zip(read_by, others, strict=True):
        is_read[analysis.root[consumer.ins][other.any(1)]] = True
    squares, batches = np.zeros(analysis.count), 0
    generator = torch.Generator().manual_seed(seed)
    with elsewhere(model, device), as_mean(model, masks):
        for moved in _moved(model, layers, examples, generator):
            read, written = np.zeros(analysis.count), np.zeros(analysis.count)
            for (consumer, name), other in zip(read_by, others, strict=True):
                each = oriented(consumer, moved[name]).sum(3).double().cpu().numpy()
                np.add.at(read, analysis.root[consumer.ins], (each * other).sum(1))
                np.add.at(written, analysis.root[consumer.outs], each.sum(2))
            squares += np.where(is_read, read, written) ** 2
            batches += 1
    if not batches:
        raise UsageError("examples: they hold no batch; pass batches of inputs, a few at a time")
    if not np.isfinite(squares).all():
        raise UsageError(
            "examples: the outputs, or how they change, are not finite numbers; look for NaN in inputs and weights"
        )
    return np.sqrt(squares / batches)


def _others(analysis: Analysis, consumer: Consumer) -> np.ndarray:
    """(groups, outputs, inputs): whether a weight reads another unit than the one it writes."""
    ins, outs = analysis.root[consumer.ins], analysis.root[consumer.outs]
    return outs[:, :, None] != ins[:, None, :]


@contextmanager
def elsewhere(model: nn.Module, device: torch.device | None) -> Iterator[None]:
    """Within it, the model is on a device (None: where it is)."""
    before = next(model.parameters()).device
    try:
        if device is not None:
            model.to(device)
        yield
    finally:
        model.to(before)


def _moved(
    model: nn.Module, layers: Mapping[str, VariationalLayer], examples: Iterable[object], generator: torch.Generator
) -> Iterator[dict[str, Tensor]]:
    """For each batch, `w * d(signs . outputs)/dw` by layer, divided by the square root of the batch size."""
    weights = [layer.weight for layer in layers.values()]
    for inputs in examples:
        inputs = map_tensors(inputs, lambda tensor: tensor.to(weights[0].device))
        with torch.enable_grad():
            output = main_output(call(model, inputs))
            if not output.requires_grad:
                raise UsageError(
                    "examples: the outputs have no gradients; does forward use no_grad or inference_mode, or run in one?"
                )
            signs = torch.randint(0, 2, output.shape, generator=generator).mul_(2).sub_(1).to(output)
            found = torch.autograd.grad((output * signs).sum() / len(output) ** 0.5, weights, allow_unused=True)
        yield {
            name: torch.zeros_like(weight) if gradient is None else (weight * gradient).detach()
            for name, weight, gradient in zip(layers, weights, found, strict=True)
        }


@contextmanager
def as_mean(model: nn.Module, masks: Masks) -> Iterator[None]:
    """Within it, the model is deterministic, with these masks, and its weights require gradients; it is restored afterwards."""
    layers = [layer for _, layer in variational_layers(model)]
    before = [(layer.mask, layer.weight.requires_grad) for layer in layers]
    training = {module: module.training for module in model.modules()}
    hold(model, masks)
    model.eval()
    try:
        for layer in layers:
            layer.weight.requires_grad_(True)
        # random numbers that the model draws are fixed, and leave the caller's generators alone
        with for_gradients(model), torch.random.fork_rng(devices=_devices(layers)):
            torch.manual_seed(0)
            yield
    finally:
        for module, mode in training.items():
            module.training = mode
        for layer, (mask, learns) in zip(layers, before, strict=True):
            layer.mask = mask
            layer.weight.requires_grad_(learns)


def _devices(layers: list[VariationalLayer]) -> list[torch.device]:
    return sorted({layer.weight.device for layer in layers if layer.weight.device.type == "cuda"}, key=str)
