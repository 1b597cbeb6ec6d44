"""A look at whether the statistics of a batch would undo what a network knows, before it is trained on with them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from svdcompress.batch import call
from svdcompress.convert import as_it_was
from svdcompress.train._state import mix
from svdcompress.train._work import Work

TIMES, MORE = 5.0, 0.1
"""So many times the loss, and so much more, with the statistics of a batch: then training begins by unlearning. A network that
has its data by heart has more loss so, too, but little."""


def norms(model: nn.Module) -> list[nn.Module]:
    """Layers that have running statistics."""
    return [module for module in model.modules() if isinstance(module, _NormBase) and module.running_mean is not None]


def far_norms(work: Work) -> str | None:
    """What to say where a network's running statistics fit its training data far better than those of a batch do.

    So it is with a pretrained network on data of another mixture than it was trained on: its normalisations would compute
    otherwise from the first step on, and all layers behind them would have to learn that.
    """
    if work.settings.norms == "keep" or not norms(work.model):
        return None
    size = work.settings.batch_size
    try:  # a batch of all examples, as training has them: the first ones may be of one class
        batch = next(iter(work.examples.batches(size, shuffle=mix(work.seed, "norms"), device=work.device)))
        running, own = (_loss(work, *batch, own) for own in (False, True))
    except Exception:  # of the user's model or data: training will meet it too, and say whose it is
        return None
    if not (own > TIMES * running and own - running > MORE):
        return None
    where = "with the running ones of its batch normalisations"
    return (
        f"{work.section}.norms: with the statistics of a batch of {size} the network has a loss of {own:.2g}, {where} "
        f"{running:.2g}, so training begins by unlearning. Where its data were of another mixture than these, let it have its "
        f"own: --set {work.section}.norms=keep"
    )


@torch.no_grad()
def _loss(work: Work, x: object, y: torch.Tensor, own: bool) -> float:
    """Of a batch, all else as in `eval()`. own: with the statistics of the batch."""
    with as_it_was(work.model, True), work.autocast(), work.right:
        work.model.eval()
        for module in norms(work.model):
            module.train(own)
        output = call(work.model, x)
        loss = work.loss(output, y)
        return float(loss if work.teacher is None else work.teacher.mix(loss, output, x))
