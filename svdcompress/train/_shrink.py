"""Removing dead units during training, so that the cost of training falls with the size of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from svdcompress.checkpoint import take_attributes
from svdcompress.layers import set_posterior, variational_layers
from svdcompress.prune import on_cpu, prune
from svdcompress.relevance import Masks, hold

WORTH_IT = 0.95
"""A model shrinks only if at most this share of its parameters is left, as Adam's averages are lost each time."""


def size(model: nn.Module) -> int:
    """Number of parameters, log variances included."""
    return sum(parameter.numel() for parameter in model.parameters())


def shrink(model: nn.Module, inputs: Any, *, masks: Callable[[nn.Module], Masks] | None = None, **options: Any) -> bool:
    """Remove the dead units of a model in `eval()`, in place, if enough are dead; returns whether it did.

    Masks are not frozen afterwards: weights of the remaining units may still become relevant again. inputs: examples for one
    forward pass. masks: returns the masks by which the last pruning will decide (None: by the threshold among the options, or
    the layers' own). options: of `prune`, such as `protect` and `round_to`, as in the last pruning.
    """
    whole = on_cpu(model)
    small: Any = prune(whole, inputs, masks=None if masks is None else masks(whole), **options)
    if size(small) > WORTH_IT * size(model):
        return False
    hold(small, None)
    reshape(model, small.surgery, small.state_dict())
    return True


def reshape(model: nn.Module, surgery: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
    """Give a model the attributes, shapes and posteriors of a pruned one, and its state, in place.

    Parameters whose shape changes are replaced by new ones. A parameter that several modules share stays shared.
    """
    take_attributes(model, surgery)
    # Pruning gave each weight a variance of its own in layers whose posterior could not hold those of the remaining weights.
    own = [layer for name, layer in variational_layers(model) if f"{name}.log_sigma2".lstrip(".") in state]
    set_posterior(own, "independent")
    made: dict[int, nn.Parameter] = {}
    old_ones = []  # kept alive, so that no new tensor gets the id of an old one
    for prefix, module in model.named_modules(remove_duplicate=False):
        stores: Any = (module._parameters, module._buffers)
        for own in stores:
            for key, tensor in own.items():
                wanted = state.get(f"{prefix}.{key}".lstrip("."))
                if tensor is None or wanted is None or (wanted.shape == tensor.shape and id(tensor) not in made):
                    continue
                old_ones.append(tensor)
                new = torch.empty(wanted.shape, dtype=tensor.dtype, device=tensor.device)
                if isinstance(tensor, nn.Parameter):
                    new = made.setdefault(id(tensor), nn.Parameter(new, tensor.requires_grad))
                own[key] = new
    model.load_state_dict(state)
