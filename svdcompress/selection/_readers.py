"""Which layers read and write a unit, and how much its weights are worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from svdcompress.layers import VariationalLayer, variational_layers
from svdcompress.prune import Analysis, Consumer, holders, oriented


def readers(model: nn.Module, analysis: Analysis) -> list[tuple[Consumer, list[str]]]:
    """Each weight that the model uses, with the names of the variational layers that hold it and compute with their masks."""
    names = {id(layer): name for name, layer in variational_layers(model) if name not in analysis.past}
    return [
        (
            consumer,
            [names[id(m)] for m, key in holders(model, consumer.parameter) if key == "weight" and id(m) in names],
        )
        for consumer in analysis.consumers
    ]


@torch.no_grad()
def scores(
    model: nn.Module, analysis: Analysis, masks: Mapping[str, Tensor], weigh: Callable[[VariationalLayer], Tensor]
) -> tuple[np.ndarray, np.ndarray]:
    """Per root, the worth of all weights that read or write the unit, and whether everything that reads it can be masked."""
    layers: dict[str, VariationalLayer] = dict(variational_layers(model))
    score, killable = np.zeros(analysis.count), analysis.free.copy()
    for consumer, names in readers(model, analysis):
        ins, outs = analysis.root[consumer.ins], analysis.root[consumer.outs]
        if not names:
            killable[ins] = False
            continue
        nats = oriented(consumer, weigh(layers[names[0]]) * masks[names[0]]).sum(3).double().cpu().numpy()
        np.add.at(score, ins, nats.sum(1))
        np.add.at(score, outs, nats.sum(2))
        own = outs[:, :, None] == ins[:, None, :]  # a unit that reads itself: the weight counts once
        if own.any():
            group, out, _ = np.nonzero(own)
            np.subtract.at(score, outs[group, out], nats[own])
    return score, killable
