"""Settings that a run ignores are reported once, and do not affect the reported reach of the training."""

import pytest
import torch
from test_search import searching
from torch import nn

from svdcompress.pipeline import converted, estimate, out_of_reach, rate_of_variances, reach_of, run
from svdcompress.pipeline._convert import mildest
from svdcompress.pipeline._passed_over import passed_over
from svdcompress.recipe import load_recipe

UNUSED = ["train.schedule=constant", "train.keep=best", "train.beta.start=80%", "train.beta.stop=90%", "train.shrink=50%"]
UNUSED += ["relevance.candidates=[0.5, 3]", "relevance.tolerance=0.2"]


def told(*settings):
    return passed_over(load_recipe(None, list(settings)))


def test_a_search_says_what_it_passes_over():
    (line,) = told("search.goal='macs=2x'", *UNUSED)
    for setting in UNUSED:
        assert setting.partition("=")[0] in line
    assert told("search.goal='macs=2x'") == [] == told(*UNUSED)  # without a search, all of them have an effect
    assert told("search.goal='macs=2x'", "train.beta.final=0.3", "train.lr=0.01", "relevance.threshold=2") == []


def test_a_latency_command_that_nobody_asks_is_said():
    (line,) = told("search.goal='macs=2x'", "search.latency_command=./ask.sh")
    assert "search.latency_command is not used" in line and "multiply-accumulates" in line
    assert told("search.goal='latency=2x'", "search.latency_command=./ask.sh") == []


def test_without_a_search_its_settings_do_nothing():
    (line,) = told("search.latency_batch=8", "search.trials=2")
    assert "search.trials, search.latency_batch do nothing" in line and "search.goal" in line
    assert "search.max_minutes does nothing" in told("search.max_minutes=3")[0]
    assert told() == []


def test_a_start_of_the_variances_that_another_replaces_is_said():
    (line,) = told("convert.log_sigma2=-8", "convert.log_alpha=-6")
    assert "convert.log_alpha" in line and "convert.log_sigma2 does nothing" in line
    assert told("convert.log_alpha=-6") == told("convert.log_sigma2=-8") == []


@pytest.mark.parametrize(
    ("settings", "idle"),
    [
        (["search.confidence=0.8"], "search.confidence"),
        (["search.goal='nonzero=9x'", "search.cuts=2", "search.reconstruct=off"], "search.cuts, search.reconstruct"),
        (["search.goal='bytes=9x'", "search.reconstruct=off"], "search.reconstruct"),
        (["search.goal='macs=9x'", "search.levels=4", "train.epochs=0"], "search.levels"),
        (["export.monte_carlo=false", "export.compact_monte_carlo=true"], "export.compact_monte_carlo"),
        (["export.onnx=false", "export.compact=false", "export.monte_carlo_dtype=float16"], "export.compact, export.monte"),
        (["relevance.tolerance=0.5"], "relevance.tolerance"),
        (
            ["weights.file=net.pt", "dense.epochs=50", "dense.lr=0.1", "dense.momentum=0"],
            "dense.epochs, dense.lr, dense.momentum",
        ),
        (["weights.trained=true", "dense.schedule=cosine"], "dense.schedule"),
        (["train.momentum=0.5"], "adam (train.optimizer) has no momentum to set: train.momentum"),
        (["dense.optimizer=adamw", "dense.momentum=0.5"], "adamw (dense.optimizer) has no momentum to set: dense.momentum"),
        (["recover.optimizer=adam", "recover.momentum=0.5"], "recover.momentum"),
        (["train.distill.temperature=4"], "train.distill.temperature"),
        (["train.beta.step=0.1"], "not additive: train.beta.step"),
        (["train.beta.name=constant", "train.beta.stop=90%"], "is constant: train.beta.stop"),
        (["search.goal='macs=9x'", "search.confidence=0.99"], "search.confidence"),
        (["uncertainty.samples=0", "uncertainty.budget=60"], "uncertainty.budget"),
    ],
)
def test_settings_that_others_leave_without_effect_are_said(settings, idle):
    (line,) = told(*settings)
    assert idle in line and "nothing" in line


