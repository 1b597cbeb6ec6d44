"""Runs that make nothing smaller say why and what to set; runs that cannot reach the threshold say so before they start."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from svdcompress import convert
from svdcompress.cli import app
from svdcompress.cost import Cost
from svdcompress.layers import variational_layers
from svdcompress.pipeline import _trainer, converted, estimate, out_of_reach, rate_of_variances, reach_of, run
from svdcompress.pipeline._outcome import _more, hardly_faster, nothing_smaller, padded_in_code, without_weights
from svdcompress.pipeline._results import RunResults, Side
from svdcompress.prune import PADDED
from svdcompress.recipe import WITHOUT_RECIPE, load_recipe
from svdcompress.sources import save_weights
from svdcompress.train import Reach

QUICK = ["export.monte_carlo=false", "report.latency=false", "uncertainty.samples=0", "device=cpu"]


def settings(*overrides):
    return load_recipe(None, list(overrides))


def trained_net(scale=0.05):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 10))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.normal_(0, scale)
    return model


def reached(*overrides, examples=6000, scale=0.05):
    recipe = settings(*overrides)
    model = converted(trained_net(scale), recipe)
    rate = rate_of_variances(recipe, model, examples, 0.1)
    return recipe, reach_of(recipe, model, examples, 0.1, rate)


def test_a_learning_rate_of_fine_tuning_takes_no_weight_to_the_threshold():
    recipe, found = reached("train.lr=2e-5", "train.epochs=3")
    (line,) = out_of_reach(recipe, found)
    for part in ("180 steps", "--epochs", "--set train.lr=", "--threshold 1", "% of the weights are within reach"):
        assert part in line, (part, line)
    assert found.within < 0.2
    # and the suggested settings suffice
    longer = int(line.partition("--epochs ")[2].partition(",")[0])
    assert out_of_reach(*reached("train.lr=2e-5", f"train.epochs={longer}")) == []
    faster = line.partition("--set train.lr=")[2].partition(";")[0]
    assert out_of_reach(*reached(f"train.lr={float(faster) * 1.1}", "train.epochs=3")) == []


def test_under_sgd_the_rate_of_the_variances_is_what_to_set():
    """It doesn't depend on that of the means, which move by their gradients, and it's unknown how far."""
    setting = ("train.optimizer=sgd", "train.lr=0.01", "train.epochs=3")
    recipe, found = reached(*setting)
    (line,) = out_of_reach(recipe, found)
    assert "--set train.lr=" not in line and "a mean can move" not in line and "what SGD does to means isn't counted" in line
    faster = line.partition("--set train.lr_log_sigma2=")[2].partition(";")[0]
    assert out_of_reach(*reached(*setting, f"train.lr_log_sigma2={float(faster) * 1.1}")) == []


def test_a_learning_rate_that_is_nearly_enough_is_not_advised_again():
    recipe, found = reached("train.lr=1e-3", "train.epochs=3")
    nearly = dataclasses.replace(found, within=0.45, times=1.3)
    assert "--set train.lr=0.0013" in out_of_reach(recipe, nearly)[0]


def test_nothing_is_said_of_training_that_is_long_enough():
    assert out_of_reach(*reached()) == []
    assert out_of_reach(*reached("train.epochs=0")) == []
    assert out_of_reach(*reached("convert.threshold=100", "train.lr=2e-5")) == []  # nothing is meant to go


def test_the_learning_rate_of_the_variances_that_a_recipe_leaves_to_itself():
    recipe, found = reached("train.lr=2e-5", "train.lr_log_sigma2=auto")
    assert found.lr_log_sigma2 > 2e-5 and found.travel >= 0.95 * found.distance["weight"][2] and found.enough
    assert out_of_reach(recipe, found) == []
    assert reached("train.lr=2e-5")[1].lr_log_sigma2 == 2e-5
    assert reached("train.lr=2e-5", "train.lr_log_sigma2=0.003")[1].lr_log_sigma2 == 0.003
    assert reached("train.lr_log_sigma2=auto", "train.epochs=1", examples=2000)[1].lr_log_sigma2 == 0.1  # but not more
    assert reached("train.lr=0.5", "train.lr_log_sigma2=auto")[1].lr_log_sigma2 == 0.5


def test_a_rule_may_start_a_layer_otherwise():
    rules = "convert.layers=[{match: '0', log_sigma2: -9}, {match: '2', log_alpha: -4}]"
    for more, second in ((["convert.log_alpha=-6"], -4), ([], -4)):
        layers = dict(variational_layers(converted(trained_net(), settings(rules, *more))))
        assert float(layers["0"].log_sigma2.detach().mean()) == pytest.approx(-9)
        scale = layers["2"].weight.detach().square().mean().log()
        assert float(layers["2"].log_sigma2.detach().mean()) == pytest.approx(float(scale) + second, abs=1e-4)
    plain = dict(variational_layers(converted(trained_net(), settings("convert.log_alpha=-6"))))
    assert float(plain["0"].log_alpha().detach().mean()) > -6  # its weights are smaller than the layer's scale


def test_dry_run_and_inspect_tell_of_the_reach_of_a_trained_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_weights(nn.Sequential(nn.Flatten(), *trained_net(0.1)), tmp_path / "w.safetensors")
    options = ["model={name: mlp, args: {sizes: [40, 40, 10]}}", "data=npz:d.npz", "train.lr=2e-6", "train.epochs=1"]
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", x=rng.normal(size=(600, 40)).astype(np.float32), y=rng.integers(0, 10, 600))
    found = estimate(load_recipe(None, [*options, "weights=w.safetensors", "device=cpu"]))
    assert any("training is too short" in line for line in found.warnings)
    assert json.dumps(found.to_dict()["reach"])
    drawn = estimate(load_recipe(None, [*options, "device=cpu"]))  # not trained yet: its weights say nothing
    assert not any("training is too short" in line for line in drawn.warnings)
    command = ["inspect", *(part for option in options for part in ("--set", option))]
    text = CliRunner().invoke(app, [*command, "--weights", "w.safetensors"], env={"COLUMNS": "400"}).output
    assert "way to the threshold" in text and "training is too short" in text
    assert "way to the threshold" not in CliRunner().invoke(app, command, env={"COLUMNS": "400"}).output


# The outcome


def results(before=1000, after=1000, zeros=0.1, dead=0, groups=(), within=1.0):
    row = {"name": "fc", "weights_before": 900, "weights": round(900 * (1 - zeros)), "outputs": 30 - dead}
    sides = [Side(counts=Cost(count, count, count, count, count)) for count in (before, after)]
    reach = Reach({}, 1, 1e-3, 1.0, 1.0, 0.0, within, None)
    return RunResults(dense=sides[0], sparse=sides[1], layers=[row], pruning={"groups": list(groups)}, reach=reach)


def test_scattered_zeros_weights_that_stay_and_units_that_must_stay_are_told_apart():
    assert nothing_smaller(settings(), results(after=900)) == [] == nothing_smaller(settings(), RunResults())
    (line,) = nothing_smaller(settings(), results(zeros=0.8))
    assert "80% of the weights are zero, but scattered" in line and "convert.share='{weight:" in line
    (line,) = nothing_smaller(settings(), results(), [{"stage": "train", "beta": 0.02}, {"stage": "recover", "beta": 5}])
    assert "Only 10% of the weights were dropped" in line and "train.beta.final=0.06" in line and "--epochs 40" in line
    assert "could not reach the threshold" not in line
    (line,) = nothing_smaller(settings(), results(within=0.2))
    assert "could not reach the threshold" in line
    (line,) = nothing_smaller(settings("convert.share=output"), results())
    assert "convert.share=" not in line  # it already asks for units
    (line,) = nothing_smaller(settings("convert.share={weight: 0.8, input: 0.2}"), results(zeros=0.8))
    assert "convert.share='{weight: 0.5, input: 0.25, output: 0.25}'" in line and "it is weight, input" in line


def test_units_that_stay_are_counted_where_they_are_and_those_that_went_are_not():
    stays = {"name": "fc", "kept": 30, "layers": ["fc.weight"], "reason": "output of the model"}
    (line,) = nothing_smaller(settings(), results(dead=7, zeros=0.9, groups=[stays]))
    assert "7 units lost all their weights, but the graph keeps them (output of the model)" in line
    other = {"name": "other", "kept": 4, "layers": ["other.weight", "fc.weight"], "reason": "input of the model"}
    (line,) = nothing_smaller(settings(), results(dead=7, zeros=0.9, groups=[{**stays, "kept": 23, "reason": ""}, other]))
    assert "the graph keeps" not in line and "scattered" in line
    (line,) = nothing_smaller(settings(), results(dead=7, zeros=0.9, groups=[{**stays, "kept": 24}, other, other]))
    assert "1 unit lost all its weights, but the graph keeps it (output of the model)" in line


def timed(ratio=1.1, macs=3.0, dense=1.0, after=(37, 64), objective=None, **pruning):
    """Results of a run with two layers of 64 outputs each, of which `after` remain."""
    layers = [
        {"name": f"conv{n}", "shape_before": [64, 64, 3, 3], "shape_after": [left, 64, 3, 3]} for n, left in enumerate(after)
    ]
    latency = {"batch_1": ratio, "batch_128": ratio - 0.05}
    found = RunResults(layers=layers, pruning=pruning, compression={"macs": macs, "latency": latency})
    found.dense.latency_ms = dict.fromkeys(latency, dense)
    found.search = None if objective is None else {"objective": objective}
    return found


def test_a_run_that_is_hardly_faster_says_why_and_what_to_set():
    (line,) = hardly_faster(timed())
    for part in ("3x fewer MACs", "1.10x at batch 1, 1.05x at batch 128", "blocks of 8 or 16, and layer conv0 no longer has"):
        assert part in line, (part, line)
    assert "--set prune.round_to=8" in line and "--goal latency=2x" in line
    assert hardly_faster(timed(objective="macs")) == hardly_faster(timed(objective="parameters")) == [line]
    assert "layer conv0 and 1 other no longer have multiples" in hardly_faster(timed(after=(37, 3)))[0]


@pytest.mark.parametrize("after", [(37, 64), (32, 64)])
def test_a_budget_that_bought_no_speed_is_to_be_spent_on_latency(after):
    found = timed(after=after, objective="macs")
    for asked, cure in (
        ({"max_drop": 2.0}, "--objective latency"),
        ({"max_error": 5.0, "goal": None}, "--objective latency"),
        ({"max_drop": 2.0, "goal": "macs=2x"}, "--goal latency=2x"),
        ({"max_drop": None, "goal": "macs=2x"}, "--goal latency=2x"),
    ):
        found.search = {"objective": "macs", **asked}
        (line,) = hardly_faster(found)
        assert line.endswith(f"let a search measure the latency itself: {cure}"), line


def test_a_file_with_more_outputs_than_the_dense_one_says_so():
    (line,) = hardly_faster(timed(), sets=True)
    assert "also computes the promised intervals or sets (export.sets), which dense.onnx does not" in line


def test_the_more_was_removed_the_faster_the_model_has_to_be():
    assert "2x fewer MACs, but far less gain in speed" in hardly_faster(timed(macs=2.0, ratio=1.19))[0]
    assert hardly_faster(timed(macs=2.0, ratio=1.21)) == []
    assert "1.72x fewer MACs, but far less gain in speed" in hardly_faster(timed(macs=1.72, ratio=1.0))[0]
    assert hardly_faster(timed(macs=1.72, ratio=1.15)) == []
    (line,) = hardly_faster(timed(macs=4.0, ratio=1.55))
    assert "4x fewer MACs, but far less gain in speed (1.55x at batch 1, 1.50x at batch 128)" in line
    assert hardly_faster(timed(macs=4.0, ratio=1.65)) == []


def test_channels_that_a_padding_in_code_holds_are_told_and_what_to_do():
    held = [{"name": f"layer{n}.conv2", "kept": 16 * n, "reason": PADDED} for n in (1, 2)]
    free = {"name": "conv1", "kept": 7, "reason": ""}
    (line,) = padded_in_code(RunResults(pruning={"groups": [free, *held]}))
    assert "48 channels of layer1.conv2 and 1 other layer stay" in line and "a module of its own" in line
    assert padded_in_code(RunResults(pruning={"groups": [free]})) == padded_in_code(RunResults()) == []


def test_layers_without_weights_are_told():
    rows = [{"name": f"block.{n}", "weights": 0} for n in range(5)]
    alive = {"name": "head", "weights": 7}
    (line,) = without_weights(RunResults(layers=[alive, *rows]))
    assert "no weight is left in 5 layers (block.0, block.1, block.2 and 2 more): what they give is a constant" in line
    (line,) = without_weights(RunResults(layers=[alive, rows[0]]))
    assert "in 1 layer (block.0): what it gives is a constant" in line
    assert without_weights(RunResults(layers=[alive])) == without_weights(RunResults()) == []


def test_another_reason_than_odd_channels_is_not_taken_for_them():
    for other in (timed(after=(32, 64)), timed(round_to=8)):
        (line,) = hardly_faster(other)
        assert "blocks" not in line and "round_to" not in line and "--goal latency=2x" in line
    (line,) = hardly_faster(timed(dense=0.004))
    assert "less than 0.02 ms" in line and "overhead" in line and "round_to" not in line


def test_nothing_is_said_of_speed_where_it_is_not_clear():
    sought = [timed(objective=objective) for objective in ("latency", "nonzero", "bytes")]
    for fine in (timed(ratio=1.45), timed(macs=1.4), timed(macs=10.0, ratio=2.9), *sought):
        assert hardly_faster(fine) == []
    nothing = timed()
    nothing.compression = {"macs": 3.0, "latency": {}}
    assert hardly_faster(nothing) == hardly_faster(RunResults()) == []


def test_a_model_that_became_slower_is_told_however_little_went():
    (line,) = hardly_faster(timed(macs=1.5, ratio=0.8))
    assert "1.5x fewer MACs, but slower than the dense model (0.80x at batch" in line and "prune.round_to=8" in line
    assert hardly_faster(timed(macs=1.4, ratio=0.97)) == []


def test_more_epochs_than_none_are_some():
    recipe = settings()
    recipe.train.epochs = 0
    line = _more(recipe, RunResults(), [])
    assert "epochs of fine-tuning: --epochs 10" in line and "--epochs 0" not in line


def test_the_speed_that_a_run_measures_is_what_it_speaks_of(tmp_path, monkeypatch):
    """The stage that measures the files puts it into the report's warnings, which the run prints at the end."""
    from types import SimpleNamespace

    from svdcompress import cost
    from svdcompress.pipeline import _finish

    found = timed(groups=[{"name": "layer2.conv2", "kept": 16, "reason": PADDED}])
    found.dense.counts, found.sparse.counts = Cost(9, 9, 9, 9, 900), Cost(3, 3, 3, 3, 300)
    found.dense.latency_ms = found.layers = None
    times = {"dense": {"batch_1": 1.0, "batch_128": 9.0}, "sparse": {"batch_1": 0.9, "batch_128": 8.5}}
    monkeypatch.setattr(cost, "latencies", lambda *given, **more: times)
    monkeypatch.setattr(_finish._figures, "feed", lambda *given: None)
    written = {name: SimpleNamespace(path=tmp_path / name) for name in times}
    context = SimpleNamespace(results=found, recipe=settings(), history=[], note=None, attempt=lambda what, work: work())
    _finish.cost_stage(context, SimpleNamespace(data=None), SimpleNamespace(written=written, small=None))
    speed = "3x fewer MACs, but far less gain in speed (1.11x at batch 1, 1.06x at batch 128)"
    for part in (speed, "16 channels of layer2.conv2 stay"):
        assert any(part in line for line in found.warnings), part


