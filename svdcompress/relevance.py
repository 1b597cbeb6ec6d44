"""Masks from log alpha: which weights are relevant, and the counts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from svdcompress.batch import unwrapped
from svdcompress.errors import CheckpointError, PruneError, UsageError
from svdcompress.files import write_atomically
from svdcompress.layers import REDUCED, Threshold, VariationalLayer, check_whole, variational_layers


@dataclass(frozen=True)
class LayerRelevance:
    """Counts of one layer: weights kept and in total, inputs and outputs with at least one weight kept."""

    name: str
    kept: int
    total: int
    inputs: int
    outputs: int

    @property
    def sparsity(self) -> float:
        """Fraction of the weights outside the mask, in [0, 1]."""
        return 1 - self.kept / self.total


class Masks(Mapping[str, Tensor]):
    """Masks by layer name: bool tensors of the weights' shapes, True for weights to keep; and their counts."""

    def __init__(self, masks: Mapping[str, Tensor], layers: list[LayerRelevance]) -> None:
        self._masks = dict(masks)
        self.layers = layers

    def __getitem__(self, name: str) -> Tensor:
        return self._masks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._masks)

    def __len__(self) -> int:
        return len(self._masks)

    @property
    def kept(self) -> int:
        """Number of weights kept, over all layers. `prune` also removes those whose unit is read by nothing that is kept, or
        reads nothing: `svdcompress.selection.count_nonzero` counts what it leaves."""
        return sum(int(mask.sum()) for mask in self.values())

    @property
    def total(self) -> int:
        """Number of weights in all layers."""
        return sum(mask.numel() for mask in self.values())

    @property
    def sparsity(self) -> float:
        """Fraction of all weights outside the masks, in [0, 1]."""
        return 1 - self.kept / self.total

    def __repr__(self) -> str:
        return f"Masks({len(self)} layers, {self.kept:,} of {self.total:,} weights kept)"

    def save(self, path: str | Path) -> None:
        """Write the masks as safetensors. Raises OutputError if that fails."""
        masks = {name: mask.contiguous().cpu() for name, mask in self.items()}
        write_atomically(Path(path), lambda temporary: save_file(masks, str(temporary), {"format": "svdcompress-masks"}))

    @staticmethod
    def load(path: str | Path, model: nn.Module) -> Masks:
        """Read masks that `save` wrote, for a model with the same layers. Raises CheckpointError for any other file."""
        try:
            stored = load_file(str(path))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: not readable as saved masks ({error})") from error
        return as_masks(model, stored)


def relevance(model: nn.Module, threshold: Threshold | None = None) -> Masks:
    """The masks of relevant weights: those whose log alpha is below the threshold in all prior groups that they belong to.

    threshold: one limit for all shares, or {"weight": 3, "input": 4}, with a layer's own limits for the shares that are not
        named; None: each layer's own limits (3 unless set otherwise), or its frozen mask. Warns of a share that no layer has.
    If the model is wrapped by torch.compile, for data-parallel training or for weight averaging, the masks are those of the
    model inside the wrapper, by its own layer names.
    Raises UsageError if the model has no variational layer, or if weights are divided among processes (FSDP).

    Example:
        >>> masks = svdc.relevance(svdc.convert(model), threshold=3.0)
        >>> [(layer.name, layer.sparsity) for layer in masks.layers]
    """
    model = unwrapped(model)
    check_whole(model)
    masks = {name: layer.relevant(threshold).clone() for name, layer in variational_layers(model)}
    if not masks:
        raise UsageError("the model has no variational layer; call svdcompress.convert(model) first")
    if isinstance(threshold, Mapping) and len(threshold) < len(REDUCED):  # a full one is how a layer stores its own threshold
        had = {name for _, layer in variational_layers(model) for name in layer.share}
        if idle := [name for name in threshold if name not in had]:
            warnings.warn(
                f"threshold: no layer has the share {idle[0]!r}, so this limit has no effect: the layers have "
                f"{', '.join(sorted(had))}",
                stacklevel=2,
            )
    if variances_never_moved(model):
        warnings.warn(
            "log_sigma2 has gradients but was never updated: was the optimizer made before svdcompress.convert(model) or "
            "svdcompress.load? Make it after, so that it has the new parameters; until then log alpha says nothing about "
            "what the data supports",
            stacklevel=2,
        )
    return as_masks(model, masks)


@torch.no_grad()
def information(layer: VariationalLayer) -> Tensor:
    """What each weight of a layer tells about the data, in nats: `0.5 log(1 + mu^2 / sigma^2)`; the weight's shape.

    It is the KL from the posterior to the best ARD prior of each weight by itself (Kharitonov et al. 2018, arXiv 1811.00596,
    eq. 9): 0 for noise, large for a weight known precisely relative to its size. It adds up over the weights of any layers.
    """
    return 0.5 * nn.functional.softplus(-layer.log_alpha())


def variances_never_moved(model: nn.Module) -> bool:
    """Whether trainable log variances have received gradients, yet none of them has changed since conversion or loading.

    This happens with an optimizer that was made before `convert`: it steps the means, but does not know `log_sigma2`.
    """
    trained: dict[Any, list[VariationalLayer]] = {}
    for _, layer in variational_layers(model):
        own = layer.variance_parameters().values()
        if any(parameter.requires_grad for parameter in own):
            trained.setdefault(tuple(map(id, own)), []).append(layer)
    heard = any(layer.variance_heard for tied in trained.values() for layer in tied)
    # Among tied layers, only the first one notices that nothing but a cast has changed them.
    return heard and not any(all(layer.variance_stepped for layer in tied) for tied in trained.values())


def as_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> Masks:
    """Check masks against a model's variational layers and count them.

    Raises PruneError if they belong to another model (names or shapes differ) or are not boolean.
    """
    layers = dict(variational_layers(unwrapped(model)))
    missing, unknown = sorted(set(layers) - set(masks)), sorted(set(masks) - set(layers))
    if missing or unknown:
        raise PruneError(f"masks of another model: no mask for {missing[:4]}, no layer for {unknown[:4]}")
    counts = []
    for name, layer in layers.items():
        mask = masks[name]
        if mask.shape != layer.weight.shape:
            raise PruneError(f"masks[{name!r}]: shape {tuple(mask.shape)}, but the weight has {tuple(layer.weight.shape)}")
        if mask.dtype != torch.bool:
            raise PruneError(f"masks[{name!r}]: dtype {mask.dtype}, but a mask is bool")
        view = layer.canonical(mask)
        counts.append(
            LayerRelevance(
                name=name,
                kept=int(mask.sum()),
                total=mask.numel(),
                inputs=int(view.any(3).any(1).sum()),
                outputs=int(view.any(3).any(2).sum()),
            )
        )
    return Masks({name: masks[name] for name in layers}, counts)


def hold(model: nn.Module, masks: Mapping[str, Tensor] | None) -> nn.Module:
    """Freeze the masks of a model in every mode, whatever log alpha becomes (None lets log alpha decide again); in place. The
    model holds copies, so that writing to the masks of one model does not change those of another.

    Example:
        >>> svdc.hold(model, svdc.relevance(svdc.convert(model)))
    """
    checked = None if masks is None else as_masks(model, masks)
    for name, layer in variational_layers(unwrapped(model)):
        layer.mask = None if checked is None else checked[name].to(layer.weight.device, copy=True)
    return model
