"""The multiply-accumulates of a pass, operator by operator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from svdcompress.batch import call, in_eval


def operation(func: Any, args: tuple, kwargs: dict, out: Any) -> int | None:
    """Multiply-accumulates of an operator that ran, or None if it is no matrix product, convolution or attention."""
    formula = flop_registry.get(func._overloadpacket)
    return None if formula is None else formula(*args, **kwargs, out_val=out) // 2


def operations(model: nn.Module, inputs: Any) -> list[int]:
    """Multiply-accumulates of each counted operator of a pass in `eval()`, in the order in which a tracer sees them."""
    with in_eval(model), torch.no_grad(), plain_attention(), _Counting() as counting:
        call(model, inputs)
    return counting.found


@contextmanager
def plain_attention() -> Iterator[None]:
    """Within it, attention is made of matrix products: fused kernels show no units and count nothing."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (macs := operation(func, args, kwargs or {}, out)) is not None:
            self.found.append(macs)
        return out
