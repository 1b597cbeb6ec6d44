"""A check, before further training, of whether batch statistics would undo what a network has learned."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from svdcompress.batch import call
from svdcompress.convert import as_it_was
from svdcompress.train._state import mix
from svdcompress.train._work import Work

TIMES, MORE = 5.0, 0.1
"""If the loss with batch statistics is more than TIMES the loss with running ones, and higher by more than MORE, training would
begin by unlearning. A network that has memorized its data also has a higher loss with them, but only slightly."""


def norms(model: nn.Module) -> list[nn.Module]:
    """Layers that have running statistics."""
    return [module for module in model.modules() if isinstance(module, _NormBase) and module.running_mean is not None]


def keeps_norms(work: Work) -> tuple[bool, str | None]:
    """Whether a fit leaves running statistics as they are, and what to tell the user about it (None: nothing).

    If a network's running statistics fit its training data far better than batch statistics do, its normalization layers would
    compute something else from the first step on, and all layers after them would have to adapt. That is so for a network that
    was pretrained on another mixture of data, and for one that a cut has hardly changed.
    """
    asked = work.settings.norms
    if asked == "keep" or (asked == "batch" and work.on_note is None) or not norms(work.model):
        return asked == "keep", None
    size = work.settings.batch_size
    try:  # a batch drawn from all examples, as in training: the first ones may all be of one class
        batch = next(iter(work.examples.batches(size, shuffle=mix(work.seed, "norms"), device=work.device)))
        running, own = (_loss(work, *batch, own) for own in (False, True))
    except Exception:  # from the user's model or data: training will meet it too, and explain it
        return False, None
    if not far(running, own):
        return False, None
    found = (
        f"{work.section}.norms: the network's loss is {own:.2g} with the statistics of a batch of {size}, and {running:.2g} "
        "with the running statistics of its batch normalizations"
    )
    if asked == "auto":
        return True, f"{found}, so these are kept (auto; --set {work.section}.norms=batch lets batches update them)"
    return False, (
        f"{found}, so training begins by unlearning. If it was trained on a different mixture of data, keep its running "
        f"statistics: --set {work.section}.norms=keep"
    )


def steadies(work: Work, keeps: bool, line: str | None) -> str | None:
    """What to tell the user if a fit that begins takes its `steady` settings, because running statistics stay; else None.

    keeps, line: what `keeps_norms` returned.

    A network whose normalization layers do not normalize has no protection against large steps: SGD at a rate for batch
    statistics can end in a loss that is not finite.
    """
    if work.steady is None or not keeps:
        return None
    found = line or f"{work.section}.norms: running statistics of batch normalizations are kept, as set"
    by = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}
    instead, first = (by[each.optimizer] for each in (work.steady, work.settings))
    return (
        f"{found}. {instead} at {work.steady.lr:g} trains in place of {first}, whose steps can be too large without batch "
        f"statistics (auto; {work.section}.optimizer sets another)"
    )


def far(running: float, own: float) -> bool:
    """Whether training would begin by unlearning. running, own: the losses with running and with batch statistics."""
    return own > TIMES * running and own - running > MORE


@torch.no_grad()
def _loss(work: Work, x: object, y: torch.Tensor, own: bool) -> float:
    """The loss of a batch in `eval()`. own: with the statistics of the batch in place of running ones."""
    with as_it_was(work.model, True), work.lower():
        work.model.eval()
        for module in norms(work.model):
            module.train(own)
        output = call(work.model, x)
        loss = work.loss(output, y)
        return float(loss if work.teacher is None else work.teacher.mix(loss, output, x))
