"""The number of non-zeros that masks leave once a model is pruned, counted without pruning it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.batch import unwrapped
from svdcompress.prune import BIAS, Choice, Consumer, analyse, count_means, oriented
from svdcompress.relevance import as_masks
from svdcompress.selection._readers import readers
from svdcompress.selection._sizes import Sizes


def count_nonzero(
    model: nn.Module,
    example_inputs: Any,
    masks: Mapping[str, Tensor],
    *,
    protect: Sequence[str] = (),
    remove_inputs: bool = False,
    round_to: int = 1,
) -> float:
    """What `svdcompress.cost.measure` would count as non-zeros of the pruned model, if no parameter that stays happens to be 0.

    Weights that a mask keeps still go if their unit is removed, and so do its biases. Arguments as for `prune`.

    Example:
        >>> count_nonzero(model, x, masks) == cost.measure(prune(model, x, masks=masks), x).nonzero
        True
    """
    model = unwrapped(model)
    masks = as_masks(model, masks)
    found = analyse(model, example_inputs, masks=masks, protect=protect, remove_inputs=remove_inputs)
    if found is None:
        return float(count_means(model) - masks.total + masks.kept)
    choice = found.choose(round_to=round_to)
    left = Sizes(model, found, example_inputs).left(choice)["parameters"]
    counted: set[int] = set()
    for number, (consumer, layers) in enumerate(readers(model, found)):
        if not layers or id(consumer.parameter.tensor) in counted:
            continue
        counted.add(id(consumer.parameter.tensor))
        there = oriented(consumer, masks[layers[0]]).cpu().clone()
        left -= _unmoved(model, consumer, choice, there)
        per_group = there.shape[2]
        for moved, (carrier, _) in choice.carriers.get(number, {}).items():  # constants moved onto other inputs
            group = moved // per_group
            there[group, :, carrier % per_group] |= there[group, :, moved % per_group]
        outs, ins = (torch.from_numpy(~choice.removed[slots]) for slots in (consumer.outs, consumer.ins))
        left -= int((~there & outs[:, :, None, None] & ins[:, None, :, None]).sum())
    return float(left)


def _unmoved(model: nn.Module, consumer: Consumer, choice: Choice, there: Tensor) -> int:
    """The zeros in a bias that a layer gets for folded constants: those of outputs that no constant reaches."""
    if consumer.owner is None or getattr(model.get_submodule(consumer.owner), "bias", None) is not None:
        return 0
    folded = choice.folded[consumer.ins.reshape(-1)] & (consumer.how == BIAS) & (consumer.values[:, 0] != 0)
    if not folded.any():
        return 0
    reached = (there.any(3) & torch.from_numpy(folded.reshape(consumer.ins.shape))[:, None]).any(2)
    return int((~reached & torch.from_numpy(~choice.removed[consumer.outs])).sum())
