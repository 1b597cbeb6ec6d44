"""Copies of a model to export and to compare with; the user's own stays as it is."""

from __future__ import annotations

import copy
import warnings
from typing import Any

from torch import nn

from svdcompress.errors import ExportError
from svdcompress.layers import VariationalLayer, stochastic_layers


def eval_copy(model: nn.Module) -> nn.Module:
    """A copy in `eval()`, float32, on the CPU, without gradients, that no `sampling` context reaches.

    Wrappers of torch.compile and of data-parallel training are taken off. Raises ExportError if a copy can't be made.
    """
    model = getattr(model, "_orig_mod", model)
    if type(model).__name__ in ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"):
        wrapper: Any = model
        model = wrapper.module
    samplers = [layer.sampler for layer in stochastic_layers(model)]
    memo = {id(sampler): None for sampler in samplers if sampler is not None}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            twin = copy.deepcopy(model, memo)
    except Exception as error:
        raise ExportError(f"{type(model).__name__} cannot be copied (copy.deepcopy): {error}") from error
    for module in twin.modules():
        if isinstance(module, VariationalLayer):
            module.variance_dtype = "float32"
    return twin.cpu().float().eval().requires_grad_(False)
