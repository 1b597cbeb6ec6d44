"""Reconstruction in a search: if everything is cut at once, and in the choice of ways; not if it is off."""

import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from test_cool import SHAPES, Seen
from test_search import same_tensors, searching
from torch import nn

from svdcompress.convert import convert
from svdcompress.errors import Interrupted, RecipeError
from svdcompress.layers import variational_layers
from svdcompress.pipeline import _reconstruct, _trainer, estimate, run
from svdcompress.pipeline._choose_masks import option
from svdcompress.pipeline._path import UNPRESSED
from svdcompress.pipeline._reconstruct import Reconstructor, examples_for
from svdcompress.pipeline._search import Search
from svdcompress.pipeline._search_start import check_epochs
from svdcompress.pipeline._way import Way
from svdcompress.recipe import load_recipe
from svdcompress.reconstruction import reconstruct
from svdcompress.relevance import as_masks, hold
from svdcompress.sources import InMemory

RECONSTRUCTED = (*SHAPES, "search.reconstruct=auto")
SHORT = (*RECONSTRUCTED, "train.lr=1.0e-6")
"""Training too short to learn the variances."""


class Cuts:
    """The calls of `Reconstructor.cut`, and what they changed."""

    def __init__(self, patch):
        self.masks, self.before, self.moved, self.found = [], [], [], []
        cut = Reconstructor.cut

        def noted(reconstructor, model, masks, before):
            weights = {name: layer.weight.detach().clone() for name, layer in variational_layers(model)}
            self.masks.append(masks)
            self.before.append(before)
            self.found.append(cut(reconstructor, model, masks, before))
            self.moved.append(
                {name for name, layer in variational_layers(model) if not torch.equal(weights[name], layer.weight)}
            )
            return self.found[-1]

        patch.setattr(Reconstructor, "cut", noted)


def test_a_trial_under_pressure_has_learnt_to_do_without(tiny_recipe, tmp_path, monkeypatch):
    """Reconstruction would overwrite what was learned under noise: the trial's steps are the same without it, byte for byte."""
    cuts = Cuts(monkeypatch)
    monkeypatch.setattr(Search, "_empties_nothing", False)
    seen = Seen(monkeypatch)
    results = run(searching(tiny_recipe, *RECONSTRUCTED), tmp_path / "run")
    run(searching(tiny_recipe, *RECONSTRUCTED, "search.reconstruct=off"), tmp_path / "off")
    assert cuts.masks == [] and results["search"]["trials"][0]["reconstruction"] is None and len(seen.stages) == 8
    assert same_tensors(tmp_path / "run", tmp_path / "off")


@pytest.mark.parametrize("other", [["search.reconstruct=off"], ["search.goal='nonzero=6x'"], ["search.goal='parameters=1x'"]])
def test_not_where_it_is_off_or_no_unit_goes_that_lives(tiny_recipe, tmp_path, monkeypatch, other):
    cuts = Cuts(monkeypatch)
    results = run(searching(tiny_recipe, *RECONSTRUCTED, *other), tmp_path / "run")
    assert cuts.masks == [] and results["search"]["trials"][0]["reconstruction"] is None


@pytest.fixture(scope="module")
def short(tiny_recipe, tmp_path_factory):
    out = tmp_path_factory.mktemp("short") / "run"
    with pytest.MonkeyPatch.context() as patch:
        cuts, seen = Cuts(patch), Seen(patch)
        results = run(searching(tiny_recipe, *SHORT), out)
    return cuts, seen, out, results


def test_where_training_is_too_short_all_goes_at_once_and_recovery_has_the_epochs(short):
    cuts, seen, _, results = short
    (trial,) = results["search"]["trials"]
    assert trial["pressure"] == UNPRESSED and seen.stages == [] and results["search"]["path"] == []
    assert len(cuts.masks) == 1 and cuts.before == [None] and cuts.moved[0]
    assert trial["reconstruction"] == cuts.found[0].to_dict() and trial["reconstruction"]["left"] == {}
    assert 0 < trial["reconstruction"]["after"] < trial["reconstruction"]["before"]
    stages = Counter(row["stage"] for row in results["history"])
    assert stages["trial 1"] == 4 + 2 and set(stages) == {"dense", "trial 1"}  # the epochs of cooling, and its own
    assert results["search"]["epochs"]["search"] == 6 and results["search"]["reached"] is True
    (note,) = [note for note in results["notes"] if "begins without it" in note]
    assert "pressure removes hardly any unit (training is too short for the variances)" in note
    (line,) = [line for line in results["warnings"] if "by rank alone" in line]
    reached = results["search"]["dense"]["costs"]["parameters"] / trial["costs"]["parameters"]
    assert f"made without it: all the way to {reached:.3g}x was cut by rank alone. More epochs (--epochs 26)" in line


