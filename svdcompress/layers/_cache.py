"""What `sampling` computes from the parameters again and again: kept as long as the parameters stay what they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Cache:
    """What is derived from tensors, valid while those have the same storage and version, and a key the same value.

    Only for use without gradients. A change past torch's version counters (in place, through `.data`) cannot be seen:
    layers `clear` it at each `train()`, `eval()` and `sampling`. Copies and pickles of a layer start with an empty cache.
    """

    def __init__(self) -> None:
        self._stamp: list[Any] | None = None
        self._alive: list[Tensor] = []  # aliases of the sources: their storage cannot be freed and its address used again
        self._derived: Any = None

    def get(self, sources: Sequence[Tensor | None], key: Any, make: Callable[[], Any]) -> Any:
        """`make()`, or what it gave before from the same sources and key."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not all(map(_traceable, sources)):
            return make()
        stamp = [None if source is None else (source.data_ptr(), source._version) for source in sources] + [key]
        if stamp != self._stamp:
            self._derived = make()
            self._alive = [source.detach() for source in sources if source is not None]
            self._stamp = stamp
        return self._derived

    def clear(self) -> None:
        self._stamp, self._alive, self._derived = None, [], None

    def __deepcopy__(self, memo: Any) -> Cache:
        return Cache()

    def __reduce__(self) -> tuple[type[Cache], tuple[()]]:
        return Cache, ()


_core: Any = torch._C


def _traceable(source: Tensor | None) -> bool:
    """Whether changes of a tensor can be seen: a plain one with storage and a version counter."""
    if source is None:
        return True
    plain = type(source) in (Tensor, torch.nn.Parameter) and not _core._functorch.is_functorch_wrapped_tensor(source)
    return plain and source.device.type != "meta" and not source.is_inference()
