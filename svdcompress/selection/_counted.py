"""How many numbers that are not zero masks leave a model once it is pruned, without pruning it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.prune import analyse, count_means, oriented
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
    """What `svdcompress.cost.measure` would count as non-zeros of the pruned model, where no parameter that stays is 0 itself.

    Weights that a mask keeps go all the same where their unit does, and so do its biases. Arguments as those of `prune`.

    Example:
        >>> count_nonzero(model, x, masks) == cost.measure(prune(model, x, masks=masks), x).nonzero
        True
    """
    masks = as_masks(model, masks)
    found = analyse(model, example_inputs, masks=masks, protect=protect, remove_inputs=remove_inputs)
    if found is None:
        return float(count_means(model) - masks.total + masks.kept)
    choice = found.choose(round_to=round_to)
    left = Sizes(model, found, example_inputs).left(choice)["parameters"]
    counted: set[int] = set()
    for consumer, layers in readers(model, found):
        if not layers or id(consumer.parameter.tensor) in counted:
            continue
        counted.add(id(consumer.parameter.tensor))
        zeros = ~oriented(consumer, masks[layers[0]]).cpu()
        outs, ins = (torch.from_numpy(~choice.removed[slots]) for slots in (consumer.outs, consumer.ins))
        left -= int((zeros & outs[:, :, None, None] & ins[:, None, :, None]).sum())
    return float(left)