def test_a_stop_in_its_recovery_ends_in_the_same_bytes(short, tiny_recipe, tmp_path, monkeypatch):
    *_, whole, results = short

    def stop(self, row):
        if row["stage"] == "trial 1":
            self.context.stop.signal = "SIGTERM"

    with monkeypatch.context() as patched:
        patched.setattr(_trainer.Trainer, "_log", stop)
        with pytest.raises(Interrupted):
            run(searching(tiny_recipe, *SHORT), tmp_path / "run")
    again = run(searching(tiny_recipe, *SHORT), tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    told = [[{**trial, "seconds": 0} for trial in one["search"]["trials"]] for one in (again, results)]
    assert told[0] == told[1]


def test_more_trials_come_from_the_path_too(tiny_recipe, tmp_path):
    results = run(searching(tiny_recipe, *SHORT, "search.trials=2"), tmp_path / "run")
    pressures = [trial["pressure"] for trial in results["search"]["trials"]]
    assert pressures[0] == UNPRESSED and pressures[1] > 0 and len(results["search"]["path"]) == 1
    budget = [one for one in SHORT if "goal" not in one]
    results = run(searching(tiny_recipe, *budget, "search.max_drop=20", "search.objective=parameters"), tmp_path / "budget")
    assert results["search"]["trials"][0]["pressure"] == UNPRESSED and len(results["search"]["path"]) == 1


def test_a_network_is_cut_without_any_training(tiny_recipe, tmp_path):
    """No step follows the dense model's training; reconstruction still makes up for some of what is cut."""
    none = [one for one in RECONSTRUCTED if not re.match(r"search\.(goal|trials)|train\.epochs|recover\.epochs", one)]
    none += ["train.epochs=0", "recover.epochs=0"]
    results = run(searching(tiny_recipe, *none, "search.goal='parameters=2x'", "export.onnx=true"), tmp_path / "run")
    (trial,) = results["search"]["trials"]
    assert {row["stage"] for row in results["history"]} == {"dense"} and results["search"]["epochs"]["search"] == 0
    assert results["search"]["reached"] is True and results["verified"]["passed"] is True
    assert trial["reconstruction"]["after"] < 0.9 * trial["reconstruction"]["before"]
    assert (tmp_path / "run" / "model_mc.onnx").is_file()
    (line,) = [line for line in results["warnings"] if "variances" in line and "laplace" in line]
    assert "never trained" in line and "--set calibrate.posterior=laplace-diagonal" in line
    budget = ("search.max_drop=30", "search.objective=parameters", "calibrate.posterior=laplace-diagonal")
    results = run(searching(tiny_recipe, *none, *budget), tmp_path / "budget")
    found = results["search"]
    assert found["epochs"] == {"search": 0, "one_run": 0} and 2 < len(found["trials"]) <= 8 and found["met"] is True
    assert not any("never trained" in line for line in results["warnings"])


def test_off_and_auto_are_all_there_is():
    assert load_recipe(None, ["search.reconstruct=off"]).search.reconstruct == "off"  # YAML reads it as false
    with pytest.raises(RecipeError, match=r"search\.reconstruct"):
        load_recipe(None, ["search.reconstruct=always"])


def opened_of(x):
    return SimpleNamespace(data=SimpleNamespace(train=InMemory(x, torch.zeros(len(x), dtype=torch.long))), inputs=x[:2])


@pytest.mark.parametrize(("numbers", "count"), [(2**25, 1024), (30 * 200, 200), (30, 64)])
def test_as_many_examples_as_memory_allows(monkeypatch, numbers, count):
    monkeypatch.setattr(_reconstruct, "NUMBERS", numbers)
    model = convert(nn.Sequential(nn.Linear(4, 30), nn.Linear(30, 3)))
    most = examples_for(model, torch.randn(2, 4))
    assert len(Reconstructor(opened_of(torch.randn(5000, 4)), most, torch.device("cpu")).inputs) == count
    assert len(Reconstructor(opened_of(torch.randn(50, 4)), most, torch.device("cpu")).inputs) == min(50, count)


@pytest.mark.parametrize("total", [1, 50, 400, 5000])
def test_ways_are_judged_on_examples_that_layers_were_not_fitted_to(total):
    x = torch.arange(float(total))[:, None].expand(-1, 4)
    reconstructor = Reconstructor(opened_of(x), 1024, torch.device("cpu"))
    fitted = set(reconstructor.fewer[:, 0].tolist())
    others = set(reconstructor.others(InMemory(x, torch.zeros(total))).inputs[:, 0].tolist())
    assert others == (set(range(total)) - fitted or {0.0}) and len(fitted) == max(1, min(total, 1024) // 4)


def test_the_number_of_examples_is_that_of_the_model_before_the_path(tiny_recipe, tmp_path, monkeypatch):
    """The path makes the model smaller in place; a search that is resumed after it has to take as many."""
    monkeypatch.setattr(_reconstruct, "NUMBERS", 24 * 300)  # the widest layer has 24 outputs
    counts = []
    before = Search._find_least
    monkeypatch.setattr(Search, "_find_least", lambda search: (counts.append(search.fitted_to), before(search)))
    run(searching(tiny_recipe, *SHORT), tmp_path / "run")
    assert counts == [300]
    narrow = convert(nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 3)))
    late = SimpleNamespace(
        fitted_to=300,
        context=SimpleNamespace(recipe=searching(tiny_recipe, *SHORT), place=SimpleNamespace(device=torch.device("cpu"))),
        measure=SimpleNamespace(name="macs"),
        variational=SimpleNamespace(model=narrow),
        opened=opened_of(torch.randn(5000, 4)),
    )
    assert len(Search._reconstructor.func(late).inputs) == 300


