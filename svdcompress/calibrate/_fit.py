"""The scale of a posterior's variances (or its prior precision) and the temperature, fitted together by validation NLL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.calibrate._draws import Draws, draws_of
from svdcompress.calibrate._search import outward, refined
from svdcompress.calibrate._tempering import (
    Table,
    cross_validated,
    fit_knob,
    folds_of,
    nll_rows,
    penalty,
    table,
)
from svdcompress.errors import ModelError
from svdcompress.layers import variational_layers
from svdcompress.likelihoods import Likelihood
from svdcompress.sources import Examples

SCALES = tuple(1.0 * step for step in range(-3, 10))
"""Log factors on variances that are tried: 1/20 to 8,000, and up to `FARTHER` more at an end that is the best."""

FARTHER = 12
"""The most settings beyond an end of a grid."""

SPREAD = 3.0
"""Prior standard deviation of the log factor: the prior decides only where the validation data do not."""

REFINED, NEAR = 4, 0.05
"""The most settings that are tried after the grid, and the step below which the search ends: 5% of a variance has no visible
effect."""

FAR, FAR_EACH = 30.0, 0.05
"""A setting is hopeless if it is worse than the best by FAR nats plus FAR_EACH nats for each target."""


@dataclass(frozen=True)
class Fitted:
    """A posterior and a tempering that belong together.

    setting: log factor on the variances, or log prior precision. log_knob: log temperature, or log noise variance.
    nll: in nats per target, on the validation data that both were fitted on. rows: (R,) NLL of each target by cross-validation;
    `judged` is its mean. owner: (R,) the example that each target belongs to.
    """

    setting: float
    log_knob: float
    nll: float
    rows: Tensor = field(repr=False)
    owner: Tensor = field(repr=False)

    @property
    def judged(self) -> float:
        """Mean NLL on validation data that setting and tempering were not fitted on."""
        return float(self.rows.mean())


def fit_setting(
    draw: Callable[[float], Draws],
    likelihood: Likelihood,
    grid: Sequence[float],
    *,
    start: float = 0.0,
    beforehand: Callable[[float], float] = lambda setting: 0.0,
    temperature: bool = True,
) -> Fitted:
    """The setting and the temperature with the lowest validation NLL, judged by 5-fold cross-validation.

    draw: returns draws for a setting, from the same noise in each call, so that the NLL is a smooth function of the setting.
    grid: ascending; it is searched from `start` outward until settings are hopeless (`FAR`), and beyond an end that is the best
    (`FARTHER`). beforehand: the prior's cost of a setting, in nats. temperature: False keeps it at 1 (a regression's noise is
    fitted in any case).
    """
    search = _Search(draw, likelihood, beforehand, temperature or likelihood.constant_noise)
    search.look(start)
    grid = outward(search.look, grid, start, FAR + FAR_EACH * len(search.last), farther=FARTHER)
    costs = {setting: search.look(setting) for setting in grid}
    tables = [search.table(setting) for setting in grid]
    extras = [found.extra + beforehand(setting) for setting, found in zip(grid, tables, strict=True)]
    rows = cross_validated(torch.cat([found.rows for found in tables]), torch.cat(extras), folds_of(search.last))
    best = min(costs, key=costs.__getitem__)
    if len(grid) > 1:
        at = list(grid).index(best)
        around = sorted({grid[max(at - 1, 0)], best, grid[min(at + 1, len(grid) - 1)]})
        best = refined(search.look, around, REFINED, NEAR)
    return Fitted(best, search.knobs[best], search.nlls[best], rows, search.last.owner)


class _Search:
    """The results for each setting so far."""

    def __init__(
        self,
        draw: Callable[[float], Draws],
        likelihood: Likelihood,
        beforehand: Callable[[float], float],
        tempering: bool,
    ) -> None:
        self.draw, self.likelihood, self.beforehand, self.tempering = draw, likelihood, beforehand, tempering
        self.costs: dict[float, float] = {}
        self.knobs: dict[float, float] = {}
        self.nlls: dict[float, float] = {}
        self.tables: dict[float, Table] = {}
        self.last: Draws

    def look(self, setting: float) -> float:
        """The cost of a setting: the sum of the validation NLL with the best knob, and the prior's cost of setting and knob."""
        if setting in self.costs:
            return self.costs[setting]
        self.last = draws = self.draw(setting)
        knob, cost = 0.0, 0.0
        if self.tempering:
            knob, nll = fit_knob(self.likelihood, draws)
            cost = penalty(self.likelihood, knob)
            self.tables[setting] = table(self.likelihood, draws)
        else:
            rows = nll_rows(self.likelihood, draws, 0.0)
            nll = float(rows.mean())
            self.tables[setting] = Table(rows.unsqueeze(0), torch.zeros(1, dtype=torch.float64))
        self.knobs[setting], self.nlls[setting] = knob, nll
        self.costs[setting] = nll * len(draws) + cost + self.beforehand(setting)
        return self.costs[setting]

    def table(self, setting: float) -> Table:
        """The NLL of each target at a setting, for each knob; forgotten after this call."""
        return self.tables.pop(setting)


def with_scales(model: nn.Module, base: dict[str, Tensor], scales: dict[str, float]) -> nn.Module:
    """Set a model's variances to `base` times `scales` (both given as logs, by layer), in place, and return the model.

    Raises ModelError if a layer's posterior does not have a variance for each weight.
    """
    for name, layer in variational_layers(model):
        if layer.posterior != "independent":
            raise ModelError(
                f"{name}: its posterior is {layer.posterior.name!r}; give each weight a variance of its own first: "
                'svdcompress.layers.set_posterior(model, "independent")'
            )
        with torch.no_grad():
            layer.log_sigma2.copy_(base[name] + scales[name])
    return model


def log_variances(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the log variances by layer."""
    return {name: layer.log_sigma2.detach().clone() for name, layer in variational_layers(model)}


def fit_scale(
    model: nn.Module,
    examples: Examples,
    likelihood: Likelihood,
    samples: int,
    *,
    by_layer: bool = False,
    temperature: bool = True,
    seed: int = 0,
    device: Any = "cpu",
) -> tuple[dict[str, float], Fitted]:
    """The scale of the variances, one for all layers (by_layer: then one for each, layer by layer), fitted jointly with the
    temperature by the validation NLL of the Monte-Carlo predictive distribution: the tempered posteriors of Wenzel et al. 2020
    (arXiv 2002.02405, sec. 2) with the temperature of lowest validation loss.

    model: in `eval()` with its masks frozen. Returns log scales by layer, and the last fit; the model is left as it was.
    """
    base = log_variances(model)
    scales = dict.fromkeys(base, 0.0)

    def draw(change: dict[str, float]) -> Draws:
        with_scales(model, base, {name: scales[name] + change.get(name, 0.0) for name in base})
        try:
            return draws_of(model, examples, likelihood, samples, seed, device)
        finally:
            with_scales(model, base, dict.fromkeys(base, 0.0))

    def cost(log_scale: float) -> float:
        return 0.5 * (log_scale / SPREAD) ** 2

    fitted = fit_setting(lambda s: draw(dict.fromkeys(base, s)), likelihood, SCALES, beforehand=cost, temperature=temperature)
    scales = dict.fromkeys(base, fitted.setting)
    if by_layer and len(base) > 1:
        for name in base:
            grid = (-2.0, -1.0, 0.0, 1.0, 2.0)
            one = fit_setting(lambda s, name=name: draw({name: s}), likelihood, grid, beforehand=cost, temperature=temperature)
            scales[name] += one.setting
            fitted = one
    return scales, fitted
