"""What a user sets of a recovery stays under `recover.optimizer: auto`, at defaults too, in a run's folder and on resuming."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from torch import nn

from svdcompress.cli._compare import _check_same
from svdcompress.errors import Interrupted, RecipeError, UsageError
from svdcompress.files import unsealed
from svdcompress.pipeline import _stages, changed_fields, open_run, run, value_of
from svdcompress.pipeline._own_recipe import check_own_recipe, recipe_used
from svdcompress.pipeline._recovery import for_recovery, steady
from svdcompress.pipeline._resume import outdated
from svdcompress.recipe import BY_SGD, HEADING, as_written, left_open, load_recipe, parse_recipe
from svdcompress.recipe._auto import EARLIER

USUAL = {"lr": "0.0005", "weight_decay": "0", "schedule.warmup": "0", "distill.weight": "0", "distill.temperature": "2"}
"""The defaults of the fields that auto may choose."""

SHORT = ["dense.epochs=1", "train.epochs=1", "recover.epochs=2", "uncertainty.samples=0", "export.onnx=false"]
SHORT += ["report.html=false", "device=cpu"]

SLOW = ["recover.lr=0.0005", "recover.distill.weight=0"]


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))


def images() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.rand(120, 1, 4, 4)
    return x, (x.mean((1, 2, 3)) > 0.5).long()


def mine(*overrides):
    return load_recipe(None, [*SHORT, f"model={__file__}:net", f"data={__file__}:images", *overrides])


def settled(recipe):
    return for_recovery(recipe, net())[0].recover


def rates(results):
    return [row["lr"] for row in results["history"] if row["stage"] == "recover"]


def stopped(recipe, out, monkeypatch):
    """A run that was stopped after its training."""

    def stops(*given, **more):
        raise Interrupted("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(_stages, "threshold_stage", stops)
        with pytest.raises(Interrupted):
            run(recipe, out)


def of_an_earlier_version(out):
    """Rewrite a stopped run's recipes as earlier versions wrote them: every field, set or not."""
    text = yaml.safe_dump(load_recipe(out / "recipe.yaml").model_dump(mode="json"), sort_keys=False)
    (out / "recipe.yaml").write_text(EARLIER + text)
    file = out / "state" / "run.json"
    file.write_text(json.dumps({**unsealed(file.read_text()), "recipe": text}))


@pytest.mark.parametrize("field", USUAL)
def test_a_field_that_is_set_to_its_default_stays_and_the_note_says_so(field):
    recipe, said = for_recovery(load_recipe(None, [f"recover.{field}={USUAL[field]}"]), net())
    filled = [f"recover.{name}={value}" for name, value in BY_SGD.items() if name != field]
    assert recipe.recover == load_recipe(None, ["recover.optimizer=sgd", *filled]).recover
    assert said is not None and f"; recover.{field} as set (for Adam at 0.0005" in said
    assert ("the dense model's answers" in said) == ("without them" in said) == (field != "distill.weight")


def test_all_of_them_can_be_set():
    recipe, said = for_recovery(load_recipe(None, [f"recover.{field}={value}" for field, value in USUAL.items()]), net())
    assert recipe.recover == load_recipe(None, ["recover.optimizer=sgd"]).recover
    assert said is not None and all(f"recover.{field}" in said for field in USUAL)


def test_answers_that_are_set_stay_for_adam_so_the_note_does_not_say_without_them():
    said = for_recovery(load_recipe(None, ["recover.distill.weight=0.5"]), net())[1]
    assert said is not None and "the dense model's answers" in said and "without them" not in said


def test_where_statistics_stay_adam_has_what_is_set():
    asked = load_recipe(None, SLOW)
    found = steady(asked, for_recovery(asked, net())[0])
    assert found is not None and (found.optimizer, found.lr, found.distill.weight) == ("adam", 5e-4, 0)