def test_the_same_settings_where_they_count():
    assert told("dense.epochs=50", "dense.lr=0.1") == []
    assert told("weights.file=net.pt", "weights.trained=false", "dense.epochs=50", "dense.lr=0.1") == []  # only a start
    for stage in ("dense", "train", "recover"):
        assert told(f"{stage}.optimizer=sgd", f"{stage}.momentum=0.5") == []
    assert told("train.distill.weight=0.5", "train.distill.temperature=4") == []
    assert (
        told("train.beta.name=additive", "train.beta.step=0.1") == told("train.beta.name=cosine", "train.beta.stop=90%") == []
    )
    assert told("uncertainty.budget=60") == []
    assert told("search.goal='macs=9x'", "search.cuts=2", "search.reconstruct=off", "search.levels=4") == []
    assert told("search.max_drop=1", "search.confidence=0.8") == []
    assert told("export.compact_monte_carlo=true", "export.monte_carlo_dtype=float16", "export.compact=false") == []
    assert told("relevance.tolerance=0.5", "relevance.candidates=[1, 3]") == []


def test_run_and_dry_run_say_it(tiny_recipe, tmp_path):
    few = ["train.epochs=1", "recover.epochs=1", "search.levels=1", "search.trials=1", "export.onnx=false"]
    recipe = searching(tiny_recipe, "search.goal='nonzero=2x'", "train.keep=best", "relevance.tolerance=0.2", *few)
    said = [line for line in estimate(recipe).notes if "and ignores" in line]
    assert len(said) == 1 and "train.keep" in said[0] and "relevance.tolerance" in said[0]
    notes = run(recipe, tmp_path / "run")["notes"]
    assert [line for line in notes if "and ignores" in line] == said


def reached(*settings):
    """The recipe and reach of a trained net with 6,000 examples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 10))
    recipe = load_recipe(None, ["train.epochs=20", "train.lr=1e-4", *settings])
    net = converted(model, recipe)
    return recipe, reach_of(recipe, net, 6000, 0.1, rate_of_variances(recipe, net, 6000, 0.1))


@pytest.mark.parametrize("goal", ["macs=2x", "nonzero=2x"])
def test_the_reach_of_a_search_is_told_without_the_settings_that_it_passes_over(goal):
    recipe, found = reached(f"search.goal='{goal}'")
    assert found == reached()[1] and found.steps == 60 * 20  # the same as without these settings
    settings = [setting for setting in UNUSED if "tolerance" not in setting]
    other, same = reached(f"search.goal='{goal}'", *settings)
    assert same == found
    assert out_of_reach(other, same) == out_of_reach(recipe, found) != []
    assert reached(*settings)[1].travel < reached()[1].travel  # in a single training, they have an effect
    assert mildest(other) is None and mildest(load_recipe(None, settings)) is not None


def test_without_epochs_there_is_nothing_to_reach_by():
    assert reached("search.goal='macs=2x'", "train.epochs=0")[1].steps == 0


@pytest.mark.parametrize(
    ("settings", "counted"),
    [
        (["recover.noise=false", "recover.beta=0.3", "recover.lr_log_sigma2=0.01"], "recover.noise=true"),
        (["calibrate.epochs=3", "calibrate.beta=0.5"], "calibrate.posterior=refit"),
        (["export.onnx=false", "export.precision=int8", "export.compact_monte_carlo=true"], "export.onnx=true"),
    ],
)
def test_fields_of_stages_that_others_leave_without_effect_are_said(settings, counted):
    (line,) = told(*settings)
    names = [setting.partition("=")[0] for setting in settings]
    assert all(name in line for name in names[-2:]) and line.endswith("do nothing")
    assert told(*settings, counted) == []
