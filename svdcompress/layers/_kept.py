"""Cuts the output of a module whose number of channels is fixed in its code to the channels that are still needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class KeptChannels:
    """A forward hook that keeps these indices of one dimension of a module's output."""

    def __init__(self, dim: int, kept: Sequence[int]) -> None:
        self.dim, self.kept = dim, list(kept)
        self._indices: dict[torch.device, Tensor] = {}

    def __call__(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out.index_select(self.dim, self.index(out.device))

    def index(self, device: torch.device) -> Tensor:
        """The indices as a tensor, made once for each device."""
        if device not in self._indices:
            self._indices[device] = torch.tensor(self.kept, device=device)
        return self._indices[device]


def kept_channels(module: nn.Module) -> KeptChannels | None:
    """The `KeptChannels` hook of a module, or None."""
    return next((hook for hook in module._forward_hooks.values() if isinstance(hook, KeptChannels)), None)


def keep_channels(module: nn.Module, dim: int, kept: Sequence[int]) -> None:
    """Let a module return only these indices of one dimension; replaces what was kept before."""
    hooks: Any = module._forward_hooks
    for key, hook in list(hooks.items()):
        if isinstance(hook, KeptChannels):
            del hooks[key]
    module.register_forward_hook(KeptChannels(dim, kept), prepend=True)  # other hooks see the cut output
