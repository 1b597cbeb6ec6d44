"""Weights that are drawn whole, once for each Monte-Carlo sample: the mean and standard deviation of each relevant number.

Where a weight is used at several positions (convolutions, tokens, a layer called twice, tied layers), only a draw of the
weight itself is a draw from the posterior: separate noise for each activation would average out over the positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.export._inputs import Signature
from svdcompress.export._outputs import running
from svdcompress.layers import StochasticLayer, VariationalLayer, shared_over_positions, weight_of

SPARSE = 0.4
"""Share of relevant numbers up to which only these are drawn and put in their places: measured to be as fast as drawing all
of them, and smaller (each relevant number needs its place in the file)."""


@dataclass(frozen=True, eq=False)
class Posterior:
    """A tensor of independent normal numbers.

    layer, of ("weight", "bias"): the parameter that it describes. mean, std: of the same shape. mask: bool, which numbers
    have noise of their own (mean and std of the others are 0); None: all of them. noise_shape: shape of the noise that a
    draw takes.
    """

    layer: str
    of: str
    mean: Tensor
    std: Tensor
    mask: Tensor | None
    noise_shape: tuple[int, ...] = field(init=False)  # kept, as the mask cannot be counted while a model is traced

    def __post_init__(self) -> None:
        shape = self.mean.shape if self.mask is None else (int(self.mask.sum()),)
        object.__setattr__(self, "noise_shape", tuple(shape))

    @property
    def count(self) -> int:
        """How many numbers of noise a draw takes."""
        return math.prod(self.noise_shape)

    def at(self, noise: Tensor) -> Tensor:
        """The draw for `count` standard normal numbers."""
        if self.mask is None:
            return self.mean + self.std * noise.reshape(self.mean.shape)
        return self.mean + self.std * torch.zeros_like(self.mean).masked_scatter(self.mask, noise)


@dataclass(frozen=True)
class DrawnWhole:
    """What a layer draws whole.

    part: 1 where it keeps a weight that it shares with another layer, else 0 (None: it keeps all of them). bias: None if it
    has no variance.
    """

    weight: Posterior
    part: Tensor | None
    bias: Posterior | None


def drawn_whole(model: nn.Module, signature: Signature, batches: Sequence[int]) -> list[str]:
    """Names of the variational layers whose weights have to be drawn; model: in `eval()`, and without noise."""

    def among(tensors: Sequence[Tensor]) -> set[StochasticLayer]:
        def run(batch: int, backwards: bool) -> Any:
            rows = [tensor[:batch].flip(0) if backwards else tensor[:batch] for tensor in tensors]
            with running(model, signature.names, rows):
                return signature.call(model, rows)

        return shared_over_positions(model, run, batches)

    shared = among(signature.resized(max(batches)))
    with suppress(Exception):  # the model may refuse such values
        shared |= among(signature.moved(max(batches)))  # whether rows meet does not show in rows that are alike
    return [name for name, module in model.named_modules() if module in shared]


@torch.no_grad()
def posteriors(layers: Sequence[tuple[str, VariationalLayer]]) -> dict[str, DrawnWhole]:
    """What each layer draws, by name; tied layers share one posterior of their weight, of all that any of them keeps."""
    masks = {name: layer.relevant() for name, layer in layers}
    union: dict[Any, Tensor] = {}
    for name, layer in layers:
        key = weight_of(layer)
        union[key] = union[key] | masks[name] if key in union else masks[name]
    weights: dict[Any, Posterior] = {}
    found = {}
    for name, layer in layers:
        key, bias = weight_of(layer), None
        if key not in weights:
            mask = union[key]
            std = (layer.log_sigma2 / 2).exp() * mask
            sparse = int(mask.sum()) <= SPARSE * mask.numel()
            weights[key] = Posterior(name, "weight", layer.weight * mask, std, mask if sparse else None)
        if layer.bias is not None and layer.bias_sigma2 is not None and bool(layer.bias_sigma2.any()):
            bias = Posterior(name, "bias", layer.bias.clone(), layer.bias_sigma2.sqrt(), None)
        part = None if torch.equal(masks[name], union[key]) else masks[name].to(layer.weight.dtype)
        found[name] = DrawnWhole(weights[key], part, bias)
    return found
