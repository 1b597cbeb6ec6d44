"""Masks of whole units, for sizes that follow the shapes: a zero between two units that stay does not make a shape smaller."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from svdcompress.batch import unwrapped
from svdcompress.layers import variational_layers
from svdcompress.relevance import Masks, as_masks


def whole_units(model: nn.Module, masks: Mapping[str, Tensor]) -> Masks:
    """Masks that keep all weights between inputs and outputs that have any weight left; the same units stay dead.

    model: converted; masks: by layer, boolean, in the shapes of the weights.

    Example:
        >>> import torch
        >>> model = convert(nn.Linear(3, 2))
        >>> masks = {"": torch.tensor([[True, False, False], [False, False, True]])}
        >>> whole_units(model, masks)[""].int().tolist()
        [[1, 0, 1], [1, 0, 1]]
    """
    found = {}
    for name, layer in variational_layers(unwrapped(model)):
        view = layer.canonical(masks[name])
        outputs, inputs = (view.any(3).any(axis, keepdim=True) for axis in (2, 1))
        found[name] = layer.as_weight((outputs & inputs)[..., None]).clone()
    return as_masks(model, found)
