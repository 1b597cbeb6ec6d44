"""Chooses a trial's masks for the requested size: by the usual way, or by a mixture that loses less before training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
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
from svdcompress.pipeline._listening import Listening
from svdcompress.pipeline._measure import Measure
from svdcompress.pipeline._reconstruct import Reconstructor
from svdcompress.pipeline._some import some
from svdcompress.pipeline._way import Way, Ways
from svdcompress.pipeline._ways import ways_for
from svdcompress.relevance import Masks, as_masks, hold
from svdcompress.search import CLOSE, Option, best_option, record
from svdcompress.selection import Selection, limits_of, look_at
from svdcompress.sources import Data
from svdcompress.train import computing, is_right, losses, resolved_precision

EXAMPLES = 5000
"""The most training examples that mixtures are compared on."""

FEW, SHARE = 1000, 0.1
"""If a trial cools for only a few epochs, mixtures are compared on this share of the examples that those epochs see, but on
FEW at least. With more, a large model would need as long for judging each way as for the cooling."""


MANY, FIRST, BEST = 4, 0.25, 3
"""More candidates than MANY are first compared on this share of the examples; then the best few and the usual way on all."""

LONG = 10**12
"""Multiply-accumulates of a pass over the examples, half a minute on one core, above which a CPU prunes each way first."""

ADAPTED = 1000
"""Training examples that the normalization statistics of each candidate are estimated from."""


def compared_on(examples: int, epochs: int) -> int:
    """The number of training examples that mixtures are compared on, out of `examples`. epochs: of a trial's cooling."""
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
    """Masks that bring a cooled posterior to a size: single weights go by one threshold on all shares, units by their rank.

    If the size follows the shapes alone, no single weight of a remaining unit is masked. With `search.mixture: auto`, mixtures
    (see `Ways`) are compared with the usual way without training, and one is taken only if it is surely better. target: the
    size to reach, in `measure`. stored: `Selection.way` of an earlier choice, whose masks are made again without a new choice.
    reconstructor: as for `chosen`.
    """
    model = cooled.model
    to_size = ways_for(measure)(context, opened, dense, model, measure, target, cooled.masks, by_outputs=cooled.unpressed)
    if stored is not None:
        asked, masks = stored["asked"], to_size.again(stored)
        way, mixture = {name: stored[name] for name in ("way", "asked", "count")}, stored.get("mixture")
    else:
        taken, mixture = chosen_for(context, opened.data, to_size, reconstructor)
        asked, masks, way = taken.asked, taken.masks, taken.stored()
    curve = []
    if isinstance(asked, float):
        metrics = look_at(model, masks, dense.trainer.validate)
        curve = [{"threshold": asked, **metrics, "nonzero": float(masks.kept + to_size.others)}]
    natural = to_size.natural if cooled.natural is None else cooled.natural
    found = Selection(masks, asked, limits_of(model, asked), curve, target, natural)
    return replace(found, way={**way, "mixture": mixture})


def chosen_for(
    context: Context, data: Data, to_size: Ways, reconstructor: Reconstructor | None = None
) -> tuple[Way, dict[str, Any] | None]:
    """Like `chosen`, with the settings and the examples of a search's trial."""
    recipe, device = context.recipe, context.place.device
    count = compared_on(len(data.train), epochs_of(recipe.train, COOLING_EPOCHS))
    precision = resolved_precision(recipe.recover.precision, device)
    if precision != "no" and not is_right(to_size.model, to_size.opened.inputs, precision, device):
        precision = "no"  # recovery says so, and stops
    return chosen(to_size, data, recipe.search.mixture, device, count, reconstructor, precision)


def chosen(
    to_size: Ways,
    data: Data,
    setting: str,
    device: Any,
    count: int = EXAMPLES,
    reconstructor: Reconstructor | None = None,
    precision: str = "no",
) -> tuple[Way, dict[str, Any] | None]:
    """The way to take, and the record of the choice (None if there was none to make). count: examples to compare ways on.
    reconstructor: fits the remaining weights to each cut; None: they stay as they are. precision: of the passes in which ways
    are compared: that of the training which follows is enough, as all of them are rounded alike."""
    usual = to_size.usual()
    if setting == "off" or usual.free:
        return usual, None
    found = {usual.name: usual}
    for way in to_size.others_than(usual):
        if not any(_alike(way.masks, known.masks) for known in found.values()):
            found[way.name] = way
    if len(found) == 1:
        return usual, None
    reaching = {name: way for name, way in found.items() if way.size is not None and way.size <= to_size.target * (1 + CLOSE)}
    missed = usual.size is not None and bool(reaching) and usual.name not in reaching  # the usual way cannot get there
    if missed:
        found = {usual.name: usual, **reaching}
    train = data.train if reconstructor is None else reconstructor.others(data.train)  # what layers were fitted to looks better
    examples = some(train, count)
    each = macs_of(to_size.model, to_size.opened.inputs) if torch.device(device).type == "cpu" else 0

    def judged(way: Way, examples: Any) -> Option:
        check = partial(to_size.context.check, "while choosing what to remove")
        check()  # pruning or reconstruction comes first
        examples = Listening(examples, check)
        small = to_size.small if each * len(examples) > LONG else None
        with there(device, to_size.model):  # only here: pruning and export, for sizes, have their inputs on the CPU
            return option(to_size.model, way, examples, data, device, to_size.left, reconstructor, small, precision)

    if len(found) > MANY:
        few = some(train, round(FIRST * count))
        first = {name: judged(way, few).nll for name, way in found.items()}
        order = sorted(
            first, key=lambda name: first[name] if math.isfinite(first[name]) else math.inf
        )  # stable: ties keep theirs
        leading = [usual.name, *[name for name in order if name != usual.name][:BEST]]
        found = {name: way for name, way in found.items() if name in leading}
    options = {name: judged(way, examples) for name, way in found.items()}

    def best() -> str:
        return best_option([one for name, one in options.items() if not (missed and name == usual.name)]).name

    while found[(name := best())].size is None:  # only a way that would be taken is measured
        if (fitted := to_size.fitted(found[name], usual)) is None:
            del options[name]
            continue
        found[name], options[name] = fitted, judged(fitted, examples)
    return found[name], record([*options.values()], len(examples), name)


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
    precision: str = "no",
) -> Option:
    """What a way loses on examples, untrained: reconstructed, or else with new normalization statistics (after reconstruction
    the old ones still fit, as outputs are as before). model: on `device`. left: the masks of what was left before. small: maps
    masks to the pruned model, which computes less than the masked one (None: the masked one is used). precision: of the passes
    over the examples."""
    likelihood = likelihood_for(data.task, data.dim)
    with _cut(model, way.masks, data, device, left, reconstructor):
        asked = small(way.masks) if small is not None else None
        judged = model if asked is None else asked.to(device)
        with computing(precision, device, [judged]):
            first, second, numbers = losses(judged, examples, likelihood, device=device)
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
