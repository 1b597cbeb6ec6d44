"""How far a model's outputs move when a whole unit goes, by gradients of a gate on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from svdcompress.batch import call, main_output, map_tensors
from svdcompress.layers import VariationalLayer, variational_layers
from svdcompress.prune import Analysis, oriented
from svdcompress.relevance import Masks, hold
from svdcompress.selection._readers import readers


def sensitivity(model: nn.Module, analysis: Analysis, masks: Masks, examples: Iterable[object], seed: int = 0) -> np.ndarray:
    """Per root, how fast the outputs change with a gate on it: `|d outputs / d gate|`, root mean square over the examples.

    A gate multiplies all that reads the unit, so its derivative is the sum of `w * d/dw` over these weights; for a unit that no
    weight reads (queries and keys), over those that write it. It is that of outputs projected on random signs, one projection
    for each batch: the mean of its square is that of the whole Jacobian (Hutchinson 1990), whatever the batch size, and more
    batches tell more. With outputs in place of a loss this is the Fisher information of Theis et al. 2018 (arXiv 1801.05787)
    and Molchanov et al. 2019 (arXiv 1906.10771, eq. 8) for a constant curvature; it needs no labels, and doesn't vanish where
    a network fits all of its examples.

    model: in `eval()` meanwhile, as are its masks held; it stays as it is. examples: inputs, a few at a time.
    """
    layers: dict[str, VariationalLayer] = dict(variational_layers(model))
    read_by = [(consumer, names[0]) for consumer, names in readers(model, analysis) if names]
    is_read = np.zeros(analysis.count, bool)
    for consumer, _ in read_by:
        is_read[analysis.root[consumer.ins]] = True
    squares, batches = np.zeros(analysis.count), 0
    generator = torch.Generator().manual_seed(seed)
    with _as_mean(model, masks):
        for moved in _moved(model, layers, examples, generator):
            read, written = np.zeros(analysis.count), np.zeros(analysis.count)
            for consumer, name in read_by:
                each = oriented(consumer, moved[name]).sum(3).double()
                np.add.at(read, analysis.root[consumer.ins], each.sum(1).cpu().numpy())
                np.add.at(written, analysis.root[consumer.outs], each.sum(2).cpu().numpy())
            squares += np.where(is_read, read, written) ** 2
            batches += 1
    return np.sqrt(squares / max(batches, 1))


def _moved(
    model: nn.Module, layers: Mapping[str, VariationalLayer], examples: Iterable[object], generator: torch.Generator
) -> Iterator[dict[str, Tensor]]:
    """For each batch, `w * d(signs . outputs)/dw`, by layer, over the root of its size."""
    weights = [layer.weight for layer in layers.values()]
    for inputs in examples:
        inputs = map_tensors(inputs, lambda tensor: tensor.to(weights[0].device))
        with torch.enable_grad():
            output = main_output(call(model, inputs))
            signs = torch.randint(0, 2, output.shape, generator=generator).mul_(2).sub_(1).to(output)
            found = torch.autograd.grad((output * signs).sum() / len(output) ** 0.5, weights, allow_unused=True)
        yield {
            name: torch.zeros_like(weight) if gradient is None else (weight * gradient).detach()
            for name, weight, gradient in zip(layers, weights, found, strict=True)
        }


@contextmanager
def _as_mean(model: nn.Module, masks: Masks) -> Iterator[None]:
    """The deterministic model with these masks, its weights ready for gradients; as it was afterwards."""
    layers = [layer for _, layer in variational_layers(model)]
    before = [(layer.mask, layer.weight.requires_grad) for layer in layers]
    training = {module: module.training for module in model.modules()}
    hold(model, masks)
    model.eval()
    try:
        for layer in layers:
            layer.weight.requires_grad_(True)
        # cuDNN's recurrent layers have no gradients in eval(); a model that draws has its own numbers meanwhile
        cudnn = not any(isinstance(module, nn.RNNBase) for module in training)
        with torch.backends.cudnn.flags(enabled=cudnn), torch.random.fork_rng(devices=_devices(layers)):
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
