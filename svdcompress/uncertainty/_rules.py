"""Rules of moment propagation: mean and variance of each operation's result from those of its input."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from svdcompress.errors import ModelError
from svdcompress.layers import BernoulliDropout, GaussianDropout, Moments, VariationalLayer

TINY = 1e-24  # a variance: below it a number counts as certain
NEVER = -1e9  # the mean of a padded position in maximum pooling


def unknown(what: str) -> ModelError:
    """The error for an operation without a rule."""
    known = "Linear, convolutions, ReLU, average and maximum pooling, BatchNorm, flatten, dropout and sums"
    return ModelError(f"method 'moments' has no rule for {what}; it follows {known}. Use method='sampling'")


def variational(layer: VariationalLayer, x: Moments | Tensor, *args: Any) -> Moments:
    """The layer's own moments, for an input that is certain or has a variance."""
    mean, variance = x if isinstance(x, Moments) else (x, None)
    return layer.moments(mean, *args, variance=variance)


def dropout(layer: BernoulliDropout | GaussianDropout, x: Moments | Tensor) -> Moments:
    """Multiplicative noise of mean 1 and variance a = p / (1 - p): Var = v + a (m^2 + v)."""
    mean, variance = x if isinstance(x, Moments) else (x, torch.zeros_like(x))
    return Moments(mean, variance + layer.p / (1 - layer.p) * (mean.square() + variance))


def _linear_map(layer: Any, x: Moments) -> Moments:
    """A dense Linear or convolution: the squared weights propagate the variance, and the bias adds none."""
    mean = layer(x.mean)
    weight = layer.weight  # read after the call, since a hook may compute it (torch.nn.utils.weight_norm, prune)
    hooked = layer._forward_hooks or layer._forward_pre_hooks
    if hooked and not torch.allclose(_plain_map(layer, x.mean, weight, layer.bias), mean, rtol=1e-4, atol=1e-6):
        raise unknown(f"a {type(layer).__name__} whose hooks change what goes in or comes out")
    return Moments(mean, _plain_map(layer, x.variance, weight.square(), None))


