"""Mean and variance of a layer's output: the one place where they are computed, whoever asks.

The training draw, `sampling`, rows, the Monte-Carlo graph and moment propagation all come here, each with its own way to apply
the layer's linear map. For independent weights and an input x of mean m and variance v (0 unless told),
`E = f(m, mu) + b` and `Var = f(m^2 + v, sigma2) + f(v, mu^2)`, and the bias's own variance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A layer's linear map of an input, a weight (of any number of outputs per group) and a bias."""


class Spread(Protocol):
    """Variances of a layer's weights in a form with which those of its outputs cost less than with a tensor of the weight's
    shape: a tuple of tensors (a NamedTuple) with these two methods."""

    @property
    def dtype(self) -> torch.dtype:
        """In which the variance path is computed."""
        ...

    def through(self, linear: Linear, square: Tensor, bias_sigma2: Tensor | None) -> Tensor:
        """Variance of the outputs. square: of the inputs, in `dtype`. bias_sigma2: variance of the bias, (outputs)."""
        ...


class Weights(NamedTuple):
    """What counts of a layer's parameters in a mode: what does not stay is 0 in mean and variance."""

    mean: Tensor
    sigma2: Any  # a tensor of the weight's shape, or a Spread
    bias: Tensor | None = None
    bias_sigma2: Tensor | None = None


class Moments(NamedTuple):
    """Mean and variance of each number of an activation, one shape."""

    mean: Tensor
    variance: Tensor


def moments(linear: Linear, x: Tensor, weights: Weights, variance: Tensor | None = None) -> Moments:
    """Mean and variance of a layer's output, tensors of their own: the mean in the dtype of x, the variance in that of sigma2.

    x: its input. variance: of the input's numbers, independent; None: x is certain.
    """
    sigma2 = weights.sigma2
    squares = square(x, sigma2.dtype)
    if variance is not None:
        squares = squares + variance
    if isinstance(sigma2, Tensor):
        spread = linear(squares, sigma2, weights.bias_sigma2)
    else:
        spread = sigma2.through(linear, squares, weights.bias_sigma2)
    del squares  # as large as x, and the mean is yet to come
    if variance is not None:
        spread = spread + linear(variance, weights.mean.square(), None)
    return Moments(linear(x, weights.mean, weights.bias), spread)


# Called in forward and again in backward: keeping it would double what is kept of a layer's input, and it is one pass over
# that, where each of the step's products is one for each output.
def square(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x * x in a dtype, a tensor of its own."""
    return x * x if x.dtype == dtype else x.to(dtype).square_()
