"""`recover.optimizer: auto`: what it is for which network, said, and trained by."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from svdcompress.pipeline import estimate, open_run, run
from svdcompress.pipeline._recovery import for_recovery
from svdcompress.recipe import load_recipe

BY_SGD = [
    "recover.optimizer=sgd",
    "recover.lr=0.01",
    "recover.weight_decay=0.0005",
    "recover.schedule.warmup=5%",
    "recover.distill.weight=0.9",
    "recover.distill.temperature=3",
]
"""What a user would set by hand."""


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))


def plain() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))


def settled(*overrides, model=net):
    return for_recovery(load_recipe(None, list(overrides)), model())


def test_a_classifier_with_batch_normalisation_recovers_by_sgd_and_the_dense_models_answers():
    recipe, said = settled("recover.epochs=7", "recover.batch_size=32")
    assert recipe.recover == load_recipe(None, [*BY_SGD, "recover.epochs=7", "recover.batch_size=32"]).recover
    assert said is not None and "SGD at 0.01" in said and "--set recover.optimizer=adam" in said
    assert recipe.train == load_recipe(None, []).train


@pytest.mark.parametrize("other", [["loss=mse"], ["loss=gaussian-nll"], ["recover.epochs=0"]])
def test_elsewhere_it_is_adam_with_the_settings_as_they_are(other):
    for found in (settled(*other), settled(*other, model=plain), settled(model=plain)):
        recipe, said = found
        assert (recipe.recover.optimizer, recipe.recover.lr, recipe.recover.distill.weight) == ("adam", 5e-4, 0.0)
        assert said is None


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("recover.lr=0.003", "as recover.lr is set"),
        ("recover.weight_decay=0.1", "as recover.weight_decay is set"),
        ("recover.distill.weight=0.5", "as recover.distill.weight is set"),
        ("recover.distill.temperature=4", "as recover.distill.temperature is set"),
    ],
)
def test_an_optimizer_somebody_has_thought_of_stays_and_that_is_told(setting, told):
    recipe, said = settled(setting)
    assert recipe.recover == load_recipe(None, [setting, "recover.optimizer=adam"]).recover
    assert said is not None and told in said
    both = settled("recover.lr=0.002", "recover.weight_decay=0.1")[1]
    assert both is not None and "as recover.lr and recover.weight_decay are set" in both
    assert settled(setting, model=plain)[1] is None


def test_a_schedule_and_layers_as_targets_stay():
    found = settled("recover.schedule.warmup=20%", "recover.distill.layers=30")[0].recover
    wanted = [part for part in BY_SGD if "warmup" not in part]
    assert found == load_recipe(None, [*wanted, "recover.schedule.warmup=20%", "recover.distill.layers=30"]).recover


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_one_that_is_named_is_taken(optimizer):
    recipe = load_recipe(None, [f"recover.optimizer={optimizer}"])
    assert for_recovery(recipe, net()) == (recipe, None)


def images() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.rand(120, 1, 4, 4)
    return x, (x.mean((1, 2, 3)) > 0.5).long()


SHORT = ["dense.epochs=1", "train.epochs=1", "recover.epochs=2", "uncertainty.samples=0", "export.onnx=false"]


def ran(folder, *overrides):
    recipe = load_recipe(None, [*SHORT, *overrides])
    recipe = recipe.model_copy(update={"out": str(folder)})
    recipe.model.name, recipe.data.name = f"{__file__}:net", f"{__file__}:images"
    return run(recipe, quiet=True)


def test_a_run_trains_as_with_the_settings_by_hand_and_says_so(tmp_path):
    ran(tmp_path / "auto")
    ran(tmp_path / "hand", *BY_SGD)
    files = [tmp_path / name / "model.safetensors" for name in ("auto", "hand")]
    one, other = (open_run(file.parent, trust_code=True) for file in files)
    for (name, tensor), (_, wanted) in zip(one.model.state_dict().items(), other.model.state_dict().items(), strict=True):
        assert torch.equal(tensor, wanted), name
    assert one.recipe.recover.optimizer == "auto"  # run again, it is settled again
    assert one.recovery == other.recovery == other.recipe.recover
    said = [json.loads((file.parent / "report.json").read_text())["notes"] for file in files]
    assert sum("recover.optimizer auto: SGD" in note for note in said[0]) == 1
    assert not any("recover.optimizer" in note for note in said[1])


def test_a_plan_takes_the_time_of_the_teacher_into_account(monkeypatch):
    asked = []

    def noted(model, examples, loss, settings, device, *, teacher=None, noise=True):
        asked.append((settings.optimizer, teacher is not None))
        return 1.0

    monkeypatch.setattr("svdcompress.pipeline._estimate._epoch_seconds", noted)
    recipe = load_recipe(None, SHORT)
    recipe.model.name, recipe.data.name = f"{__file__}:net", f"{__file__}:images"
    estimate(recipe)
    assert ("sgd", True) in asked
