"""The precision in which the variance path is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from svdcompress.errors import ModelError
from svdcompress.layers._maps import Map, rows

VARIANCE_DTYPES = ("auto", "float32", "bfloat16")

_LEAST_SIDE = 32
_LEAST_PRODUCT = 2**20
"""Below these sizes of a matrix product, converting to bfloat16 costs more than the product gains from it."""


def check_variance_dtype(name: str) -> str:
    """Return the name if it is one of VARIANCE_DTYPES, else raise a ModelError that lists them."""
    if name not in VARIANCE_DTYPES:
        raise ModelError(f"variance_dtype: unknown {name!r}; use one of {', '.join(VARIANCE_DTYPES)}")
    return name


# Without these instructions bfloat16 is emulated: 4.5 times slower than float32 on an AVX-512 chip that lacks them.
_FAST_CPU = bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def fast_bfloat16(device: torch.device) -> bool:
    """Whether matrix products in bfloat16 are faster than in float32 on a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).major >= 8
    return device.type == "cpu" and _FAST_CPU


def variance_dtype(name: str, map: Map, x: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of the variance path for one call.

    float64 stays float64; only tests and reference computations use it. "auto" takes bfloat16 where the chip is fast at it
    and the product is large enough to pay for the conversion.
    """
    if weight.dtype == torch.float64:
        return torch.float64
    if name != "auto":
        return torch.bfloat16 if name == "bfloat16" else torch.float32
    if not fast_bfloat16(x.device):
        return torch.float32
    if x.dtype == torch.bfloat16:
        return x.dtype
    sizes = rows(map, x, weight)
    pays = min(sizes) >= _LEAST_SIDE and sizes[0] * sizes[1] * sizes[2] >= _LEAST_PRODUCT
    return torch.bfloat16 if pays else torch.float32