@pytest.mark.parametrize("settings", [[], SLOW, [f"recover.{field}={value}" for field, value in USUAL.items()]])
def test_a_runs_recipe_recovers_again_as_the_run_did(settings, tmp_path):
    first = run(mine(*settings), tmp_path / "first")
    file = tmp_path / "first" / "recipe.yaml"
    assert file.read_text().startswith(HEADING)
    stored, opened = load_recipe(file), open_run(tmp_path / "first", trust_code=True)
    wanted = settled(mine(*settings))
    assert left_open(stored.recover) == left_open(mine(*settings).recover)
    assert settled(stored) == opened.recovery == wanted and max(rates(first)) <= wanted.lr
    assert parse_recipe(yaml.safe_load(first["recipe"])).recover == wanted  # report.json has what was used
    again = run(stored, tmp_path / "again")
    assert rates(again) == rates(first) and (tmp_path / "again" / "recipe.yaml").read_text() == file.read_text()
    one, other = (open_run(tmp_path / name, trust_code=True).model.state_dict() for name in ("first", "again"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("settings", [[], SLOW, ["recover.lr=0.003"]])
def test_a_resumed_run_recovers_as_it_would_have(settings, earlier, tmp_path, monkeypatch):
    """Earlier versions took what equals its default for not set."""
    out, recipe = tmp_path / "run", mine(*settings)
    stopped(recipe, out, monkeypatch)
    if earlier:
        of_an_earlier_version(out)
        recipe = mine(*(one for one in settings if one not in SLOW))
    check_own_recipe(out)
    wanted = settled(recipe)
    assert settled(recipe_used(out)) == settled(load_recipe(out / "recipe.yaml")) == wanted
    resumed = run(load_recipe(out / "recipe.yaml"), out, resume=True)
    assert wanted.lr / 3 < max(rates(resumed)) <= wanted.lr
    assert open_run(out, trust_code=True).recovery == wanted
    assert settled(load_recipe(out / "recipe.yaml")) == wanted and (out / "recipe.yaml").read_text().startswith(HEADING)


@pytest.mark.parametrize("earlier", [False, True])
def test_a_run_that_is_resumed_with_a_default_takes_it(earlier, tmp_path, monkeypatch):
    out = tmp_path / "run"
    stopped(mine(), out, monkeypatch)
    if earlier:
        of_an_earlier_version(out)
    given = load_recipe(out / "recipe.yaml", SLOW)
    assert changed_fields(recipe_used(out), given) == ["recover.lr", "recover.distill"]
    results = run(given, out, resume=True)
    assert 5e-4 / 3 < max(rates(results)) <= 5e-4
    assert open_run(out, trust_code=True).recovery.distill.weight == 0


def test_a_field_that_only_one_recipe_sets_differs(tmp_path):
    plain, given = load_recipe(None), load_recipe(None, ["recover.lr=0.0005"])
    assert changed_fields(plain, given) == changed_fields(given, plain) == ["recover.lr"]
    assert changed_fields(given, load_recipe(None, ["recover.lr=5e-4"])) == []
    assert (value_of(plain, "recover.lr"), value_of(given, "recover.lr")) == ("not set", 5e-4)
    named = [load_recipe(None, ["recover.optimizer=sgd", *more]) for more in ([], ["recover.lr=0.0005"])]
    assert changed_fields(*named) == []  # nothing is left open
    assert changed_fields(plain, named[1]) == ["recover.optimizer"]
    with pytest.raises(UsageError, match=r"recover\.lr is not set there and 0\.0005 here"):
        _check_same(plain, given, tmp_path)


def test_once_recovery_is_done_setting_a_default_is_refused(tmp_path):
    (tmp_path / "state").mkdir()
    plain, given = load_recipe(None), load_recipe(None, ["recover.lr=0.0005"])
    torch.save({"epoch": 2}, tmp_path / "state" / "recover.pt")
    assert outdated(plain, given, tmp_path) == []  # underway
    torch.save({"epoch": plain.recover.epochs}, tmp_path / "state" / "recover.pt")
    with pytest.raises(RecipeError, match=r"differ in recover\.lr, which the run has used already"):
        outdated(plain, given, tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(as_written(given)))
    with pytest.raises(RecipeError, match=r"restore the file \(recover\.lr: not set\)"):
        outdated(plain, given, tmp_path)


def test_what_a_failed_recovery_advises_does_what_it_says(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("svdcompress.pipeline._recover.surely_worse", lambda before, after: True)
        failed = run(mine("recover.lr=0.005"), tmp_path / "failed")
    advice = "--set recover.lr=0.0005"
    assert any(line.endswith(f"{advice} does so at once") for line in failed["warnings"])
    results = run(mine(advice.removeprefix("--set ")), tmp_path / "advised")
    assert rates(results) == rates(failed)[2:] and max(rates(results)) <= 5e-4


def test_a_second_attempt_at_a_rate_below_adams_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("svdcompress.pipeline._recover.surely_worse", lambda before, after: True)
    results = run(mine("recover.lr=0.0005"), tmp_path / "run")
    opened = open_run(tmp_path / "run", trust_code=True)
    assert opened.recovery.lr == results["recover_lr"] <= 5e-5 and opened.recovery.optimizer == "sgd"
