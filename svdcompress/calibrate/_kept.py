"""The kept weights of a sparse network as one vector, and the network as a function of that vector."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from svdcompress.batch import call, in_eval
from svdcompress.errors import ModelError
from svdcompress.layers import drawing, stochastic_layers, variational_layers, weight_of
from svdcompress.likelihoods import Likelihood
from svdcompress.relevance import hold, relevance


@dataclass(frozen=True)
class Kept:
    """Where the kept weights of a model are, and where each of them is in a vector.

    names: of the layers, of which tied ones appear once. places: for each layer, the flat positions of its kept weights;
    slices: where these are in the vector.
    """

    names: tuple[str, ...]
    places: tuple[Tensor, ...]
    slices: tuple[slice, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return self.slices[-1].stop if self.slices else 0

    def gather(self, tensors: dict[str, Tensor]) -> Tensor:
        """Vectors (..., K) from tensors by layer, (..., *weight's shape)."""
        parts = []
        for name, place, shape in zip(self.names, self.places, self.shapes, strict=True):
            tensor = tensors[name]
            parts.append(tensor.flatten(tensor.dim() - len(shape))[..., place.to(tensor.device)])
        return torch.cat(parts, -1)

    def scatter(self, vectors: Tensor, fill: float = 0.0) -> dict[str, Tensor]:
        """Tensors by layer, (..., *weight's shape), from vectors (..., K); `fill` where no weight is kept."""
        found = {}
        for name, place, part, shape in zip(self.names, self.places, self.slices, self.shapes, strict=True):
            flat = vectors.new_full((*vectors.shape[:-1], torch.Size(shape).numel()), fill)
            found[name] = flat.index_copy(-1, place.to(flat.device), vectors[..., part]).unflatten(-1, shape)
        return found


def kept_of(model: nn.Module) -> Kept:
    """The kept weights of a model's variational layers: those in its masks, which `held` freezes.

    Raises ModelError if there are none.
    """
    names, places, slices, shapes, start = [], [], [], [], 0
    seen = set()
    for name, layer in variational_layers(model):
        if weight_of(layer) in seen:
            continue
        seen.add(weight_of(layer))
        place = layer.relevant().flatten().nonzero().squeeze(1).cpu()
        names.append(name)
        places.append(place)
        slices.append(slice(start, start + len(place)))
        shapes.append(tuple(layer.weight.shape))
        start += len(place)
    if not start:
        raise ModelError("no weight is left whose uncertainty could be estimated")
    return Kept(tuple(names), tuple(places), tuple(slices), tuple(shapes))


@contextmanager
def held(model: nn.Module) -> Iterator[nn.Module]:
    """The model in `eval()` with its masks frozen while the body runs, so that other variances and weights have the same
    zeros."""
    before = {name: layer.mask for name, layer in variational_layers(model)}
    hold(model, relevance(model))
    try:
        with in_eval(model):
            yield model
    finally:
        for name, layer in variational_layers(model):
            layer.mask = before[name]


class AsFunction:
    """A model's heads as a function of the kept weights, for torch.func: without noise, everything else as it is."""

    def __init__(self, model: nn.Module, kept: Kept, likelihood: Likelihood) -> None:
        self.model, self.kept, self.likelihood = model, kept, likelihood
        self.layers = stochastic_layers(model)
        self.own = {name: layer.weight.detach() for name, layer in variational_layers(model) if name in set(kept.names)}
        self.vector = kept.gather(self.own)

    def __call__(self, vector: Tensor, inputs: Any) -> Any:
        """Heads (B, ...) with the weights of a vector (K,) in place of the kept ones."""
        weights = self.kept.scatter(vector)
        with drawing(self.layers, None):
            parameters = {f"{name}.weight".lstrip("."): weights[name] for name in self.kept.names}
            output = functional_call(_Called(self.model), {f"model.{name}": w for name, w in parameters.items()}, (inputs,))
        return self.likelihood.heads(output)


class _Called(nn.Module):
    """A module that calls a model on a batch of any form."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Any) -> Any:
        return call(self.model, inputs)
