"""Ways to a number of non-zeros: single weights by one threshold, and a part of what has to go as whole units."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from svdcompress.layers import Threshold, variational_layers
from svdcompress.pipeline._way import Way, Ways
from svdcompress.relevance import Masks
from svdcompress.search import CLOSE
from svdcompress.selection import count_nonzero

LOWEST, HIGHEST = -12.0, 30.0
"""The bounds of the search for a threshold. Where log alpha goes lower, it begins lower, too (see `_start`)."""

STEPS = 24
"""Bisection steps between these bounds: after these, a threshold is closer than any two weights are."""

SHARES = {"weights": 0.0, "units-25%": 0.25, "units-50%": 0.5, "units-100%": 1.0}
"""The ways if single weights count, with the share of what has to go that goes as whole units; the first is the usual way."""

HALVINGS = 12
"""Bisection steps in the search for the number of weights to keep that gives the requested non-zeros."""

MIXED = 9
"""The most mixtures of one share whose sizes are computed: the first two or three enclose the number of weights to keep, the
others halve what is between."""


class Weights(Ways):
    """Ways to a number of non-zeros: single weights by one threshold on all shares, and a part of what has to go as units."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.natural = float(self.found.kept + self.others)
        self.start = _start(self.model)

    def usual(self) -> Way:
        low, high = self.target - self.others, float(self.found.kept)
        asked, masks = self._lowered(low)
        if masks.kept >= self.found.kept:
            return Way("weights", masks, None, asked, free=True)
        found = Way("weights", masks, self._size(masks), asked)
        for _ in range(HALVINGS):  # biases of units that go leave room for more weights
            if (found.size or 0.0) > self.target * (1 - CLOSE / 4):
                break
            middle = (low + high) / 2
            asked, masks = self._lowered(middle)
            size = self._size(masks)
            low, high = (middle, high) if size <= self.target else (low, middle)
            if (found.size or 0.0) < size <= self.target:
                found = Way("weights", masks, size, asked)
        return found

    def others_than(self, usual: Way) -> Iterator[Way]:
        for name, share in SHARES.items():
            if share and (way := self._mixed(name, share, usual.size or 0.0)) is not None:
                yield way

    def again(self, stored: Mapping[str, Any]) -> Masks:
        count, asked = stored["count"], stored["asked"]
        return self.own(asked) if count is None else self._both(self.ranking.keeping(count).masks, self.own(asked))

    def _mixed(self, name: str, share: float, size: float) -> Way | None:
        """A mixture with at most as many non-zeros, once pruned, as the usual way (`size`); None if that is not met."""
        room, found = self.target - self.others, None
        low, high = -math.inf, math.inf  # the number of weights to keep is between these
        for step in range(MIXED):
            count = self.found.kept - share * (self.found.kept - room)
            units = self.ranking.keeping(count).masks
            asked, masks = self._lowered(room, units)
            now = self._size(masks)
            if now <= size and (found is None or now > (found.size or 0.0)):
                found = Way(name, masks, now, asked, count)
            if size * (1 - CLOSE / 4) <= now <= size:
                break
            low, high = (room, high) if now <= size else (low, room)
            if high - low <= 1:
                break
            # one weight more may be several non-zeros, or none, as units live or die: what is left over is only where to begin
            room = (low + high) / 2 if math.isfinite(high - low) else room + (size - now) * 2**step
        return found

    def _lowered(self, kept: float, units: Masks | None = None) -> tuple[Threshold | None, Masks]:
        """The highest threshold that keeps at most `kept` weights, and its masks; the recipe's own threshold if the units
        that stay have no more than that."""
        if units is not None and units.kept <= kept:
            return self.asked, units
        (low, steps), high = self.start, HIGHEST
        for _ in range(steps):
            middle = (low + high) / 2
            low, high = (middle, high) if self._both(units, self.own(middle)).kept <= kept else (low, middle)
        return low, self._both(units, self.own(low))

    def _size(self, masks: Masks) -> float:
        return count_nonzero(self.model, self.opened.inputs, masks, **self.pruning)


def _start(model: nn.Module) -> tuple[float, int]:
    """Where the search for a threshold begins, so that no weight has to stay, and its steps: one more each time that the range
    is doubled, so thresholds are as close as without."""
    low, steps, least = LOWEST, STEPS, _least(model)
    while low >= least:
        low, steps = 2 * low - HIGHEST, steps + 1
    return low, steps


@torch.no_grad()
def _least(model: nn.Module) -> float:
    """The least finite log alpha of a weight or a prior group. Units that are judged as one have none below those of their
    weights."""
    known = [layer.log_alpha(name) for _, layer in variational_layers(model) for name in {"weight", *layer.share}]
    return min((float(alpha[alpha.isfinite()].min()) for alpha in known if alpha.isfinite().any()), default=0.0)
