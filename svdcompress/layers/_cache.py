"""Caches what `sampling` computes repeatedly from the parameters, as long as these do not change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Cache:
    """A value derived from tensors, valid as long as their storage and version, and the value of a key, stay the same.

    Only for use without gradients. A change that bypasses torch's version counters (in place, through `.data`) goes
    unnoticed: so each `sampling` and each call of `mc_predict` starts with empty caches, and an optimizer's step empties them.
    """

    def __init__(self) -> None:
        # Stamp; aliases of the sources, so that their storage cannot be freed and its address reused; the derived value.
        self._entry: tuple[list[Any], list[Tensor], Any] | None = None

    def get(self, sources: Sequence[Tensor | None], key: Any, make: Callable[[], Any]) -> Any:
        """`make()`, or its earlier result for the same sources and key."""
        if torch.compiler.is_compiling() or not all(map(_traceable, sources)):
            return make()
        if torch.is_grad_enabled():
            self._entry = None  # a step may follow, as in `VariationalLayer.forward`
            return make()
        stamp = [None if source is None else (source.data_ptr(), source._version) for source in sources] + [key]
        entry = self._entry
        if entry is None or entry[0] != stamp:
            alive = [source.detach() for source in sources if source is not None]
            entry = self._entry = (stamp, alive, make())
        return entry[2]


_core: Any = torch._C


def _traceable(source: Tensor | None) -> bool:
    """Whether changes of a tensor can be detected: a plain tensor with storage and a version counter."""
    if source is None:
        return True
    plain = type(source) in (Tensor, torch.nn.Parameter) and not _core._functorch.is_functorch_wrapped_tensor(source)
    return plain and source.device.type != "meta" and not source.is_inference()
