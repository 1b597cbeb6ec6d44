"""Mean and variance of a layer's output, computed here for all callers.

The training draw, `sampling`, rows, the Monte-Carlo graph and moment propagation all call it, each with its own way to apply
the layer's linear map. For independent weights and an input x of mean m and variance v (0 unless given), `E = f(m, mu) + b`
and `Var = f(m^2 + v, sigma2) + f(v, mu^2)`, plus the variance of the bias.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A layer's linear map as a function of an input, a weight (with any number of outputs per group) and a bias."""


class Spread(Protocol):
    """Variances of a layer's weights in a form from which those of its outputs are cheaper to compute than from a tensor of
    the weight's shape: a tuple of tensors (a NamedTuple) with this property and method."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the variance path is computed."""
        ...

    def through(self, linear: Linear, square: Tensor, bias_sigma2: Tensor | None) -> Tensor:
        """Variance of the outputs. square: squared inputs (plus their variance, if any), in `dtype`. bias_sigma2: variance
        of the bias, (outputs)."""
        ...


class Weights(NamedTuple):
    """A layer's parameters as they count in a mode: outside the mask, mean and variance are 0."""

    mean: Tensor
    sigma2: Any  # a tensor of the weight's shape, or a Spread
    bias: Tensor | None = None
    bias_sigma2: Tensor | None = None


class Moments(NamedTuple):
    """Mean and variance of each element of an activation, of one shape."""

    mean: Tensor
    variance: Tensor


def moments(linear: Linear, x: Tensor, weights: Weights, variance: Tensor | None = None) -> Moments:
    """Mean and variance of a layer's output, as new tensors: the mean in the dtype of x, the variance in that of sigma2.

    x: the input. variance: variances of its elements, which are independent; None: x is exact.
    """
    sigma2 = weights.sigma2
    squares = square(x, sigma2.dtype)
    if variance is not None:
        squares = squares + variance
    if isinstance(sigma2, Tensor):
        spread = linear(squares, sigma2, weights.bias_sigma2)
    else:
        spread = sigma2.through(linear, squares, weights.bias_sigma2)
    del squares  # as large as x; the mean is computed next
    if variance is not None:
        spread = spread + linear(variance, weights.mean.square(), None)
    return Moments(linear(x, weights.mean, weights.bias), spread)


# Called in forward and again in backward: keeping the result would double the memory kept for a layer's input. It takes one
# pass over the input, where each of the step's products takes one for each output.
def square(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x * x in a dtype, as a new tensor."""
    return x * x if x.dtype == dtype else x.to(dtype).square_()