def test_a_run_in_which_nothing_shrinks_says_so(tiny_recipe, tmp_path):
    recipe = tiny_recipe.model_copy(deep=True)
    recipe.train.beta.final = 1e-6
    recipe.train.epochs = recipe.recover.epochs = 1
    recipe.export.onnx, recipe.report.latency, recipe.uncertainty.samples = False, False, 0
    found = run(recipe, tmp_path / "run")
    assert found["sparse"]["parameters"] == found["dense"]["parameters"]
    (line,) = [line for line in found["warnings"] if "the shapes are the same" in line]
    assert "train.beta.final" in line
    written = json.loads((tmp_path / "run" / "report.json").read_text())
    assert line in written["warnings"] and written["reach"]["steps"] == found["reach"]["steps"]
    assert "the shapes are the same" in (tmp_path / "run" / "report.html").read_text()


def test_the_learning_rate_that_is_told_is_the_one_that_trains(tiny_recipe, tmp_path, monkeypatch):
    seen = {}

    def watched(*args, **more):
        seen[more["stage"]] = more.get("lr_log_sigma2")
        return _fit(*args, **more)

    _fit = _trainer.fit
    monkeypatch.setattr(_trainer, "fit", watched)
    recipe = tiny_recipe.model_copy(deep=True)
    recipe.train.lr_log_sigma2 = "auto"
    recipe.dense.epochs = recipe.train.epochs = recipe.recover.epochs = 1
    recipe.train.beta.stop = 0.0
    recipe.export.onnx, recipe.report.html, recipe.report.latency, recipe.uncertainty.samples = False, False, False, 0
    found = run(recipe, tmp_path / "run")
    assert seen["train"] == found["reach"]["lr_log_sigma2"] == 0.1  # the maximum, for three steps
    assert seen["recover"] is None
    assert load_recipe(tmp_path / "run").train.lr_log_sigma2 == "auto"


