"""Dense networks of other seeds, by the run's own recipe: the members of a deep ensemble."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from svdcompress.batch import to_device
from svdcompress.evaluation._cache import is_kept, kept
from svdcompress.likelihoods import make_loss
from svdcompress.pipeline import OpenRun, class_weights
from svdcompress.recipe import Training
from svdcompress.sources import arrives_trained, example_inputs
from svdcompress.train import Bars, evaluate, fit, seed_everything

STEP = 1000
"""The distance between the seeds of two members, so that the next run's seed is not one of them."""


def ensemble_members(
    opened: OpenRun,
    members: int,
    *,
    device: str = "auto",
    bars: Bars | None = None,
    say: Callable[[str], None] = lambda line: None,
    note: Callable[[str], None] = lambda line: None,
) -> list[nn.Module]:
    """Dense networks for a deep ensemble (Lakshminarayanan et al. 2017): the run's own and others that are trained as it was.

    Each has its own initial weights and its own order of the data; those trained here are kept in RUN/baselines. If the run's
    dense weights came from a file or with the model, the run's own network is not a member: all are trained here by the
    recipe's section `dense`, and a note says so.

    bars, say: progress. note: called with what a reader of the figures has to know. Raises what a run's training raises.
    """
    recipe, dense = opened.recipe, opened.dense
    own = not recipe.weights.file and not (
        arrives_trained(recipe.model, dense) if recipe.weights.trained is None else recipe.weights.trained
    )
    found = [dense] if own else []
    if not own:
        note(
            "deep ensemble: the run's dense weights were given, so the run's own network is not a member; all members are "
            f"trained with the recipe's section dense ({recipe.dense.epochs} epochs)"
        )
    for number in range(len(found), members):
        seed = (recipe.seed + STEP * (number + (not own))) % 2**32
        settings = _settings(opened, "dense", seed)
        name = f"member-{seed}"
        if not is_kept(opened.folder, name, settings):
            say(f"deep ensemble: training member {number + 1} of {members}, {recipe.dense.epochs} epochs")
        make = lambda seed=seed: _trained(opened, seed, device, bars)  # noqa: E731
        found.append(kept(opened.folder, name, settings, opened.fresh, make))
    if _same_start(opened, found[-1]):
        note(
            "deep ensemble: the model's factory gives the same weights whatever the seed (does it call torch.manual_seed?); "
            "the members differ only in the order of the data, and will agree more than those of a deep ensemble should"
        )
    return found


def _trained(opened: OpenRun, seed: int, device: str, bars: Bars | None) -> nn.Module:
    seed_everything(seed, "model")
    model = opened.fresh()
    return dense_fit(opened, model, opened.recipe.dense, "dense", seed, device, bars)


def dense_fit(
    opened: OpenRun, model: nn.Module, settings: Training, stage: str, seed: int, device: str, bars: Bars | None, **more: Any
) -> nn.Module:
    """Train a dense model in place by a section of the recipe, without the KL; more: further arguments of `fit`."""
    recipe, data, loss = opened.recipe, opened.data, opened.loss
    place = next(opened.dense.parameters()).device  # an evaluation may have moved it
    weights = class_weights(loss, data, opened.dense, to_device(example_inputs(data.train, 2), place))
    fit(
        model,
        data.train,
        make_loss(loss, class_weights=weights, dim=data.dim),
        settings,
        stage=stage,
        task=recipe.task,
        dim=data.dim,
        validate=lambda model: evaluate(
            model, data.validation, data.task, device=next(model.parameters()).device, scale=data.target_scale, dim=data.dim
        ),
        seed=seed,
        device=device,
        bars=bars,
        **more,
    )
    return model.cpu().eval()


def _settings(opened: OpenRun, stage: str, seed: int) -> dict[str, Any]:
    """Everything that a trained baseline depends on."""
    recipe = opened.recipe
    parts = {name: getattr(recipe, name).model_dump(mode="json") for name in ("model", "data", "loss", stage)}
    return {**parts, "stage": stage, "seed": seed}


def _same_start(opened: OpenRun, model: nn.Module) -> bool:
    """Whether two seeds give the same initial weights."""
    starts = []
    for seed in (1, 2):
        seed_everything(seed, "model")
        starts.append(opened.fresh().state_dict())
    return any(True for _ in model.parameters()) and all(
        bool((starts[0][name] == value).all()) for name, value in starts[1].items()
    )