def _plain_map(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What the layer would compute with this weight and bias instead of its own, which are left unchanged."""
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, bias)
    if not layer.transposed:
        return layer._conv_forward(x, weight, bias)
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(layer.kernel_size) - 1]
    return function(x, weight, bias, layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation)


def _batch_norm(layer: Any, x: Moments) -> Moments:
    if layer.running_var is None:
        raise ModelError("method 'moments' needs running statistics of BatchNorm; use method='sampling'")
    factor = (layer.running_var + layer.eps).rsqrt() * (1 if layer.weight is None else layer.weight)
    shape = [1, -1] + [1] * (x.mean.dim() - 2)
    return Moments(layer(x.mean), x.variance * factor.square().view(shape))


def relu(x: Moments, *_: Any, **__: Any) -> Moments:
    """Mean and variance of max(0, N(m, v)); Frey & Hinton 1999."""
    std = x.variance.clamp_min(TINY).sqrt()
    z = x.mean / std
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    mass = torch.special.ndtr(z)
    mean = x.mean * mass + std * density
    second = (x.mean.square() + x.variance) * mass + x.mean * std * density
    return Moments(mean, (second - mean.square()).clamp_min(0))


def maximum(a: Moments, b: Moments) -> Moments:
    """Mean and variance of the larger of two independent normal variables; Clark 1961, eq. 2 to 4."""
    total = (a.variance + b.variance).clamp_min(TINY)
    theta = total.sqrt()
    z = (a.mean - b.mean) / theta
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    first, other = torch.special.ndtr(z), torch.special.ndtr(-z)
    mean = a.mean * first + b.mean * other + theta * density
    second = (a.mean.square() + a.variance) * first + (b.mean.square() + b.variance) * other
    second = second + (a.mean + b.mean) * theta * density
    return Moments(mean, (second - mean.square()).clamp_min(0))


def _windows(x: Tensor, kernel: Any, stride: Any, padding: Any, fill: float) -> Tensor:
    """The numbers of each pooling window in the last dimension: (batch, channels, *positions, numbers); without dilation."""
    dims = x.dim() - 2
    kernel, padding = _each(kernel, dims), _each(padding, dims)
    stride = _each(stride if stride is not None and stride != [] else kernel, dims)
    x = F.pad(x, [side for p in reversed(padding) for side in (p, p)], value=fill)
    for d in range(dims):
        x = x.unfold(2 + d, kernel[d], stride[d])
    return x.flatten(2 + dims)


def max_pool(
    x: Moments, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False, **_: Any
) -> Moments:
    """The maximum of a window as a tournament of pairs; padding never wins."""
    if ceil_mode or any(step != 1 for step in _each(dilation, x.mean.dim() - 2)):
        raise ModelError("method 'moments' has no rule for maximum pooling with dilation or ceil_mode; use method='sampling'")
    means = _windows(x.mean, kernel_size, stride, padding, NEVER)
    variances = _windows(x.variance, kernel_size, stride, padding, 0.0)
    rounds = [Moments(means[..., k], variances[..., k]) for k in range(means.shape[-1])]
    while len(rounds) > 1:
        pairs = [maximum(a, b) for a, b in zip(rounds[::2], rounds[1::2], strict=False)]
        rounds = pairs + ([rounds[-1]] if len(rounds) % 2 else [])
    return rounds[0]


def avg_pool(
    x: Moments,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Moments:
    """A sum of independent numbers, each with the weight w: Var = sum w^2 v = w * pool(v)."""
    dims = x.mean.dim() - 2
    sizes = [_each(size, dims) for size in (kernel_size, kernel_size if stride in (None, []) else stride, padding)]
    if dims == 1:  # divisor_override, which counts a window's numbers, needs two dimensions
        sizes = [(filler, *size) for filler, size in zip((1, 1, 0), sizes, strict=True)]
        x = Moments(x.mean.unsqueeze(2), x.variance.unsqueeze(2))
    function: Any = F.avg_pool3d if dims == 3 else F.avg_pool2d

    def pool(tensor: Tensor, divisor: int | None = divisor_override) -> Tensor:
        return function(tensor, *sizes, ceil_mode, count_include_pad, divisor)

    ones = torch.ones_like(x.mean[:1, :1])
    pooled = Moments(pool(x.mean), pool(x.variance) * (pool(ones) / pool(ones, 1)))
    return Moments(pooled.mean.squeeze(2), pooled.variance.squeeze(2)) if dims == 1 else pooled


def adaptive_avg_pool(x: Moments, output_size: Any) -> Moments:
    """As `avg_pool`; window i of n over a length L goes from floor(i L / n) to ceil((i + 1) L / n)."""
    dims = x.mean.dim() - 2
    function = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[dims - 1]
    counts = x.mean.new_ones(())
    for length, n in zip(x.mean.shape[2:], _each(output_size, dims), strict=True):
        n = length if n is None else n
        sizes = [-(-(i + 1) * length // n) - i * length // n for i in range(n)]
        counts = counts.unsqueeze(-1) * x.mean.new_tensor(sizes)
    return Moments(function(x.mean, output_size), function(x.variance, output_size) / counts)


def _adaptive_max(x: Moments, size: Any) -> Moments:
    sizes = _each(size, x.mean.dim() - 2)
    kernel = []
    for total, wanted in zip(x.mean.shape[2:], sizes, strict=True):
        if total % (wanted or total):
            raise ModelError("method 'moments' needs adaptive maximum pooling to divide evenly; use method='sampling'")
        kernel.append(total // (wanted or total))
    return max_pool(x, kernel)


def _each(value: Any, dims: int) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,) * dims


def _both(function: Callable) -> Callable:
    """A rule for reshaping, which is applied to mean and variance alike."""
    return lambda x, *args, **kwargs: Moments(function(x.mean, *args, **kwargs), function(x.variance, *args, **kwargs))


def _add(a: Any, b: Any, sign: float = 1, *, alpha: float = 1) -> Moments:
    sign = sign * alpha
    if isinstance(a, Moments) and isinstance(b, Moments):
        return Moments(a.mean + sign * b.mean, a.variance + sign * sign * b.variance)
    if isinstance(a, Moments):
        return Moments(a.mean + sign * b, a.variance.expand_as(a.mean + b))
    return Moments(a + sign * b.mean, sign * sign * b.variance.expand_as(a + b.mean))


def _mul(a: Any, b: Any) -> Moments:
    if isinstance(a, Moments) and isinstance(b, Moments):
        raise unknown("the product of two noisy values")
    noisy, factor = (a, b) if isinstance(a, Moments) else (b, a)
    return Moments(noisy.mean * factor, noisy.variance * (factor * factor))


MODULES: dict[type[nn.Module], Callable[[Any, Moments], Moments]] = {
    nn.ReLU: lambda layer, x: relu(x),
    nn.Identity: lambda layer, x: x,
    nn.modules.dropout._DropoutNd: lambda layer, x: x,  # in eval()
    BernoulliDropout: lambda layer, x: x,  # of rate 0
    GaussianDropout: lambda layer, x: x,
    nn.Flatten: lambda layer, x: _both(layer)(x),
    nn.Unflatten: lambda layer, x: _both(layer)(x),
    nn.Linear: _linear_map,
    nn.modules.conv._ConvNd: _linear_map,
    nn.modules.batchnorm._BatchNorm: _batch_norm,
    nn.modules.pooling._MaxPoolNd: lambda layer, x: max_pool(
        x, layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode
    ),
    nn.modules.pooling._AvgPoolNd: lambda layer, x: avg_pool(
        x,
        layer.kernel_size,
        layer.stride,
        layer.padding,
        layer.ceil_mode,
        layer.count_include_pad,
        getattr(layer, "divisor_override", None),
    ),
    nn.modules.pooling._AdaptiveAvgPoolNd: lambda layer, x: adaptive_avg_pool(x, layer.output_size),
    nn.modules.pooling._AdaptiveMaxPoolNd: lambda layer, x: _adaptive_max(x, layer.output_size),
}
"""The rule for each class of module and its subclasses."""

FUNCTIONS: dict[str, Callable] = {
    "relu": relu,
    "flatten": _both(torch.flatten),
    "view": _both(Tensor.view),
    "reshape": _both(Tensor.reshape),
    "squeeze": _both(Tensor.squeeze),
    "unsqueeze": _both(Tensor.unsqueeze),
    "contiguous": _both(Tensor.contiguous),
    "permute": _both(Tensor.permute),
    "transpose": _both(Tensor.transpose),
    "getitem": _both(operator.getitem),
    "size": lambda x, *args: x.mean.size(*args),
    "dim": lambda x: x.mean.dim(),
    "dropout": lambda x, *args, **kwargs: x,  # in eval()
    "add": _add,
    "iadd": _add,
    "sub": lambda a, b, **kwargs: _add(a, b, -1, **kwargs),
    "mul": _mul,
    "max_pool1d": max_pool,
    "max_pool2d": max_pool,
    "max_pool3d": max_pool,
    "avg_pool1d": avg_pool,
    "avg_pool2d": avg_pool,
    "avg_pool3d": avg_pool,
    "adaptive_avg_pool1d": adaptive_avg_pool,
    "adaptive_avg_pool2d": adaptive_avg_pool,
    "adaptive_avg_pool3d": adaptive_avg_pool,
}
"""The rule for each function and method, by name."""
