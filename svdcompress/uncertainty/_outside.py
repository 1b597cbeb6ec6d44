"""Inputs from outside the training distribution, made from those inside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from svdcompress.errors import DataError
from svdcompress.sources import map_tensors, preprocess
from svdcompress.uncertainty._compare import Batches, head


def outside(test: Batches, seed: int = 0, limit: int = 2000) -> dict[str, Batches]:
    """Two sets made of the test set's first batches, up to about `limit` inputs: "shuffled", each input's own numbers in an
    order of its own, and "uniform", uniform noise over the range of each batch. For inputs in floating point; whole numbers
    (such as tokens) stay.

    A shuffled input has the same mean, variance and share of zeros as before, so only its structure gives it away.
    """

    def shuffle(tensor: Tensor, generator: torch.Generator) -> Tensor:
        flat = tensor.flatten(2) if tensor.dim() > 3 else tensor.reshape(len(tensor), 1, -1)  # all channels alike
        order = torch.rand((len(flat), 1, flat.shape[2]), generator=generator).argsort(2).to(tensor.device)
        return flat.gather(2, order.expand_as(flat)).view_as(tensor)

    def uniform(tensor: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.rand(tensor.shape, generator=generator).to(tensor)
        return tensor.min() + (tensor.max() - tensor.min()) * noise

    some = head(test, limit)
    return {"shuffled": _changed(some, shuffle, seed), "uniform": _changed(some, uniform, seed)}


def images_like(images: Batches, preprocessing: Mapping[str, Any], limit: int = 2000) -> Batches:
    """Images (B, C, H, W) of another data set as a run's inputs, up to about `limit` of them: resized, made grey (by the luma
    of ITU-R BT.601) or colour, and prepared by the run's transforms: CIFAR for a net of digits.

    preprocessing: of the run, as in `Data.preprocessing`; its `input_shape` says what the images have to become.
    Raises DataError where the run or the other data have no images.
    """
    shape = preprocessing.get("input_shape") or ()
    if len(shape) != 3:
        raise DataError(f"the run's inputs are no images (their shape is {tuple(shape) or 'unknown'}): nothing to compare with")

    def change(tensor: Tensor, generator: torch.Generator) -> Tensor:
        if tensor.dim() != 4 or tensor.shape[1] not in (1, 3):
            raise DataError(f"inputs of the shape {tuple(tensor.shape[1:])} are no images, which the run takes")
        if tensor.shape[1] == 3 and shape[0] == 1:
            tensor = (tensor * tensor.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(1, keepdim=True)
        tensor = tensor.expand(-1, shape[0], -1, -1)
        return preprocess(F.interpolate(tensor, list(shape[1:]), mode="bilinear", antialias=True), preprocessing)

    return _changed(head(images, limit), change, 0)


def _changed(test: Batches, change: Any, seed: int) -> Batches:
    def batches() -> Iterable[tuple[Any, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        for inputs, targets in test():
            yield map_tensors(inputs, lambda t: change(t, generator) if t.is_floating_point() and t.dim() > 1 else t), targets

    return batches
