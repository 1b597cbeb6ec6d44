"""The dense network pruned by magnitude to as many weights as the sparse one has, with as many epochs of training."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.nn.utils import prune

from svdcompress.errors import ModelError
from svdcompress.evaluation._cache import is_kept, kept
from svdcompress.evaluation._members import dense_fit
from svdcompress.pipeline import OpenRun
from svdcompress.recipe import RecoverSection
from svdcompress.train import Bars

NAME = "magnitude"
RAMP = 0.5
"""The share of the fine-tuning epochs during which weights are pruned."""


def about(opened: OpenRun) -> str:
    """How the control was made, in one line."""
    train, recover = opened.recipe.train.epochs, recovery(opened).epochs
    return (
        f"gradual global magnitude pruning of the dense network to {_kept_weights(opened):,} weights (Zhu & Gupta 2018), in "
        f"{train} + {recover} epochs with the recipe's sections train and recover, but without the KL and with a single "
        "learning rate schedule"
    )


def magnitude_pruned(opened: OpenRun, *, device: str = "auto", bars: Bars | None = None) -> nn.Module:
    """A control of the same size, trained as long: gradual global magnitude pruning of the layers that the run converted.

    As many of their weights are left as in the sparse network; no unit is removed. Training starts from the run's dense weights
    and follows the recipe's sections `train` and `recover`, without the KL. In the first half of `train`, the smallest weights
    are pruned after each epoch; their share rises as 1 - (1 - t)^3 (Zhu & Gupta 2018). The control is kept in RUN/baselines.

    Raises ModelError if the run's layers are not those of the dense model (weights that conversion computed).
    """
    make = lambda: _made(opened, device, bars)  # noqa: E731
    return kept(opened.folder, NAME, _settings(opened), lambda: copy.deepcopy(opened.dense), make)


def is_made(opened: OpenRun) -> bool:
    """Whether the control is in the run's folder already."""
    return is_kept(opened.folder, NAME, _settings(opened))


def _made(opened: OpenRun, device: str, bars: Bars | None) -> nn.Module:
    model, recipe = copy.deepcopy(opened.dense), opened.recipe
    layers = _layers(model, [row["name"] for row in _rows(opened)])
    total, keep = sum(layer.weight.numel() for layer in layers), _kept_weights(opened)
    smallest(layers, total)  # makes the masks, without pruning a weight yet

    def thin_out(row: dict[str, Any]) -> None:
        smallest(layers, left_after(row["epoch"], RAMP * recipe.train.epochs, total, keep))

    for stage, section in (("train", recipe.train), ("recover", recovery(opened))):
        settings = section.model_copy(update={"keep": "last"})  # the best epoch may be one before pruning
        if settings.epochs:
            teacher = copy.deepcopy(opened.dense) if settings.distill.wanted else None
            more: dict[str, Any] = {"teacher": teacher, "distill": settings.distill, "reference": opened.dense}
            more |= {"on_epoch": thin_out} if stage == "train" else {"steady": opened.steady}
            dense_fit(opened, model, settings, stage, recipe.seed, device, bars, **more)
        smallest(layers, keep)
    for layer in layers:
        prune.remove(layer, "weight")
    return model


def recovery(opened: OpenRun) -> RecoverSection:
    """The section `recover` of a run, with as many epochs as its small model had: a search may let its best trial recover
    longer."""
    recover, search = opened.recovery, opened.results.get("search") or {}
    chosen = next((trial for trial in search.get("trials", ()) if trial["number"] == search.get("chosen")), {})
    if chosen.get("continues") is None:
        return recover
    more = sum(row["stage"] == f"trial {chosen['number']}" for row in opened.results.get("history") or ())
    return recover.model_copy(update={"epochs": recover.epochs + more})


def left_after(epoch: float, end: float, total: int, keep: int) -> int:
    """How many of `total` weights are left after `epoch` epochs: `keep` from epoch `end` on (Zhu & Gupta 2018, eq. 1)."""
    left = (1 - min(epoch / end, 1.0)) ** 3 if end > 0 else 0.0
    return keep + round((total - keep) * left)


def smallest(layers: list[Any], keep: int) -> None:
    """Mask all but the `keep` largest of the layers' weights; weights that are masked already stay masked."""
    pairs = [(layer, "weight") for layer in layers]
    masks = [getattr(layer, "weight_mask", None) for layer in layers]
    left = sum(layer.weight.numel() if mask is None else int(mask.sum()) for layer, mask in zip(layers, masks, strict=True))
    prune.global_unstructured(pairs, pruning_method=prune.L1Unstructured, amount=max(0, left - keep))


def _kept_weights(opened: OpenRun) -> int:
    return sum(row["weights"] for row in _rows(opened))


def _rows(opened: OpenRun) -> list[dict[str, Any]]:
    rows = opened.results.get("layers")
    if not rows:
        raise ModelError("report.json does not say how many weights of each layer are left")
    return rows


def _layers(model: nn.Module, names: list[str]) -> list[Any]:
    """The layers with these names; only one of those that share a weight."""
    found: dict[int, Any] = {}
    for name in names:
        try:
            layer = model.get_submodule(name)
        except AttributeError as error:
            raise ModelError(f"the dense model has no layer {name}, which the run converted") from error
        weight = layer._parameters.get("weight")
        if weight is None:
            raise ModelError(f"the weight of {name} is computed in each forward pass, so it cannot be pruned as it is")
        found.setdefault(id(weight), layer)
    return list(found.values())


def _settings(opened: OpenRun) -> dict[str, Any]:
    recipe = opened.recipe
    parts = {name: getattr(recipe, name).model_dump(mode="json") for name in ("model", "data", "loss", "train")}
    return {
        **parts,
        "recover": recovery(opened).model_dump(mode="json"),
        "seed": recipe.seed,
        "keep": _kept_weights(opened),
        "dense": opened.results.get("dense", {}).get("metrics"),
    }
