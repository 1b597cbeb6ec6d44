"""`recover.optimizer: auto`: its choice for each network, the note about it, and the training."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from svdcompress.errors import TrainingError
from svdcompress.evaluation import _magnitude
from svdcompress.evaluation._magnitude import recovery as magnitude_recovery
from svdcompress.pipeline import estimate, open_run, run
from svdcompress.pipeline._recovery import for_recovery, steady
from svdcompress.pipeline._trainer import Trainer
from svdcompress.recipe import load_recipe
from svdcompress.train import NotFinite

BY_SGD = [
    "recover.optimizer=sgd",
    "recover.lr=0.01",
    "recover.weight_decay=0.0005",
    "recover.schedule.warmup=5%",
    "recover.distill.weight=0.9",
    "recover.distill.temperature=3",
]
"""The equivalent settings by hand."""


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


@pytest.mark.parametrize("other", [["loss=mse"], ["loss=gaussian-nll"], ["data.unlabelled=true"], []])
def test_elsewhere_it_is_adam_with_the_settings_as_they_are(other):
    for model in (net, plain) if other else (plain,):
        recipe, said = settled(*other, "recover.lr=0.002", model=model)
        assert recipe.recover == load_recipe(None, [*other, "recover.optimizer=adam", "recover.lr=0.002"]).recover
        assert said is None


def test_nothing_is_said_where_nothing_recovers():
    assert settled("recover.epochs=0")[1] is None


@pytest.mark.parametrize(
    "setting",
    [
        "recover.lr=0.003",
        "recover.weight_decay=0.1",
        "recover.schedule.warmup=10%",
        "recover.distill.weight=0.5",
        "recover.distill.temperature=4",
        "recover.distill.layers=30",
        "recover.schedule.start=20%",
    ],
)
def test_what_is_set_stays_and_changes_no_optimizer(setting):
    """A run resumed with another learning rate, as after a loss that was not finite, keeps the state of its optimizer."""
    recipe, said = settled(setting)
    name = setting.partition("=")[0]
    assert recipe.recover == load_recipe(None, [*(part for part in BY_SGD if not part.startswith(name)), setting]).recover
    assert said is not None and (f"; {name} as set" in said) == any(part.startswith(name) for part in BY_SGD)
    both = settled("recover.lr=0.002", "recover.distill.weight=0.1")[1]
    assert both is not None and "SGD at 0.002" in both and "recover.lr and recover.distill.weight as set" in both


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_one_that_is_named_is_taken(optimizer):
    recipe = load_recipe(None, [f"recover.optimizer={optimizer}"])
    assert for_recovery(recipe, net()) == (recipe, None)


@pytest.mark.parametrize(
    ("setting", "rate"), [("recover.epochs=3", 5e-4), ("recover.lr=0.02", 5e-4), ("recover.lr=1e-5", 1e-5)]
)
def test_where_statistics_stay_adam_recovers_instead(setting, rate):
    asked = load_recipe(None, [setting, "recover.weight_decay=0.1"])
    found = steady(asked, for_recovery(asked, net())[0])
    wanted = ["recover.optimizer=adam", f"recover.lr={rate}", "recover.distill.weight=0.9", "recover.distill.temperature=3"]
    assert found == load_recipe(None, [setting, "recover.weight_decay=0.1", *wanted]).recover
    for other, model in ((["recover.optimizer=sgd"], net), ([], plain), (["loss=mse"], net)):
        asked = load_recipe(None, other)
        assert steady(asked, for_recovery(asked, model())[0]) is None


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
    assert one.recipe.recover.optimizer == "auto"  # a later run chooses again
    assert one.recovery == other.recovery == other.recipe.recover
    assert magnitude_recovery(one) == one.recovery  # the control in an evaluation uses the same
    said = [json.loads((file.parent / "report.json").read_text())["notes"] for file in files]
    assert sum("recover.optimizer auto: SGD" in note for note in said[0]) == 1
    assert not any("recover.optimizer" in note for note in said[1])


@pytest.mark.parametrize("setting", ["recover.optimizer=auto", "recover.optimizer=adam", "recover.epochs=0"])
def test_a_plan_tells_how_the_network_will_recover(setting):
    recipe = load_recipe(None, [*SHORT, setting])
    recipe.model.name, recipe.data.name = f"{__file__}:net", f"{__file__}:images"
    told = [line for line in estimate(recipe).notes if line.startswith("recover.optimizer auto: SGD")]
    assert len(told) == (setting == "recover.optimizer=auto")


def test_a_plan_tells_that_units_are_judged_for_a_goal_of_shapes():
    for goal, told in (("search.goal='macs=2x'", True), ("search.goal='nonzero=2x'", False)):
        recipe = load_recipe(None, [*SHORT, goal, "convert.share=weight"])
        recipe.model.name, recipe.data.name = f"{__file__}:net", f"{__file__}:images"
        assert any("whole units are judged" in line for line in estimate(recipe).notes) == told


@pytest.mark.parametrize(
    ("more", "each_step"), [((), False), (("data.augment=[{crop: 1}]",), True), (("recover.epochs=1",), False)]
)
def test_a_plan_takes_the_time_of_the_teacher_into_account(monkeypatch, more, each_step):
    asked = []

    def noted(model, examples, loss, settings, device, *, teacher=None, noise=True):
        asked.append((settings.optimizer, teacher is not None))
        return 1.0

    monkeypatch.setattr("svdcompress.pipeline._estimate._epoch_seconds", noted)
    monkeypatch.setattr("svdcompress.pipeline._estimate._forward_seconds", lambda model, data, recipe, device: 0.01)

    def planned(*settings):
        asked.clear()
        recipe = load_recipe(None, [*SHORT, "recover.epochs=4", *settings])
        recipe.model.name, recipe.data.name = f"{__file__}:net", f"{__file__}:images"
        found = estimate(recipe)
        assert [taught for optimizer, taught in asked if optimizer == "sgd"][-1:] == ([each_step] if settings == more else [])
        return found

    found, alone = planned(*more), planned(*more, "recover.optimizer=adam")
    once = 0.01 * found.examples["train"]
    assert found.seconds["recover"] == alone.seconds["recover"]
    assert found.seconds["rest"] - alone.seconds["rest"] == pytest.approx(0 if each_step else once)


def test_kept_statistics_that_end_in_a_loss_that_is_not_finite_give_way_to_those_of_batches(tmp_path, monkeypatch):
    whole, asked = Trainer.fit, []

    def fit(self, model, stage, settings, **more):
        if stage == "recover":
            asked.append((settings.norms, more["steady"], more["state"].name))
            if settings.norms != "batch":
                with torch.no_grad():
                    next(iter(model.parameters())).fill_(torch.nan)
                raise NotFinite("recover: the loss is nan", "recover", where="at step 3 (epoch 1)", keeps_norms=kept)
        return whole(self, model, stage, settings, **more)

    monkeypatch.setattr(Trainer, "fit", fit)
    kept = True
    results = ran(tmp_path / "auto")
    (line,) = (line for line in results["warnings"] if "the loss" in line)
    assert line.startswith("recover: the loss was not finite at step 3 (epoch 1), with the running statistics of batch norm")
    assert "So recovery began again with those of batches (--set recover.norms=batch does at once)" in line
    assert [(norms, file) for norms, _, file in asked] == [("auto", "recover.pt"), ("batch", "recover-batch.pt")]
    assert all(steady.optimizer == "adam" for _, steady, _ in asked)
    ran(tmp_path / "batch", "recover.norms=batch")
    one, other = (open_run(tmp_path / name, trust_code=True).model.state_dict() for name in ("auto", "batch"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(TrainingError, match="recover: the loss is"):  # the user's own choice
        ran(tmp_path / "keep", "recover.norms=keep")
    kept = False
    with pytest.raises(TrainingError, match="recover: the loss is"):  # statistics have nothing to do with it
        ran(tmp_path / "else")


def test_a_run_that_keeps_statistics_recovers_by_adam_and_says_so(tmp_path, monkeypatch):
    results = ran(tmp_path / "auto", "recover.norms=keep")
    (line,) = (line for line in results["notes"] if line.startswith("recover.norms:"))
    assert "Adam at 0.0005 trains in place of SGD" in line
    assert results["history"][-1]["lr"] < 5e-4
    opened, fits = open_run(tmp_path / "auto", trust_code=True), {}
    monkeypatch.setattr(_magnitude, "dense_fit", lambda *given, **more: fits.update({given[3]: more.get("steady")}))
    _magnitude._made(opened, "cpu", None)  # the control recovers alike
    assert fits["train"] is None and fits["recover"] == opened.steady and opened.steady.optimizer == "adam"
    hand = ["recover.optimizer=adam", "recover.distill.weight=0.9", "recover.distill.temperature=3"]
    ran(tmp_path / "hand", "recover.norms=keep", *hand)
    one, other = (open_run(tmp_path / name, trust_code=True).model.state_dict() for name in ("auto", "hand"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_outputs_that_are_not_finite_after_the_last_step_are_worse(tmp_path):
    """Too few steps for a loss to show it: the weights are still finite."""
    results = ran(tmp_path / "out", "recover.lr=1e38")
    line, _ = (line for line in results["warnings"] if "made the network worse" in line)
    assert "2 epochs of recovery" in line and "so it was restored" in line and "1e+37 (it was 1e+38)" in line


def test_the_advice_is_about_the_rate_that_trained(tmp_path, monkeypatch):
    monkeypatch.setattr("svdcompress.pipeline._recover.surely_worse", lambda before, after: True)
    results = ran(tmp_path / "out", "recover.norms=keep")
    lines = [line for line in results["warnings"] if "made the network worse" in line]
    assert len(lines) == 2 and "at a learning rate of 5e-05 (it was 0.0005)" in lines[0]
    assert lines[1].endswith("--set recover.lr=5e-06")
    *_, first, second = (row["lr"] for row in results["history"] if row["stage"] == "recover" and row["epoch"] == 2)
    assert second == pytest.approx(first / 10)  # of Adam's rate, as Adam trained in place of SGD
