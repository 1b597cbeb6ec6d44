"""Integer attributes that a module's code computes with: finds those that are lengths changed by pruning."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from svdcompress.prune._choice import Analysis, Choice
from svdcompress.prune._units import Parameter

NO_LENGTH = frozenset(
    (
        *("classes", "labels", "vocab", "idx", "index", "id", "step", "steps", "epoch", "seed", "layer", "layers", "depth"),
        *("stride", "kernel", "padding", "dilation", "groups", "position", "positions", "length", "len", "max", "min"),
        *("version", "patch", "window", "image", "rank", "resolution"),
    )
)
"""Parts of attribute names that mark an integer as no length, even if it happens to equal a number of units."""


def own_sizes(module: nn.Module, key: str, parameter: Parameter, keep: list[np.ndarray]) -> dict[str, int]:
    """New values of the integer attributes that give the sizes of a module's tensor `key`, which has already been cut.

    torch's layers are known; for others, these are the attributes that equal a changed length and are not named as something
    else (`NO_LENGTH`).
    """
    own: Any = module
    shape = tuple(getattr(module, key).shape)
    if isinstance(module, nn.Linear) and key == "weight":
        return {"out_features": shape[0], "in_features": shape[1]}
    if isinstance(module, nn.modules.conv._ConvNd) and key == "weight":
        groups = own.groups
        if parameter.grouped:
            left = keep[0].reshape(parameter.groups, -1).any(1) & keep[1].reshape(parameter.groups, -1).any(1)
            groups = int(left.sum())
        first, second = shape[0], shape[1] * groups
        outs, ins = (second, first) if own.transposed else (first, second)
        return {"groups": groups, "out_channels": outs, "in_channels": ins}
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return {"num_features": shape[0]}
    if _is_conv1d(module):
        return {"nx": shape[0], "nf": shape[1]} if key == "weight" else {"nf": shape[0]} if key == "bias" else {}
    if isinstance(module, nn.Embedding):
        return {"num_embeddings": shape[0], "embedding_dim": shape[1]}
    if isinstance(module, nn.PReLU):
        return {"num_parameters": shape[0]}
    found: dict[str, int] = {}
    if not isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
        numbers = {name: value for name, value in vars(module).items() if type(value) is int}
        for size, part in zip(parameter.sizes, keep, strict=True):
            named = [k for k, value in {**numbers, **found}.items() if value == size and NO_LENGTH.isdisjoint(k.split("_"))]
            heads = [attribute for attribute in named if _counts_heads(attribute)]
            for attribute in (heads or named) if not part.all() else ():
                found[attribute] = int(part.sum())
    return found


def adapted(model: nn.Module, analysis: Analysis, choice: Choice, adapt: str) -> list[tuple[str, str, Any]]:
    """(module, attribute, value) for integers, tuples and lists of lengths that get shorter in a module's views and splits."""
    changes: dict[tuple[str, str], Any] = {}
    if adapt == "none":
        return []
    for view in analysis.trace.views:
        removed = choice.removed[view.labels.numpy()]
        if not removed.any() or view.module is None:
            continue
        module = model.get_submodule(view.module)
        known = isinstance(module, nn.Linear | nn.Embedding | nn.modules.conv._ConvNd | nn.modules.batchnorm._NormBase)
        known = known or _is_conv1d(module)
        if known and (module._parameters.get("weight") is not None or any(True for _ in module.buffers())):
            continue  # `own_sizes` reads theirs from the shapes of their tensors
        lengths, totals = _lengths(removed, view.sizes, analysis.root[view.labels.numpy()])
        heads = {value for attribute, value in vars(module).items() if type(value) is int and _counts_heads(attribute)}
        plain = {before: after for before, after in lengths.items() if before not in heads}
        for attribute, value in vars(module).items():
            parts = set(attribute.split("_"))
            if adapt != "every" and not parts.isdisjoint(NO_LENGTH):
                continue
            own = lengths if adapt == "every" or _counts_heads(attribute) else {} if _sizes_head(attribute) else plain
            whole = isinstance(value, tuple | list) and tuple(value) == view.sizes
            shorter = _resized(value, removed) if whole else _shorter(value, {**totals, **own})
            if shorter != value and (adapt != "heads" or _counts_heads(attribute)):
                changes[view.module, attribute] = shorter
    for pieces in analysis.trace.pieces:
        parts = np.split(~choice.removed[pieces.labels.numpy()], np.cumsum(pieces.lengths)[:-1])
        old = getattr(model.get_submodule(pieces.module), pieces.attribute)
        changes[pieces.module, pieces.attribute] = type(old)(int(part.sum()) for part in parts)
    return [(name, attribute, value) for (name, attribute), value in changes.items()]


def _is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D (GPT-2), with or without variances."""
    return any(kind.__name__ == "Conv1D" for kind in type(module).__mro__) and hasattr(module, "nx") and hasattr(module, "nf")


def _sizes_head(attribute: str) -> bool:
    """Whether an attribute is named as the size of one head."""
    parts = set(attribute.split("_"))
    return "head" in parts and not parts.isdisjoint(("dim", "size")) and "all" not in parts


def _counts_heads(attribute: str) -> bool:
    """Whether an attribute is named as a number of heads; other attributes of the same value are lengths of something else."""
    return "head" in attribute and not _sizes_head(attribute)


def _shorter(value: Any, lengths: dict[int, int]) -> Any:
    """An integer, or a tuple or list of them, with the lengths that changed replaced."""
    if type(value) is int:
        return lengths.get(value, value)
    if isinstance(value, tuple | list) and value and all(type(part) is int for part in value):
        parts = [lengths.get(part, part) for part in value]
        return type(value)(parts) if type(value) in (list, tuple, torch.Size) else value
    return value


def _resized(value: Any, removed: np.ndarray) -> Any:
    """A tuple or list that is a view's shape, without the removed indices: lengths are matched by position, not by value."""
    if type(value) not in (tuple, list, torch.Size):
        return value
    axes = range(removed.ndim)
    gone = [int(removed.all(axis=tuple(i for i in axes if i != d)).sum()) if removed.shape[d] > 1 else 0 for d in axes]
    return type(value)(length - less for length, less in zip(value, gone, strict=True))


def _lengths(removed: np.ndarray, sizes: tuple[int, ...], roots: np.ndarray) -> tuple[dict[int, int], dict[int, int]]:
    """{length before: after} of the dimensions that lose whole indices, and the same of their product.

    Both are empty if units repeat along such a dimension: heads laid out together with the batch for a matrix product make a
    length that is not the number of heads.
    """
    changed, before, after = {}, 1, 1
    for d in range(removed.ndim):
        left = removed.shape[d] - int(removed.all(axis=tuple(i for i in range(removed.ndim) if i != d)).sum())
        if left != removed.shape[d] and removed.shape[d] == sizes[d]:
            lines = np.moveaxis(roots, d, 0).reshape(removed.shape[d], -1)
            if len(np.unique(lines, axis=0)) < len(lines) and bool((lines[0] == lines[len(lines) // 2]).all()):
                return {}, {}
            changed[sizes[d]] = left
        if removed.shape[d] > 1:
            before, after = before * removed.shape[d], after * left
    several = sum(size > 1 for size in removed.shape) > 1
    return changed, {before: after} if after != before and several else {}
