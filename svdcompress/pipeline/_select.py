"""A pruned model that reads fewer inputs, behind the interface of the one that reads all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Select(nn.Module):
    """Takes whole inputs and hands on those that the model still reads.

    index: which of them, along dimension `dim`. Its ONNX form is one Gather, so that callers need not know.
    """

    index: Tensor

    def __init__(self, model: nn.Module, index: list[int], dim: int) -> None:
        super().__init__()
        self.model = model
        self.dim = dim
        self.register_buffer("index", torch.tensor(index), persistent=False)

    def forward(self, x: Tensor) -> Any:
        return self.model(x.index_select(self.dim, self.index))


def whole(model: nn.Module, pruning: Mapping[str, Any]) -> nn.Module:
    """A pruned model that takes whole inputs: itself, unless pruning removed inputs (`pruning`: its report as a dict)."""
    kept = pruning.get("inputs_kept")
    return model if kept is None else Select(model, list(kept), int(pruning.get("inputs_dim") or 1))


def bare(model: nn.Module) -> nn.Module:
    """The model itself, as a checkpoint holds it."""
    return model.model if isinstance(model, Select) else model
