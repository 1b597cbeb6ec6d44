"""The Kronecker approximation of the Gauss-Newton matrix, layer by layer, restricted to the kept weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from svdcompress.batch import call, for_gradients
from svdcompress.calibrate._curvature import Block, Curvature, check_fits, counted, noise_root, some
from svdcompress.calibrate._jacobians import flat_heads
from svdcompress.calibrate._kept import Kept
from svdcompress.errors import ModelError
from svdcompress.hooks import hooked
from svdcompress.layers import drawing, stochastic_layers
from svdcompress.likelihoods import Likelihood
from svdcompress.sources import Examples, fitting

BATCH = 250
"""Examples per pass, or fewer if they are large."""


def kronecker(
    model: nn.Module,
    kept: Kept,
    examples: Examples,
    likelihood: Likelihood,
    *,
    tau: float = 1.0,
    most: int | None = None,
    seed: int = 0,
    device: Any = "cpu",
) -> Curvature:
    """One block per layer, A (x) G of Martens & Grosse 2015 (arXiv 1503.05671, eq. 1), for convolutions of Grosse & Martens
    2016 (arXiv 1602.01407, eq. 25), cut down to the rows and columns of the kept weights.

    A restricted Kronecker product is no longer one, so a block takes as much memory as the full matrix of its layer: what the
    approximation saves here is the Jacobians. Arguments as in `gauss_newton`. Raises ModelError for layers other than Linear
    and convolutions in one or two dimensions (without groups, with zero padding), for a layer that is called twice in a pass,
    and if a block is too large.
    """
    count = len(examples)
    examples = some(examples, most, seed)
    for where in kept.slices:
        check_fits(where.stop - where.start)
    with for_gradients(model):
        factors = _factors(model, kept, examples, likelihood.plain(), tau, device)
    blocks = []
    for name, place, where in zip(kept.names, kept.places, kept.slices, strict=True):
        inputs, outputs = factors[name]
        row, column = place // inputs.shape[0], place % inputs.shape[0]
        matrix = inputs[column][:, column] * outputs[row][:, row] * (count / len(examples))
        values, vectors = torch.linalg.eigh(matrix)
        blocks.append(Block(where, values.clamp_min(0), vectors))
    return Curvature("kronecker", tuple(blocks), len(kept), len(examples))


def _factors(
    model: nn.Module, kept: Kept, examples: Examples, likelihood: Likelihood, tau: float, device: Any
) -> dict[str, tuple[Tensor, Tensor]]:
    """For each layer, A averaged over examples and G summed over them."""
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in kept.names}
    for name, layer in layers.items():
        _check(name, layer)
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    count, sums = 0, dict[str, list[Tensor]]()

    def watch(name: str) -> Any:
        def hook(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if name in seen:
                raise ModelError(f"{name}: called twice in a pass, which the Kronecker approximation does not support")
            output = output if output.requires_grad else output.requires_grad_()
            seen[name] = args[0].detach(), output
            return output

        return hook

    size = fitting(model, examples, BATCH, device=device)
    with hooked(layer.register_forward_hook(watch(name)) for name, layer in layers.items()):
        for inputs, targets in examples.batches(size, device=device):
            seen.clear()
            with torch.enable_grad(), drawing(stochastic_layers(model), None):
                heads = likelihood.heads(call(model, inputs))
                flat = flat_heads(likelihood, heads)
            root = counted(noise_root(likelihood, tree_map(Tensor.detach, heads), tau), likelihood, targets)
            outputs = [seen[name][1] for name in layers]
            grams: list[Tensor | float] = [0.0] * len(layers)
            for head in range(root.shape[2]):
                slopes = torch.autograd.grad((flat * root[:, :, head]).sum(), outputs, retain_graph=True)
                for index, (slope, layer) in enumerate(zip(slopes, layers.values(), strict=True)):
                    grams[index] = grams[index] + _gram(_channels_last(slope, layer))
            for name, gram, layer in zip(layers, grams, layers.values(), strict=True):
                patches = _patches(seen[name][0], layer)
                positions = patches.shape[0] // len(root)
                found = [_gram(patches), gram / positions]
                sums[name] = [a + b for a, b in zip(sums[name], found, strict=True)] if name in sums else found
            count += len(root)
    return {name: (a.double().cpu() / count, g.double().cpu()) for name, (a, g) in sums.items()}


def _check(name: str, layer: Any) -> None:
    known = isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d)
    if not known or getattr(layer, "groups", 1) != 1 or getattr(layer, "padding_mode", "zeros") != "zeros":
        raise ModelError(f"{name}: the Kronecker approximation does not support {layer}")


def _gram(rows: Tensor) -> Tensor:
    return (rows.T @ rows).double()


def _channels_last(slope: Tensor, layer: Any) -> Tensor:
    """(rows, outputs), with one row for each position."""
    return slope.flatten(0, -2) if isinstance(layer, nn.Linear) else slope.movedim(1, -1).flatten(0, -2)


def _patches(x: Tensor, layer: Any) -> Tensor:
    """(rows, inputs times kernel), in the order of the weight's own dimensions."""
    if isinstance(layer, nn.Linear):
        return x.flatten(0, -2)
    sizes = [layer.kernel_size, layer.dilation, layer.padding, layer.stride]
    if isinstance(layer, nn.Conv1d):
        x = x.unsqueeze(2)
        sizes = [(first, *rest) for first, rest in zip((1, 1, 0, 1), sizes, strict=True)]
    patches = F.unfold(x, *sizes)
    return patches.movedim(1, -1).flatten(0, 1)
