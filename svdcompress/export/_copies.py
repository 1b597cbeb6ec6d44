"""Copies of a model to export and to compare with; the user's own model is not changed."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn

from svdcompress.batch import map_tensors, unwrapped
from svdcompress.convert import PAST_CURE, watch
from svdcompress.errors import ExportError
from svdcompress.layers import VariationalLayer, stochastic_layers, variational_layers


def eval_copy(model: nn.Module) -> nn.Module:
    """A copy in `eval()`, float32, on the CPU, without gradients and out of reach of any `sampling` context.

    Wrappers of torch.compile and of data-parallel training are taken off. Raises ExportError if the model cannot be copied.
    """
    model = unwrapped(model)
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


def unmask_past(reference: nn.Module, example_inputs: Any) -> None:
    """Drop, in place and with a warning, the masks of layers whose weight is read past them, where they have no effect.

    reference: an `eval_copy`. Raises ExportError if such a layer also runs itself: it then has two weights.
    """
    layers = [(name, layer) for name, layer in variational_layers(reference) if not bool(layer.relevant().all())]
    inputs = map_tensors(example_inputs, lambda t: t.detach().cpu().float() if t.is_floating_point() else t.cpu())
    try:
        reads = watch(reference, inputs, layers)
    except Exception:  # a model that does not run on its inputs is reported elsewhere
        return
    for name in reads.past:
        if name in reads.ran:
            raise ExportError(f"{name}: {reads.reason(name)}, but the layer itself also runs, with its mask. {PAST_CURE}")
        layer: Any = reference.get_submodule(name)
        layer.mask = torch.ones_like(layer.weight, dtype=torch.bool)
    if reads.past:
        told = "; ".join(f"{name}: {reads.reason(name)}" for name in list(reads.past)[:4]) + " ..." * (len(reads.past) > 4)
        warnings.warn(f"the file contains all weights of layers whose masks have no effect: {told}. {PAST_CURE}", stacklevel=3)