def test_ways_are_judged_as_they_are_reconstructed():
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3)), log_sigma2=-40.0).eval()
    x = torch.randn(400, 4)
    y = model(x).argmax(1)
    masks = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}
    masks["0"][:6], masks["2"][:, :6] = False, False
    train = InMemory(x, y)
    data = SimpleNamespace(train=train, task="classification", dim=1, target_scale=None)
    opened = SimpleNamespace(data=data, inputs=x[:2])
    reconstructor = Reconstructor(opened, 1024, torch.device("cpu"))
    way, before = Way("even", as_masks(model, masks), 9.0, None, 9.0), model[2].weight.detach().clone()
    found = option(model, way, train, data, "cpu", None, reconstructor)
    plain = option(model, way, train, data, "cpu")
    assert torch.equal(model[2].weight, before) and model[2].mask is None
    reconstruct(model, reconstructor.fewer, masks, rows=4096)
    with torch.no_grad():
        wanted = nn.functional.cross_entropy(hold(model, masks)(x), y)
    assert found.nll == pytest.approx(float(wanted), rel=1e-5) and found.nll < plain.nll


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["search.goal='nonzero=5x'"], "a search for non-zeros needs 1 or more, .* --objective macs"),
        (["search.max_drop=1", "search.objective=bytes"], "a search for bytes needs 1 or more"),
        (
            ["search.goal='macs=2x'", "search.reconstruct=off"],
            "multiply-accumulates needs 1 or more, .*search.reconstruct: auto",
        ),
        (["search.goal='macs=2x'", "search.cuts=1"], "search.cuts above 1"),
    ],
)
def test_what_cannot_do_without_training_refuses_to_ahead_of_all_work(tiny_recipe, tmp_path, settings, said):
    recipe = searching(tiny_recipe, "train.epochs=0", *settings)
    with pytest.raises(RecipeError, match=f"train.epochs: 0: .*{said}"):
        run(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(RecipeError, match=said):
        estimate(recipe)
    check_epochs(searching(tiny_recipe, "train.epochs=1", *settings))
    check_epochs(searching(tiny_recipe, "train.epochs=0"))  # no search, and variances are not needed


def test_without_epochs_nothing_is_trained_whatever_is_within_reach(tiny_recipe, tmp_path, monkeypatch):
    from svdcompress.train import Reach

    monkeypatch.setattr(Reach, "enough", property(lambda self: True))
    none = [one for one in RECONSTRUCTED if not re.match(r"search\.(goal|trials)|train\.epochs|recover\.epochs", one)]
    none += ["train.epochs=0", "recover.epochs=0", "search.goal='parameters=2x'"]
    results = run(searching(tiny_recipe, *none), tmp_path / "run")
    assert {row["stage"] for row in results["history"]} == {"dense"}
    monkeypatch.setattr("svdcompress.pipeline._search_trials.fits_any", lambda model: False)
    with pytest.raises(RecipeError, match="no layer of this model can be reconstructed"):
        run(searching(tiny_recipe, *none), tmp_path / "none")
