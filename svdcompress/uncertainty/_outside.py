"""Inputs from outside the training distribution, made from those inside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from svdcompress.batch import map_tensors
from svdcompress.errors import DataError
from svdcompress.sources import preprocess
from svdcompress.uncertainty._gather import Batches, head


def outside(test: Batches, seed: int = 0, limit: int = 2000) -> dict[str, Batches]:
    """Two sets made from the test set's first batches, up to about `limit` inputs: "shuffled", with each input's own numbers
    in random order, and "uniform", with uniform noise over the range of each batch. A set that is the same as the test data
    (an input of a single number has no order) is left out.

    A shuffled input has the same mean, variance and share of zeros as before, so only its structure gives it away. Token ids (a
    (B, L) tensor of whole numbers, alone or as `input_ids`) change only where `attention_mask` has a token, and a first or
    last token that all inputs of a batch have in common, such as [CLS], stays; so do masks and other whole numbers.
    """

    def shuffle(tensor: Tensor, generator: torch.Generator) -> Tensor:
        flat = tensor.flatten(2) if tensor.dim() > 3 else tensor.reshape(len(tensor), 1, -1)  # all channels alike
        order = torch.rand((len(flat), 1, flat.shape[2]), generator=generator).argsort(2).to(tensor.device)
        return flat.gather(2, order.expand_as(flat)).view_as(tensor)

    def uniform(tensor: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.rand(tensor.shape, generator=generator).to(tensor)
        return tensor.min() + (tensor.max() - tensor.min()) * noise

    some = head(test, limit)
    sets = {"shuffled": (shuffle, _shuffled_ids), "uniform": (uniform, _uniform_ids)}
    changed = {name: _changed(some, change, seed, ids) for name, (change, ids) in sets.items()}
    return {name: batches for name, batches in changed.items() if differ(some, batches)}


def images_like(images: Batches, preprocessing: Mapping[str, Any], limit: int = 2000, *, trust_code: bool = False) -> Batches:
    """Images (B, C, H, W) of another data set as a run's inputs, up to about `limit` of them: resized, converted to gray (by
    the luma of ITU-R BT.601) or color, and prepared by the run's transforms; for example CIFAR for a network of digits.

    preprocessing: that of the run, as in `Data.preprocessing`; its `input_shape` is the shape that the images get.
    trust_code: whether its transforms may be Python functions, see `svdcompress.sources.preprocess`.
    Raises DataError if the run or the other data have no images.
    """
    shape = preprocessing.get("input_shape") or ()
    if len(shape) != 3:
        raise DataError(
            f"the run's inputs are not images (their shape is {tuple(shape) or 'unknown'}): nothing to compare with"
        )

    def change(tensor: Tensor, generator: torch.Generator) -> Tensor:
        if tensor.dim() != 4 or tensor.shape[1] not in (1, 3):
            raise DataError(f"inputs of the shape {tuple(tensor.shape[1:])} are not images, which the run needs")
        if tensor.shape[1] == 3 and shape[0] == 1:
            tensor = (tensor * tensor.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(1, keepdim=True)
        tensor = tensor.expand(-1, shape[0], -1, -1)
        resized = F.interpolate(tensor, list(shape[1:]), mode="bilinear", antialias=True)
        return preprocess(resized, preprocessing, trust_code=trust_code)

    return _changed(head(images, limit), change, 0)


def _changed(test: Batches, change: Any, seed: int, change_ids: Any = None) -> Batches:
    """Batches with floating-point tensors changed by `change`, and token ids by `change_ids`."""

    def batches() -> Iterable[tuple[Any, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        for inputs, targets in test():
            changed: Any = map_tensors(inputs, lambda t: change(t, generator) if t.is_floating_point() and t.dim() > 1 else t)
            if change_ids is not None and isinstance(changed, dict) and are_ids(changed.get("input_ids")):
                ids = changed["input_ids"]
                changed["input_ids"] = change_ids(ids, free_tokens(ids, changed.get("attention_mask")), generator)
            elif change_ids is not None and isinstance(changed, Tensor) and are_ids(changed):
                changed = change_ids(changed, free_tokens(changed, None), generator)
            yield changed, targets

    return batches


def are_ids(value: Any) -> bool:
    """Whether these are token ids: a (B, L) tensor of whole numbers."""
    whole = isinstance(value, Tensor) and value.dtype in (torch.uint8, torch.int16, torch.int32, torch.int64)
    return whole and value.dim() == 2


def free_tokens(ids: Tensor, mask: Any) -> Tensor:
    """Which tokens (B, L) may change: not padding, nor a first or last token that all inputs have in common."""
    free = mask.to(ids.device) > 0 if isinstance(mask, Tensor) and mask.shape == ids.shape else torch.ones_like(ids).bool()
    first = free.int().argmax(1, keepdim=True)
    last = ids.shape[1] - 1 - free.int().flip(1).argmax(1, keepdim=True)
    for edge in (first, last):
        values = ids.gather(1, edge)
        if len(ids) > 1 and bool((values == values[0]).all()):
            free = free.scatter(1, edge, False)
    return free


def _shuffled_ids(ids: Tensor, free: Tensor, generator: torch.Generator) -> Tensor:
    keys = torch.rand(ids.shape, generator=generator).to(ids.device)
    places = (~free).int().argsort(dim=1, stable=True)  # positions of the tokens that move, then of the others
    order = keys.masked_fill(~free, 2.0).argsort(dim=1, stable=True)  # the same, with those that move in random order
    return ids.scatter(1, places, ids.gather(1, order))


def _uniform_ids(ids: Tensor, free: Tensor, generator: torch.Generator) -> Tensor:
    if not bool(free.any()):
        return ids
    low, high = int(ids[free].min()), int(ids[free].max())
    return torch.where(free, torch.randint(low, high + 1, ids.shape, generator=generator).to(ids), ids)


def differ(test: Batches, others: Batches) -> bool:
    """Whether the first batches of two sets differ in their inputs."""
    before, after = [], []
    for inputs, kept in ((next(iter(test()), None), before), (next(iter(others()), None), after)):
        map_tensors(inputs[0] if inputs else (), kept.append)
    return any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
