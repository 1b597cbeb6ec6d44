"""The local reparameterization: mean and variance of a pre-activation, and a draw from it.

Kingma, Salimans & Welling 2015 (arXiv 1506.02557), eq. 6: for independent Gaussian weights, `y = m + sqrt(v) * eps` with
`m = f(x, mu) + b`, `v = f(x * x, sigma2)` for any linear map f (matrix product or convolution).

`LocalReparameterization` is this as one autograd function. In addition to what the mean path needs (x and the parameters),
its backward needs only `eps / (2 sqrt(v))`: one number for each output. exp(log_sigma2) is computed again, so that nothing
of the weight's size is kept, and only the requested gradients are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from svdcompress.layers import _maps
from svdcompress.layers._maps import Map
from svdcompress.layers._moments import Moments, Weights, moments, square
from svdcompress.layers._once import once_differentiable
from svdcompress.layers.posteriors import TINY

Noise = Callable[[Tensor], Tensor]
"""A source of standard normal noise of a tensor's shape, dtype and device."""


def normal_like(tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Standard normal noise of a tensor's shape, dtype, device and order in memory."""
    kind: Any = {"dtype": tensor.dtype, "device": tensor.device}
    if generator is not None:  # not passed as None: compiled for any batch size, torch.randn takes no generator at all
        kind["generator"] = generator
    return as_stored(tensor, lambda shape: torch.randn(shape, **kind))


def as_stored(tensor: Tensor, make: Callable[[Sequence[int]], Tensor], ahead: int = 0) -> Tensor:
    """A new tensor of the given one's shape, its dimensions in the same order in memory, from a contiguous `make(shape)`.

    ahead: number of further dimensions that the new tensor has in front.

    torch fills non-contiguous tensors with noise several times slower, and convolutions return channels-last ones.
    """
    if torch.compiler.is_compiling() or tensor.is_contiguous():
        return make(tensor.shape)
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    made = make([tensor.shape[dim] for dim in order])
    return made.permute([*range(ahead), *(ahead + order.index(dim) for dim in range(tensor.dim()))])


def draw(moments: Moments, noise: Tensor) -> Tensor:
    """`mean + sqrt(variance) * noise`, all of one shape; not in place, so that vmap can batch it and autograd follow it."""
    return torch.addcmul(moments.mean, deviation(moments), noise)


def deviation(moments: Moments) -> Tensor:
    """The standard deviation of an output, in the dtype of its mean."""
    return moments.variance.clamp_min(TINY).sqrt().to(moments.mean.dtype)


def without_autocast(device_type: str) -> AbstractContextManager:
    """Disables autocast: draws cast explicitly, and autocast might cast variances to float16, whose range is too small."""
    return torch.autocast(device_type, enabled=False) if _autocast_on(device_type) else nullcontext()


def autocast(x: Tensor) -> Tensor:
    """x as torch's autocast would pass it to a matrix product: cast if autocast is on, except for float64."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if _autocast_on(device) and x.dtype != torch.float64 else x


def _autocast_on(device_type: str) -> bool:
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def _half_noise(like: Tensor) -> Tensor:
    """Noise of standard deviation 1/2, without an extra pass for the factor."""
    return as_stored(like, lambda shape: torch.empty(shape, dtype=like.dtype, device=like.device).normal_(0, 0.5))


class LocalReparameterization(torch.autograd.Function):
    """One draw of a layer's output, with gradients for x, weight, log_sigma2 and bias.

    apply(x, weight, log_sigma2, bias, bias_sigma2, mask, map, dtype, noise):
        x: input of the map; its dtype is that of the mean path and of the result.
        weight, log_sigma2: parameters of one shape. bias: (outputs) or None.
        bias_sigma2: variance of the bias, (outputs) or None; it has no gradient.
        mask: bool of the weight's shape or None; weights outside it count as exactly 0, with no gradient.
        map: the linear map. dtype: dtype of the variance path. noise: source of the noise (None: torch's default generator).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        log_sigma2: Tensor,
        bias: Tensor | None,
        bias_sigma2: Tensor | None,
        mask: Tensor | None,
        map: Map,
        dtype: torch.dtype,
        noise: Noise | None,
    ) -> Tensor:
        with without_autocast(x.device.type):
            ones = as_ones(mask, weight)
            sigma2 = _sigma2(log_sigma2, ones).to(dtype)
            mean = _masked(weight, ones).to(x.dtype)
            weights = Weights(mean, sigma2, _to(bias, x.dtype), _to(bias_sigma2, dtype))
            output, variance = moments(partial(_maps.apply, map), x, weights)
            del mean, sigma2, weights
            spread = variance.clamp_min_(TINY).sqrt_()
            # Half the noise, doubled in the sum: the quotient then is the derivative, without an extra pass for its factor.
            half = _half_noise(output) if noise is None else noise(output).mul(0.5)
            output.addcmul_(spread.to(output.dtype), half, value=2)
            slope = half.to(dtype).div_(spread)
        ctx.save_for_backward(x, weight, log_sigma2, mask, slope)
        ctx.map = map
        return (
            output.detach()
        )  # F.linear returns views for some inputs, and a view returned by a function cannot be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, log_sigma2, mask, slope = ctx.saved_tensors
        of_x, of_weight, of_log_sigma2, of_bias = ctx.needs_input_grad[:4]
        with without_autocast(x.device.type):
            grad_bias = _maps.bias_gradient(ctx.map, grad) if of_bias else None
            ones = as_ones(mask, weight)
            grad_x, grad_weight = _maps.gradients(ctx.map, grad, x, _masked(weight, ones).to(x.dtype), of_x, of_weight)
            if grad_weight is not None and ones is not None:
                grad_weight.mul_(ones)
            grad_log_sigma2 = None
            if of_x or of_log_sigma2:
                sigma2 = _sigma2(log_sigma2, ones)
                dtype = slope.dtype
                spread: Any = _maps.gradients(
                    ctx.map, grad.to(dtype) * slope, square(x, dtype), sigma2.to(dtype), of_x, of_log_sigma2
                )
                grad_square, grad_sigma2 = spread
                if grad_x is not None:
                    grad_x.addcmul_(x, grad_square, value=2)  # in the wider of the dtypes
                if of_log_sigma2:
                    grad_log_sigma2 = sigma2.mul_(grad_sigma2)
        return grad_x, grad_weight, grad_log_sigma2, grad_bias, None, None, None, None, None


def variances(log_sigma2: Tensor) -> Tensor:
    """exp(log_sigma2) in at least float32: the range of float16 is too small for exp(-15)."""
    return log_sigma2.to(torch.promote_types(log_sigma2.dtype, torch.float32)).exp()


def as_ones(mask: Tensor | None, weight: Tensor) -> Tensor | None:
    """1 inside the mask and 0 elsewhere, in the weight's dtype: torch takes several times longer with bool itself."""
    return None if mask is None else mask.view(torch.uint8).to(weight.dtype)


def _sigma2(log_sigma2: Tensor, ones: Tensor | None) -> Tensor:
    """The variances, 0 outside the mask, as a new tensor."""
    sigma2 = variances(log_sigma2)
    return sigma2 if ones is None else sigma2.mul_(ones)


def _masked(weight: Tensor, ones: Tensor | None) -> Tensor:
    return weight if ones is None else weight * ones


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
