"""Baselines that an evaluation trains: members, the magnitude-pruned control, last-layer Laplace; and what is stored."""

import json
import shutil
import sys
from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch import nn

from svdcompress.errors import DependencyError, ModelError, OutputError, UsageError
from svdcompress.evaluation import Wanted, _evaluate, ensemble_members, evaluate_run, last_layer_laplace, magnitude_pruned
from svdcompress.evaluation import _members as members_module
from svdcompress.evaluation._cache import kept
from svdcompress.evaluation._magnitude import left_after, recovery, smallest
from svdcompress.likelihoods import likelihood_for
from svdcompress.pipeline import open_run
from svdcompress.sources import InMemory


@pytest.fixture
def opened(tiny_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(tiny_run[0], folder)
    return open_run(folder)


def weights_of(model):
    return torch.cat([p.detach().flatten() for _, p in sorted(model.named_parameters())])


def test_members_are_trained_once_and_differ(opened, monkeypatch):
    lines = []
    first = ensemble_members(opened, 3, device="cpu", say=lines.append)
    assert first[0] is opened.dense and len(lines) == 2
    assert not torch.allclose(weights_of(first[1]), weights_of(first[2]))
    kept = {path.name for path in (opened.folder / "baselines").iterdir()}
    assert kept == {"member-1000.safetensors", "member-2000.safetensors", "baselines.json"}
    monkeypatch.setattr(members_module, "dense_fit", lambda *args, **kwargs: pytest.fail("they are there already"))
    again = ensemble_members(open_run(opened.folder), 3, device="cpu", say=lines.append)
    assert len(lines) == 2 and torch.equal(weights_of(first[2]), weights_of(again[2]))


def test_members_are_trained_by_the_recipes_dense_section(opened):
    opened.recipe.dense.epochs = 12
    _, other = ensemble_members(opened, 2, device="cpu")
    x, y = next(iter(opened.data.test.batches(1000)))
    with torch.no_grad():
        assert float((other(x).argmax(1) == y).double().mean()) > 0.8


def test_another_recipe_or_a_damaged_file_is_trained_anew(opened, monkeypatch):
    ensemble_members(opened, 2, device="cpu")
    file = opened.folder / "baselines" / "member-1000.safetensors"
    file.write_bytes(b"no weights")
    trained = []
    monkeypatch.setattr(members_module, "dense_fit", lambda opened, model, *args, **kwargs: trained.append(1) or model)
    ensemble_members(opened, 2, device="cpu")
    assert len(trained) == 1
    opened.recipe.dense.epochs += 1
    ensemble_members(opened, 2, device="cpu")
    assert len(trained) == 2


def test_a_factory_with_a_seed_of_its_own_is_told_of(opened, monkeypatch):
    def same(run):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    assert opened.dense is not None  # loaded before its factory is replaced
    monkeypatch.setattr(type(opened), "fresh", same)
    monkeypatch.setattr(members_module, "dense_fit", lambda opened, model, *args, **kwargs: model)
    notes = []
    ensemble_members(opened, 2, device="cpu", note=notes.append)
    assert any("torch.manual_seed" in line for line in notes)


def test_weights_that_were_given_leave_the_runs_own_out(opened, monkeypatch):
    monkeypatch.setattr(opened.recipe.weights, "file", "mine.safetensors")
    notes = []
    found = ensemble_members(opened, 2, device="cpu", note=notes.append)
    assert len(found) == 2 and all(model is not opened.dense for model in found)
    assert not torch.allclose(weights_of(found[0]), weights_of(found[1])) and "given" in notes[0]


def test_magnitude_keeps_as_many_weights_as_the_sparse_network(opened):
    model = magnitude_pruned(opened, device="cpu")
    names = [row["name"] for row in opened.results["layers"]]
    left = sum(int(model.get_submodule(name).weight.count_nonzero()) for name in names)
    assert left == sum(row["weights"] for row in opened.results["layers"])
    assert not any("mask" in name or "orig" in name for name in model.state_dict())
    again = magnitude_pruned(open_run(opened.folder), device="cpu")
    assert torch.equal(weights_of(model), weights_of(again))
    x, y = next(iter(opened.data.test.batches(1000)))
    with torch.no_grad():
        assert float((model(x).argmax(1) == y).double().mean()) > 0.5


def test_magnitude_has_the_epochs_of_a_trial_that_recovered_on(opened, monkeypatch):
    own = opened.recipe.recover.epochs
    assert recovery(opened).epochs == own
    trials = [{"number": 1, "continues": None}, {"number": 2, "continues": 1}]
    history = [{"stage": stage} for stage in ["trial 1"] * own + ["trial 2"] * 7]
    monkeypatch.setitem(opened.results, "search", {"trials": trials, "chosen": 2})
    monkeypatch.setitem(opened.results, "history", history)
    assert recovery(opened).epochs == own + 7
    monkeypatch.setitem(opened.results, "search", {"trials": trials, "chosen": 1})
    assert recovery(opened).epochs == own


def test_the_smallest_go_over_all_layers_and_stay_away():
    torch.manual_seed(0)
    layers = [nn.Linear(6, 5), nn.Linear(5, 4)]
    sizes = torch.cat([layer.weight.detach().abs().flatten() for layer in layers]).sort(descending=True).values
    for keep in (30, 12):
        smallest(layers, keep)
        kept = torch.cat([layer.weight.detach().abs().flatten() for layer in layers])
        assert sorted(kept[kept > 0].tolist(), reverse=True) == pytest.approx(sizes[:keep].tolist())
    with torch.no_grad():
        layers[0].weight_orig += 100.0  # training does not change what is masked
    smallest(layers, 12)
    assert sum(int(layer.weight_mask.sum()) for layer in layers) == 12


def test_weights_go_by_the_cube_of_the_time():
    assert [left_after(epoch, 10, 1000, 100) for epoch in (0, 5, 10, 20)] == [1000, 100 + 900 // 8 + 1 - 1, 100, 100]
    assert left_after(3, 0, 1000, 100) == 100


def test_without_laplace_torch_a_line_says_so(opened, monkeypatch):
    monkeypatch.setitem(sys.modules, "laplace", None)
    with pytest.raises(DependencyError, match="pip install laplace-torch"):
        last_layer_laplace(opened.dense, opened.data.train, likelihood_for("classification"))
    lines = []
    found = evaluate_run(opened, Wanted(samples=2, magnitude=False), say=lines.append)
    assert any("laplace-torch is not installed" in line for line in lines) and found["notes"] == lines
    assert found["contenders"][0]["name"] == "dense"
    with pytest.raises(DependencyError):
        evaluate_run(opened, Wanted(samples=2, laplace=True))


def test_laplace_of_a_regression_is_that_of_its_last_features():
    """With laplace-torch: the variance of a Bayesian linear regression on the last layer's inputs, in closed form."""
    pytest.importorskip("laplace")
    torch.manual_seed(0)
    x = torch.randn(80, 3)
    y = x.sum(1) + 0.1 * torch.randn(80)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(300):
        optimizer.zero_grad()
        (net(x)[:, 0] - y).square().mean().backward()
        optimizer.step()
    contender = last_layer_laplace(net, InMemory(x, y), likelihood_for("regression"), batch_size=30)
    at = torch.randn(5, 3) * 3
    got = contender.predict(at)
    with torch.no_grad():
        torch.testing.assert_close(got.mean, net(at).double())
        features, new = (net[1](net[0](each)).double() for each in (x, at))
        noise = float((net(x)[:, 0] - y).square().mean())
    ratios = []
    for precision in torch.logspace(-4, 4, 400).tolist():  # of the prior; the fitted one is unknown
        inverse = torch.linalg.inv(features.T @ features / noise + precision * torch.eye(6, dtype=torch.float64))
        # The bias is a separate block of the Kronecker factors, without covariance with the weights.
        variance = torch.einsum("np,pq,nq->n", new, inverse, new) + 1 / (len(x) / noise + precision)
        ratios.append((got.epistemic[:, 0] / variance - 1).abs().max())
    assert min(ratios) < 0.02


def test_laplace_of_classes_widens_away_from_the_data():
    pytest.importorskip("laplace")
    torch.manual_seed(0)
    y = torch.randint(0, 3, (150,))
    x = torch.randn(150, 2) + torch.tensor([[0.0, 3.0], [3.0, 0.0], [-3.0, -3.0]])[y]
    net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    contender = last_layer_laplace(net, InMemory(x, y), likelihood_for("classification"), samples=200)
    near, far = contender.predict(x), contender.predict(x * 20)
    torch.testing.assert_close(near.mean.sum(1), torch.ones(150, dtype=torch.float64))
    assert float(far.mutual_information.mean()) > float(near.mutual_information.mean()) and near.samples == 200
    with pytest.raises(ModelError, match="not binary"):
        last_layer_laplace(net, InMemory(x, y), likelihood_for("binary"))


def test_a_run_is_evaluated_with_all_of_them(opened, tmp_path):
    found = evaluate_run(opened, Wanted(samples=3, members=2, shift=True, laplace=False))
    names = [row["name"] for row in found["contenders"]]
    assert names[:3] == ["dense", "dense, temperature", "dense, MC dropout"] and names[-2:] == [
        "sparse, mean",
        "sparse, samples",
    ]
    assert names[3:5] == ["deep ensemble of 2", "magnitude, as many weights"]
    assert set(found["shift"]["curves"]) == {"blur", "noise", "contrast", "rotation", "occlusion"}
    assert json.loads(json.dumps(found)) == found
    for by_name in found["shift"]["curves"].values():
        assert set(by_name) == set(names)
        for points in by_name.values():
            assert len(points) == 6 and all({"error", "nll", "ece", "selective"} <= set(point) for point in points)
    with pytest.raises(UsageError, match="members: 1"):
        evaluate_run(opened, Wanted(members=1))


def listened(monkeypatch):
    """What `evaluate_run` compares, and on which data; nothing is predicted."""
    asked = {}

    def compare(dense, sparse, test, validation, **more):
        asked.update(more, test=test, validation=validation)
        return {}

    monkeypatch.setattr(_evaluate, "compare", compare)
    return asked


def test_a_part_of_the_examples_has_all_classes_where_they_are_sorted(opened, monkeypatch):
    """The first 500 examples lack most classes; the parts that are corrupted, shuffled or used for a dropout rate must not."""
    y = torch.arange(10).repeat_interleave(300)
    examples = InMemory(torch.rand(3000, 1, 8, 8), y)
    opened.data = replace(opened.data, validation=examples, test=examples)
    asked = listened(monkeypatch)
    evaluate_run(opened, Wanted(magnitude=False, laplace=False, shift=True))

    def labels(batches, most=None):
        return torch.cat([targets for _, targets in islice(batches(), most)])

    sets = [*asked["ood"].values(), *(levels[1] for levels in asked["shifts"].values())]
    for seen in [*map(labels, sets), labels(asked["validation"], 2)]:
        assert len(seen) in (1000, 2000) and seen.unique().tolist() == list(range(10))
    assert len(sets) == 7 and torch.equal(labels(asked["test"]), y)
    assert torch.equal(labels(asked["validation"]).sort().values, y)


@pytest.mark.parametrize(
    ("found", "made"),
    [
        ({"seconds": {"search": 1000.0}, "search": {"epochs": {"search": 100, "one_run": 20}}}, False),  # 20 epochs take 200 s
        ({"seconds": {"search": 1000.0}, "search": {"epochs": {"search": 100, "one_run": 10}}}, True),
        ({"seconds": {"search": 1000.0}, "search": {"epochs": {"search": 0, "one_run": 0}}}, True),
        ({"seconds": {"train": 100.0, "recover": 50.0}}, False),
        ({"seconds": {"train": 100.0, "recover": 10.0}}, True),
    ],
)
def test_magnitude_pruning_comes_unasked_where_it_takes_a_minute(opened, monkeypatch, found, made):
    for name, value in found.items():
        monkeypatch.setitem(opened.results, name, value)
    asked = listened(monkeypatch)
    monkeypatch.setattr(_evaluate._magnitude, "magnitude_pruned", lambda opened, **more: opened.dense)
    notes = evaluate_run(opened, Wanted(laplace=False))["notes"]
    assert [one.name for one in asked["more"]] == ["magnitude, as many weights"] * made
    assert any("magnitude pruning, whose training takes about" in line for line in notes) != made


def test_a_place_for_baselines_that_cannot_be_made_is_an_error_ahead_of_their_training(tmp_path):
    (tmp_path / "baselines").write_text("a file")
    with pytest.raises(OutputError, match="baselines: cannot be created"):
        kept(tmp_path, "member", {}, lambda: nn.Linear(2, 2), lambda: pytest.fail("it was trained"))
