"""A trial's masks, for the size that is asked for: the usual way to it, or a mixture that loses less untrained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from svdcompress.likelihoods import likelihood_for
from svdcompress.pipeline._adapted import adapted
from svdcompress.pipeline._begin import Dense, Opened
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._cool import Cooled
from svdcompress.pipeline._figures import macs_of, there
from svdcompress.pipeline._levels import COOLING_EPOCHS, epochs_of
from svdcompress.pipeline._measure import Measure
from svdcompress.pipeline._reconstruct import Reconstructor
from svdcompress.pipeline._some import some
from svdcompress.pipeline._ways import Way, Ways, ways
from svdcompress.relevance import Masks, as_masks, hold
from svdcompress.search import Option, best_option, record
from svdcompress.selection import Selection, limits_of, look_at
from svdcompress.sources import Data
from svdcompress.train import losses

EXAMPLES = 5000
"""Training examples that mixtures are compared on, at most."""

FEW, SHARE = 1000, 0.1
"""Where a trial cools for a few epochs only: this share of the examples of those epochs, but no fewer than so many. Each way is
judged on them, in float32, which would take a large model as long as the cooling does."""


MANY, FIRST, BEST = 4, 0.25, 3
"""More candidates than that are compared on this share of the examples first, and the best few and the usual way on all."""

LONG = 10**12
"""Multiply-accumulates of a look at examples, half a minute of a core, above which a way is pruned for it on a CPU."""

ADAPTED = 1000
"""Training examples that normalisation statistics are taken anew of, for each candidate."""


def compared_on(examples: int, epochs: int) -> int:
    """How many training examples mixtures are compared on, of all `examples`. epochs: of the cooling of a trial."""
    return min(examples, EXAMPLES, max(FEW, round(SHARE * epochs * examples)))


def masks_for(
    context: Context,
    opened: Opened,
    dense: Dense,
    cooled: Cooled,
    measure: Measure,
    target: float,
    stored: Mapping[str, Any] | None = None,
    reconstructor: Reconstructor | None = None,
) -> Selection:
    """Masks of a cooled posterior of which a size comes: single weights go by one threshold on all shares, units by their rank.

    Where the size follows the shapes alone, no single weight of a unit that stays is masked. With `search.mixture: auto`,
    mixtures (see `ways`) are compared with that without training, and one is taken that is surely better. target: the size that
    `measure` is to have. stored: `Selection.way` of a choice that was made before, which is not made again. reconstructor: as
    of `chosen`.
    """
    model = cooled.model
    to_size = ways(context, opened, dense, model, measure, target, cooled.masks, by_outputs=cooled.unpressed)
    if stored is not None:
        asked, masks = stored["asked"], to_size.again(stored)
        way, mixture = {name: stored[name] for name in ("way", "asked", "count")}, stored.get("mixture")
    else:
        taken, mixture = chosen_for(context, opened.data, to_size, reconstructor)
        asked, masks, way = taken.asked, taken.masks, taken.stored()
    metrics = look_at(model, masks, dense.trainer.validate)
    curve = [{"threshold": asked, **metrics, "nonzero": float(masks.kept + to_size.others)}] if isinstance(asked, float) else []
    natural = to_size.natural if cooled.natural is None else cooled.natural
    found = Selection(masks, asked, limits_of(model, asked), curve, target, natural)
    return replace(found, way={**way, "mixture": mixture})


def chosen_for(
    context: Context, data: Data, to_size: Ways, reconstructor: Reconstructor | None = None
) -> tuple[Way, dict[str, Any] | None]:
    """As `chosen`, with the settings and on the examples of a search's trial."""
    count = compared_on(len(data.train), epochs_of(context.recipe.train, COOLING_EPOCHS))
    return chosen(to_size, data, context.recipe.search.mixture, context.place.device, count, reconstructor)


def chosen(
    to_size: Ways,
    data: Data,
    setting: str,
    device: Any,
    count: int = EXAMPLES,
    reconstructor: Reconstructor | None = None,
) -> tuple[Way, dict[str, Any] | None]:
    """The way that is taken, and the record of the choice; None where there was none. count: examples to compare ways on.
    reconstructor: by which what stays makes up for what goes; None: nothing does."""
    usual = to_size.usual()
    if setting == "off" or usual.free:
        return usual, None
    found = {usual.name: usual}
    for way in to_size.others_than(usual):
        if not any(_alike(way.masks, known.masks) for known in found.values()):
            found[way.name] = way
    if len(found) == 1:
        return usual, None
    examples = some(data.train, count)
    each = macs_of(to_size.model, to_size.opened.inputs) if torch.device(device).type == "cpu" else 0

    def judged(way: Way, examples: Any) -> Option:
        to_size.context.check("while it chose what goes")
        small = to_size.small if each * len(examples) > LONG else None
        with there(device, to_size.model):  # sizes are measured where pruning and export have their inputs
            return option(to_size.model, way, examples, data, device, to_size.left, reconstructor, small)

    if len(found) > MANY:
        few = some(data.train, round(FIRST * count))
        first = {name: judged(way, few).nll for name, way in found.items()}
        best = [usual.name, *sorted(set(first) - {usual.name}, key=first.__getitem__)[:BEST]]
        found = {name: way for name, way in found.items() if name in best}
    options = {name: judged(way, examples) for name, way in found.items()}
    while found[(name := best_option([*options.values()]).name)].size is None:  # only what would be taken is measured
        if (fitted := to_size.fitted(found[name], usual)) is None:
            del options[name]
            continue
        found[name], options[name] = fitted, judged(fitted, examples)
    return found[name], record([*options.values()], len(examples))


@torch.no_grad()
def option(
    model: nn.Module,
    way: Way,
    examples: Any,
    data: Data,
    device: Any,
    left: Masks | None = None,
    reconstructor: Reconstructor | None = None,
    small: Callable[[Masks], nn.Module | None] | None = None,
) -> Option:
    """What a way loses on examples, untrained: as it is reconstructed, else but for its normalisation statistics, which fit
    outputs that are as before. model: where `device` is. left: what is left of it before. small: from masks to what they leave
    of the model as it then is, which computes less than the model with masks (None: that)."""
    likelihood = likelihood_for(data.task, data.dim)
    with _cut(model, way.masks, data, device, left, reconstructor):
        asked = small(way.masks) if small is not None else None
        first, second, numbers = losses(model if asked is None else asked.to(device), examples, likelihood, device=device)
    scale = 1.0 if likelihood.probabilities or data.target_scale is None else data.target_scale[1]
    metrics = likelihood.metrics(float(first.sum()), float(second.sum()), float(numbers.sum()), scale)
    return Option(way.name, way.size, float(metrics["nll"]), second / numbers.mean())


@contextmanager
def _cut(
    model: nn.Module, masks: Masks, data: Data, device: Any, left: Masks | None, reconstructor: Reconstructor | None
) -> Iterator[None]:
    if reconstructor is not None:
        with reconstructor.trying(model, masks, left):
            yield
        return
    hold(model, as_masks(model, masks))
    try:
        with adapted(model, some(data.train, ADAPTED), device):
            yield
    finally:
        hold(model, None)


def _alike(one: Masks, other: Masks) -> bool:
    return all(torch.equal(mask, other[name]) for name, mask in one.items())