@pytest.mark.slow
def test_a_model_alone_becomes_smaller(tmp_path, monkeypatch):
    """`--model` and `--data` with the defaults, on a table: the model gets fewer units, not only zeros."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 12)).astype(np.float32)
    np.savez("table.npz", x=x, y=(x[:, 0] * x[:, 1] > 0).astype(int) + (x[:, 2] > 0.5))
    args = ["sparsify", "--model", "mlp", "--model-arg", "sizes=[12, 96, 48, 3]", "--data", "npz:table.npz", "--json"]
    args += [part for option in QUICK for part in ("--set", option)] + ["--set", "export.onnx=false"]
    found = {}
    for name, more in (("default", []), ("weight", ["--set", "convert.share=weight"])):
        done = CliRunner().invoke(app, [*args, *more, "--out", name])
        assert done.exit_code == 0, done.output
        found[name] = json.loads(done.stdout)
    default, weight = (found[name]["sparse"]["parameters"] for name in ("default", "weight"))
    assert default < 0.6 * found["default"]["dense"]["parameters"] and default < weight
    assert load_recipe("default/recipe.yaml").convert.share == WITHOUT_RECIPE["convert.share"]
    assert not [line for line in found["default"]["warnings"] if "the shapes are" in line]


def test_without_a_recipe_units_are_asked_too_and_a_recipe_keeps_its_meaning(tmp_path, monkeypatch):
    from svdcompress.cli._settings import Settings

    alone = Settings(model="a:b", data="digits")
    assert alone.resolved().convert.share == WITHOUT_RECIPE["convert.share"]
    assert Settings(model="a:b", data="digits", set_=["convert.share=weight"]).resolved().convert.share == "weight"
    assert Settings(recipe="digits").resolved().convert.share == "weight"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("model: a:b\ndata: digits\n")
    assert Settings(recipe="mine.yaml").resolved().convert.share == "weight"
    assert load_recipe().convert.share == "weight"
    assert convert(nn.Sequential(nn.Linear(2, 2)))[0].share == {"weight": 1.0}
