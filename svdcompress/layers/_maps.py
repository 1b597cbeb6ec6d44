"""The linear maps of the layers as data: how to apply one to any input and weight, and its two gradients.

A map is None for a matrix product by a weight (out, in), `TRANSPOSED` for one by a weight (in, out), else a `Convolution`.
Both maps of a draw (mean and variance) and their gradients go through here, whatever the layer and the precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from svdcompress.layers._in_parts import in_parts


class Convolution(NamedTuple):
    """The arguments of torch.convolution after the bias, in its order; one number for each spatial dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


class Transposed:
    """A matrix product by a weight whose rows are inputs."""


TRANSPOSED = Transposed()

Map = Convolution | Transposed | None


def apply(map: Map, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply the map to x, as torch.nn.Linear or a convolution computes it.

    x: (*, in) for a matrix product, (batch, channels, *space) for a convolution.
    """
    if map is None:
        return F.linear(x, weight, bias)
    if isinstance(map, Transposed):
        return F.linear(x, weight.t(), bias)
    if map.transposed:
        return torch.convolution(x, weight, bias, *map)
    return in_parts(partial(_convolved, map), x, weight, bias)


def _convolved(map: Convolution, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.convolution(x, weight, bias, *map)


def gradients(
    map: Map, grad: Tensor, x: Tensor, weight: Tensor, of_x: bool, of_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients with respect to x and the weight; None for one that is not asked for."""
    if not (of_x or of_weight):
        return None, None
    if map is None:
        grad_weight = grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1]) if of_weight else None
        return (grad @ weight if of_x else None), grad_weight
    if isinstance(map, Transposed):
        grad_weight = x.reshape(-1, x.shape[-1]).t() @ grad.reshape(-1, grad.shape[-1]) if of_weight else None
        return (grad @ weight.t() if of_x else None), grad_weight
    grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(grad, x, weight, None, *map, [of_x, of_weight, False])
    return grad_x if of_x else None, grad_weight if of_weight else None


def bias_gradient(map: Map, grad: Tensor) -> Tensor:
    """Gradient with respect to a bias: the sum over all dimensions but that of the output units."""
    if isinstance(map, Convolution):
        return grad.sum((0, *range(2, grad.dim())))
    return grad.reshape(-1, grad.shape[-1]).sum(0)


def outputs(map: Map, y: Tensor) -> Tensor:
    """A map's output as the rows of a matrix product: (rows, outputs)."""
    return (y.movedim(1, -1) if isinstance(map, Convolution) else y).reshape(
        -1, y.shape[1 if isinstance(map, Convolution) else -1]
    )


def windows(map: Map, x: Tensor, kernel: Sequence[int], at: Tensor) -> Tensor:
    """The inputs of some of these rows: (rows, groups, inputs per group, kernel positions), in the order of a weight's view.

    x: as for `apply`. kernel: sizes of the weight after its first two dimensions. at: indices of the rows. Transposed
    convolutions are not supported.
    """
    if not isinstance(map, Convolution):
        return x.reshape(-1, x.shape[-1])[at][:, None, :, None]
    assert not map.transposed
    x = F.pad(x, [pad for one in reversed(map.padding) for pad in (one, one)])
    steps = x.stride()[2:]
    space = [
        (length - reach * (size - 1) - 1) // stride + 1
        for length, size, stride, reach in zip(x.shape[2:], kernel, map.stride, map.dilation, strict=True)
    ]
    strides = [step * stride for step, stride in zip(steps, map.stride, strict=True)]
    inside = [step * reach for step, reach in zip(steps, map.dilation, strict=True)]
    seen = x.as_strided((*x.shape[:1], *space, x.shape[1], *kernel), (x.stride(0), *strides, x.stride(1), *inside))
    places = torch.unravel_index(at, seen.shape[: len(space) + 1])
    return seen[places].reshape(len(at), map.groups, x.shape[1] // map.groups, math.prod(kernel))


def rows(map: Map, x: Tensor, weight: Tensor) -> tuple[int, int, int]:
    """The sizes (rows, inputs, outputs) of the matrix product that the map amounts to."""
    if map is None:
        return x.numel() // max(x.shape[-1], 1), weight.shape[1], weight.shape[0]
    if isinstance(map, Transposed):
        return x.numel() // max(x.shape[-1], 1), weight.shape[0], weight.shape[1]
    positions = x.numel() // max(x.shape[1], 1)
    kernel = weight[0, 0].numel()
    if map.transposed:
        return positions, weight.shape[0] // map.groups, weight.shape[1] * kernel
    for stride in map.stride:
        positions //= stride
    return positions, weight.shape[1] * kernel, weight.shape[0] // map.groups
