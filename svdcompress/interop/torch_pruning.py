"""Relevance for torch-pruning: its pruners, ratios and schedules based on log alpha, and its choices carried out exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_pruning as tp
from torch import Tensor

from svdcompress.batch import unwrapped
from svdcompress.errors import PruneError, UsageError
from svdcompress.layers import VariationalLayer, variational_layers
from svdcompress.relevance import Masks, as_masks, information, relevance

INPUTS = (tp.pruner.function.prune_linear_in_channels, tp.pruner.function.prune_conv_in_channels)
OUTPUTS = (
    tp.pruner.function.prune_linear_out_channels,
    tp.pruner.function.prune_conv_out_channels,
    tp.pruner.function.prune_depthwise_conv_out_channels,  # its inputs are its outputs
)


class RelevanceImportance(tp.importance.Importance):
    """Importance of torch-pruning's groups: the information, in nats, in the weights that write or read a channel.

    It is that of `svdcompress.relevance.information`, summed over the relevant weights of all variational layers: 0 for dead
    channels, which go first. Layers of any kind are comparable, so that `global_pruning=True` needs no normalizer. Groups
    without a variational layer are left alone.

    sides: which layers count, "both", "readers" or "writers" alone. weigh: the value of each weight of a layer, in the
    weight's shape. benchmarks/ranking.py compares them.

    Raises UsageError for other sides.

    torch-pruning's surgery does not handle variances and is not exact (see docs/pruning.md): use `chosen` to get its choice
    as masks, and `svdcompress.prune` to carry it out.

    Example:
        >>> pruner = tp.pruner.BasePruner(model, x, RelevanceImportance(), global_pruning=True, pruning_ratio=0.5)
        >>> small = svdc.prune(model, x, masks=chosen(pruner))
    """

    def __init__(self, sides: str = "both", weigh: Callable[[VariationalLayer], Tensor] = information) -> None:
        if sides not in ("both", "readers", "writers"):
            raise UsageError(f"sides: {sides!r} is not one of 'both', 'readers' and 'writers'")
        self.sides, self.weigh = sides, weigh

    @torch.no_grad()
    def __call__(self, group: Any) -> Tensor | None:
        """The importance of each channel of a group's root; None if no variational layer reads or writes it."""
        score, told = torch.zeros(len(group[0].idxs), dtype=torch.float64), False
        for item in group:
            layer, reads = item.dep.target.module, item.dep.handler in INPUTS
            writes = item.dep.handler in OUTPUTS
            if not isinstance(layer, VariationalLayer) or not (reads or writes):
                continue
            own = _depthwise(layer)
            if self.sides != "both" and not own and reads != (self.sides == "readers"):
                continue
            view = layer.canonical(self.weigh(layer).double() * layer.relevant())
            values = view.sum((1, 3) if reads else (2, 3)).reshape(-1).cpu()
            roots = torch.tensor([int(root) for root in item.root_idxs])
            score.index_add_(0, roots, values[list(item.idxs)])
            told = True
        return score if told else None


def _depthwise(layer: VariationalLayer) -> bool:
    """Whether each output channel of a layer is a group of its own."""
    return getattr(layer, "groups", 1) > 1 and getattr(layer, "groups", 1) == getattr(layer, "out_channels", 0)


def chosen(pruner: Any) -> Masks:
    """The next step of a torch-pruning pruner on a converted model, as masks: what it would cut is masked, nothing is cut.

    Weights that are masked already stay so. Freeze the masks (`svdcompress.relevance.hold`), train, and call it again for
    the pruner's next step: its ratios refer to the whole model, and it takes dead channels first. As no parameter is
    replaced, optimizers can go on. `svdcompress.prune` with the masks then makes the model small, by this package's own
    dependency groups and with its own equivalence check: if torch-pruning's graph is wrong, the result is still right, but
    what cannot be removed exactly stays masked.

    pruner: a `tp.pruner.BasePruner` or one of its kind. Raises PruneError if its model has no variational layer.
    """
    model = unwrapped(pruner.model)
    if not any(True for _ in variational_layers(model)):
        raise PruneError(
            "chosen: the pruner's model has no variational layer; call svdcompress.convert(model) before you make the pruner"
        )
    masks = {name: mask.clone() for name, mask in relevance(model).items()}
    names = {id(layer): name for name, layer in variational_layers(model)}
    for group in pruner.step(interactive=True):
        for item in group:
            layer = item.dep.target.module
            if not isinstance(layer, VariationalLayer):
                continue
            view, at = layer.canonical(masks[names[id(layer)]]), torch.tensor(list(item.idxs), dtype=torch.long)
            _, outs, ins, _ = view.shape
            if item.dep.handler in INPUTS:
                view[at // ins, :, at % ins] = False
            elif item.dep.handler in OUTPUTS:
                view[at // outs, at % outs] = False
    return as_masks(model, masks)
