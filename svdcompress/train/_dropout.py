"""Dropout in further training: whether a network still bears it, and how its rates rise again if it does not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from svdcompress.batch import call
from svdcompress.convert import as_it_was
from svdcompress.layers import BernoulliDropout, GaussianDropout, variational_layers
from svdcompress.train._device import broadcast
from svdcompress.train._norms import norms
from svdcompress.train._state import mix, seed_everything
from svdcompress.train._work import Work

TIMES, ALONE, MORE = 2.0, 5.0, 0.1
"""If dropout costs a network more than TIMES the loss that it costs the dense one, and more than MORE, training would begin
with a broken network. A dense network that was trained with dropout hardly pays for it. If there is no dense one, the loss with
dropout has to be more than ALONE times the loss without."""

RISE, LEVELS = 2 / 3, 4
"""The share of the training in which rates rise, and the number of steps in which they do: a compiled network is compiled again
for each."""

BATCHES = 4
"""Batches on which losses are compared."""

THEN = {"off": "it is off", "rising": "its rates begin at 0 and rise to their own in two thirds of the training"}
ELSEWHERE = "What draws there has no rate that is known (as dropout layers have, and DropPath), so it can't be turned down"

_DRAWN = (BernoulliDropout, GaussianDropout)
_RATES: dict[type[nn.Module], str] = {
    **dict.fromkeys(_DRAWN, "p"),
    nn.modules.dropout._DropoutNd: "p",
    nn.MultiheadAttention: "dropout",
    nn.RNNBase: "dropout",
}
"""Attributes that hold a dropout rate, by the class of the module that reads them in each pass."""

_NAMES = ("drop_prob", "dropout_prob", "dropout_p", "dropout", "attention_dropout", "activation_dropout")
"""Attributes of modules from elsewhere that are a rate if they hold a float: of stochastic depth in timm and transformers
(DropPath), and of dropout in a function, as in transformers."""

_STOCHASTIC_DEPTH = "StochasticDepth"
"""The class of torchvision whose rate is `p`; a name, as torchvision may not be installed."""


class Rates:
    """The dropout rates of a model, which can be set to a share of themselves; as a context manager, they are restored."""

    def __init__(self, model: nn.Module) -> None:
        found = ((module, name) for module in model.modules() for name in _rates_of(module))
        self._own = [(module, name, rate) for module, name in found if (rate := float(getattr(module, name))) > 0]
        self._share = 1.0

    @property
    def any(self) -> bool:
        """Whether a module has a rate above 0."""
        return bool(self._own)

    def set(self, share: float) -> bool:
        """Give each module this share of its own rate; returns whether it had another one."""
        if not self._own or share == self._share:
            return False
        for module, name, rate in self._own:
            setattr(module, name, rate * share)
        self._share = share
        return True

    def __enter__(self) -> Rates:
        return self

    def __exit__(self, *_: object) -> None:
        self.set(1.0)


def _rates_of(module: nn.Module) -> set[str]:
    """The names of the attributes that hold a dropout rate of this module, not of those inside it."""
    names = {name for kind, name in _RATES.items() if isinstance(module, kind)}
    names |= {name for name in _NAMES if isinstance(vars(module).get(name), float)}
    return names | ({"p"} if type(module).__name__ == _STOCHASTIC_DEPTH else set())


def share_of_rates(how: str, done: float) -> float:
    """The share of their own rates that dropout layers have. how: "on", "off" or "rising". done: share of the training done."""
    if how == "rising":
        return min(1.0, int(LEVELS * done / RISE) / LEVELS)
    return 0.0 if how == "off" else 1.0


def settle_dropout(work: Work) -> tuple[str, tuple[str, bool] | None]:
    """How a fit that begins treats dropout ("on", "off" or "rising"), and what to tell the user and whether that is settled.

    With `dropout="auto"`, it is not "on" if the loss of training examples is far higher with dropout than without it. That is
    so for a network whose layers were fitted, without dropout, to what they gave before a cut: each leans on few inputs then,
    and steps from there would have to teach the network dropout again before anything else. It is "rising" if the network
    draws its dropout in predictions, too, and has to bear it; else "off".
    """
    asked, named = work.settings.dropout, f"{work.section}.dropout"
    layers, draws = Rates(work.model).any, any(isinstance(module, _DRAWN) for module in work.model.modules())
    if asked in ("off", "rising") and not layers:
        return asked, (f"{named}: {asked} changes nothing, as no module of the model has a dropout rate that is known", False)
    if asked == "off" and draws:
        return asked, (f"{named}: off does not prepare for the dropout that predictions draw; rising does", False)
    if asked != "auto":
        return asked, None
    try:
        found = _losses(work, work.model, ("none", "on"), layers)
        dense = None
        if found["on"] - found["none"] > MORE and work.reference is not None:
            dense = _losses(work, work.reference, ("none", "on"), layers)
        if not _far(found, "on", dense):
            return broadcast(("on", None))
        zero = _losses(work, work.model, ("zero",), layers)
    except Exception:  # from the user's model or data: training will meet it too, and explain it
        return broadcast(("on", None))
    line = f"{named}: the network's loss is {found['on']:.2g} with dropout and {found['none']:.2g} without"
    if dense is not None:
        line += f" (the dense network's: {dense['on']:.2g} and {dense['none']:.2g})"
    if _far(found | zero, "zero", dense):
        return broadcast(("on", (f"{line}, so training begins by unlearning. {ELSEWHERE}", False)))
    how = "rising" if draws else "off"
    return broadcast((how, (f"{line}, so {THEN[how]} (auto; --set {named}=on keeps it)", True)))


def _far(found: dict[str, float], which: str, dense: dict[str, float] | None) -> bool:
    """Whether dropout costs a network much, beside what it costs the dense one or, if that is unknown, the loss itself."""
    cost = found[which] - found["none"]
    usual = (ALONE - 1) * found["none"] if dense is None else TIMES * (dense["on"] - dense["none"])
    return cost > MORE and cost > usual


@torch.no_grad()
def _losses(work: Work, model: nn.Module, names: Sequence[str], layers: bool) -> dict[str, float]:
    """Mean losses of the same batches: in `eval()` ("none"), with all that draws but variational layers ("on"), and with that
    but dropout layers at rate 0 ("zero"). layers: whether there are any; one batch shows if something else draws."""
    size, order, losses = work.settings.batch_size, mix(work.seed, "dropout"), dict[str, float]()
    batches = work.examples.batches(size, shuffle=order, device=work.device)
    held = [batch for _, batch in zip(range(BATCHES if layers else 1), batches, strict=False)]
    place = next(model.parameters()).device
    try:
        with as_it_was(model.to(work.device), True), Rates(model) as rates, work.lower():
            for name in names:
                _prepare(model, name != "none")
                rates.set(1.0 if name == "on" else 0.0)
                seed_everything(work.seed, "dropout", name)
                losses[name] = sum(float(work.loss(call(model, x), y)) for x, y in held) / len(held)
    finally:
        model.to(place)
    return losses


def _prepare(model: nn.Module, draws: bool) -> None:
    model.train(draws)
    for layer in (*norms(model), *(layer for _, layer in variational_layers(model))):
        layer.eval()
