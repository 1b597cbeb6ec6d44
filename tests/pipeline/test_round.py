"""Channel counts are rounded to multiples if that is measured to be faster, and the report shows both."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from svdcompress import convert, cost, prune
from svdcompress.errors import ExportError
from svdcompress.layers import variational_layers
from svdcompress.pipeline import _smaller, run
from svdcompress.pipeline._round import rounded
from svdcompress.relevance import as_masks


def making(hidden=5):
    """A model with 16 hidden units, of which `hidden` are needed, and a function that prunes it."""
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))).eval()
    masks = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}
    masks["2"][:, hidden:] = False
    x = torch.randn(2, 6)
    asked = []

    def make(round_to):
        asked.append(round_to)
        return prune(model, x, masks=masks, round_to=round_to)

    return make, x, asked


def feed(file):
    assert file.suffix == ".onnx"
    return lambda batch: torch.zeros(batch, 6).numpy()


@pytest.mark.parametrize(("times", "faster"), [((1.0, 2.0), True), ((2.0, 1.0), False), ((1.0, 1.0), False)])
def test_the_faster_form_stays(monkeypatch, times, faster):
    make, x, asked = making()
    seen = {}

    def latencies(paths, make_input):
        seen.update({name: path.stat().st_size for name, path in paths.items()})
        return {name: {"batch_1": time, "batch_128": 1.0} for name, time in zip(("rounded", "unrounded"), times, strict=True)}

    monkeypatch.setattr("svdcompress.cost.latencies", latencies)
    small, report = rounded(make, 8, x, feed, 20)
    assert asked == [8, 1] and seen["rounded"] > seen["unrounded"]
    assert small[0].out_features == (8 if faster else 5)
    assert report["rounded"] is faster and report["round_to"] == 8
    assert report["parameters_after"] == (74 if faster else 47) and report["parameters_unrounded"] == 47
    assert report["rounding"]["rounded"]["parameters"] == 74 and report["rounding"]["unrounded"]["parameters"] == 47
    assert report["rounding"]["rounded"]["kept"] == report["rounding"]["unrounded"]["kept"] + 3
    assert report["rounding"]["rounded"]["latency_ms"]["batch_1"] == times[0]
    assert small.pruning.surgery == report["surgery"]


def test_real_files_are_timed():
    make, x, _ = making()
    times = rounded(make, 8, x, feed, 20)[1]["rounding"]
    assert all(value > 0 for form in times.values() for value in form["latency_ms"].values())


@pytest.mark.parametrize(
    ("hidden", "round_to", "batches", "expected"), [(5, 8, None, True), (8, 8, feed, True), (5, 1, feed, None)]
)
def test_nothing_is_measured_where_there_is_nothing_to_choose(monkeypatch, hidden, round_to, batches, expected):
    make, x, asked = making(hidden)
    monkeypatch.setattr("svdcompress.cost.latencies", lambda *args: pytest.fail("measured"))
    small, report = rounded(make, round_to, x, batches, 20)
    assert asked == [round_to] and report.get("rounded") is expected and "rounding" not in report
    assert small[0].out_features == (hidden if round_to == 1 else 8)


def test_what_cannot_be_exported_is_rounded_as_asked(monkeypatch):
    def fail(*args, **kwargs):
        raise ExportError("no such operator")

    make, x, _ = making()
    monkeypatch.setattr("svdcompress.pipeline._round.export_onnx", fail)
    small, report = rounded(make, 8, x, feed, 20)
    assert small[0].out_features == 8 and report["rounded"] is True and "no such operator" in report["notes"][-1]


@pytest.mark.slow
def test_a_run_records_which_form_it_took(tiny_recipe, tmp_path, monkeypatch):
    timed, chosen = cost.latencies, _smaller.choose

    def latencies(paths, *args, **kwargs):
        if "rounded" not in paths:
            return timed(paths, *args, **kwargs)
        return {"rounded": {"batch_1": 2.0}, "unrounded": {"batch_1": 1.0}}

    def choose(model, *args):
        selected = chosen(model, *args)
        masks = selected.masks
        found = {name: torch.ones_like(mask) for name, mask in masks.items()}
        list(found.values())[-1][:, :11] = False  # 13 of the 24 hidden units remain
        return replace(selected, masks=as_masks(model, found))

    monkeypatch.setattr(cost, "latencies", latencies)
    monkeypatch.setattr(_smaller, "choose", choose)
    recipe = tiny_recipe.model_copy(deep=True)
    recipe.prune.round_to, recipe.train.epochs, recipe.uncertainty.samples = 8, 1, 0
    results = run(recipe, tmp_path / "run", quiet=True)
    assert results["pruning"]["rounded"] is False and results["layers"][0]["shape_after"] == [13, 64]
    assert "measured no faster: without rounding" in (tmp_path / "run" / "report.html").read_text()
