"""The local reparameterisation: mean and variance of a pre-activation, and a draw from it.

Kingma, Salimans & Welling 2015 (arXiv 1506.02557), eq. 6: for independent Gaussian weights, `y = m + sqrt(v) * eps` with
`m = f(x, mu) + b`, `v = f(x * x, sigma2)` for any linear map f (matrix product or convolution).
"""

from __future__ import annotations

import torch
from torch import Tensor

TINY = 1e-16
"""Least variance under the root; its noise (1e-8) is below float32's resolution, and the root keeps a finite gradient."""


def draw(mean: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
    """`mean + sqrt(variance) * noise`, all of one shape; variances below TINY have no gradient."""
    return mean + variance.clamp_min(TINY).sqrt().to(mean.dtype) * noise


def normal_like(tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Standard normal noise of a tensor's shape, dtype and device."""
    if generator is None:
        return torch.randn_like(tensor)
    return torch.randn(tensor.shape, dtype=tensor.dtype, device=tensor.device, generator=generator)
