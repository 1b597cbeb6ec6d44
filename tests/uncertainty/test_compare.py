"""The comparison behind `svdc evaluate`, on two blobs and on a line."""

import json
import math

import pytest
import torch
from small_models import mlp, widen
from torch import nn

import svdcompress as svdc
from svdcompress.errors import DataError, UsageError
from svdcompress.uncertainty import (
    compare,
    ensemble_contender,
    ensemble_predict,
    images_like,
    mc_predict,
    mean_contender,
    mean_predict,
    outside,
    plot,
    quality,
    regression_quality,
    shifts,
)
from svdcompress.uncertainty._baseline import RATES, dropout_baseline

NAMES = ["dense", "dense, temperature", "dense, MC dropout", "sparse, mean", "sparse, samples"]


def batches_of(x, y, size=64):
    return lambda: [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]


def blobs(n, seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=generator)
    centres = torch.tensor([[0.0, 2.0, 0, 0], [2.0, 0.0, 0, 0], [-2.0, -1.0, 0, 0]])
    return centres[y] + torch.randn(n, 4, generator=generator), y


def fitted(model, x, y, loss, steps=150):
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def classification():
    train, validation, test = blobs(300, 0), blobs(200, 1), blobs(200, 2)
    dense = fitted(mlp(4, 16, 3), *train, nn.functional.cross_entropy)
    sparse = svdc.convert(mlp(4, 16, 3))
    sparse.load_state_dict(dense.state_dict())
    widen(sparse, low=-5, high=-4, dead=0.2)
    result = compare(
        dense, sparse, batches_of(*test), batches_of(*validation), ood=outside(batches_of(*test)), samples=30, seed=1
    )
    return result, dense, sparse, test


def test_rows_and_keys(classification):
    result, *_ = classification
    assert [row["name"] for row in result["contenders"]] == NAMES
    assert json.loads(json.dumps(result)) == result
    assert result["temperature"] > 0 and result["dropout"]["inserted"] and result["dropout"]["rate"] in RATES
    for row in result["contenders"]:
        assert set(row["metrics"]) == {"error", "nll", "brier", "ece"}
        assert set(row["ood"]) == {"shuffled", "uniform"}
        assert ("mutual_information" in row["ood"]["uniform"]) == (row["name"] in (NAMES[2], NAMES[4]))
        assert row["rejection"]["loss"][0] * 100 == pytest.approx(row["metrics"]["error"])


def test_each_row_is_what_one_would_compute_by_hand(classification):
    result, dense, sparse, (x, y) = classification
    rows = {row["name"]: row["metrics"] for row in result["contenders"]}
    with torch.no_grad():
        logits = dense(x).double()
        assert rows["dense"] == pytest.approx(quality(logits.softmax(1), y))
        assert rows["dense, temperature"] == pytest.approx(quality((logits / result["temperature"]).softmax(1), y))
        assert rows["sparse, mean"] == pytest.approx(quality(sparse.eval()(x).double().softmax(1), y))
    generator = torch.Generator().manual_seed(1)
    mean = torch.cat([mc_predict(sparse, part, 30, generator=generator).mean for part in x.split(64)])
    assert rows["sparse, samples"] == pytest.approx(quality(mean, y))
    assert rows["dense, temperature"]["error"] == rows["dense"]["error"]


def test_inputs_without_a_target_and_classes_ruled_out_change_nothing():
    """Rows with only class -100 are neither sure nor right; a logit of -inf means that there is no such class."""

    class Tagger(nn.Module):
        def __init__(self, more):
            super().__init__()
            self.layer, self.more = nn.Linear(4, 3), more

        def forward(self, x):
            z = self.layer(x).movedim(-1, 1)
            return torch.cat([z, torch.full_like(z[:, :1], -torch.inf)], 1) if self.more else z

    x, y = blobs(160, 0)
    x, y = x.view(40, 4, 4), y.view(40, 4)
    results = []
    for more in (False, True):
        torch.manual_seed(0)
        dense, sparse = Tagger(more).eval(), svdc.convert(Tagger(more), log_sigma2=-3.0).eval()
        sparse.load_state_dict({f"layer.{key}": value for key, value in dense.layer.state_dict().items()}, strict=False)
        bare = torch.cat([y, torch.full_like(y, -100)]) if more else y
        padded = torch.cat([x, torch.zeros_like(x)]) if more else x
        settings = {"samples": 10, "shifts": {"none": [batches_of(padded, bare, 20)] * 2}, "replicates": 50}
        results.append(compare(dense, sparse, batches_of(padded, bare, 20), batches_of(x, y, 20), **settings))
    for row, other in zip(*(result["contenders"] for result in results), strict=True):
        if row["name"] in ("dense", "sparse, mean"):
            for key in ("metrics", "rejection", "selective"):
                assert numbers(other[key]) == pytest.approx(numbers(row[key]), rel=1e-4, abs=1e-6), (row["name"], key)
    assert results[1]["shift"]["inputs"] == 40
    assert results[1]["temperature"] == pytest.approx(results[0]["temperature"], rel=1e-3)


def numbers(part):
    """All numbers in a part of a result, in order."""
    if isinstance(part, dict):
        part = list(part.values())
    if isinstance(part, list):
        return [number for one in part for number in numbers(one)]
    return [part] if isinstance(part, int | float) else []


def test_uncertain_inputs_are_more_often_wrong(classification):
    result, *_ = classification
    for row in result["contenders"]:
        assert row["rejection"]["loss"][10] < 0.7 * row["rejection"]["loss"][0]


def test_pictures(classification, tmp_path):
    files = plot(classification[0], tmp_path / "plots")
    assert [file.name for file in files] == ["reliability.png", "answered.png", "out_of_distribution.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 5000 for file in files)


def test_the_dense_model_is_left_alone(classification):
    _, dense, *_ = classification
    assert not any("dropout" in name for name, _ in dense.named_modules())


def test_a_models_own_dropout_is_used():
    dense = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 2))
    model, rate, inserted = dropout_baseline(dense, lambda model: pytest.fail("no rate is to be chosen"))
    assert not inserted and rate is None and model[1].p == 0.3 and type(dense[1]) is nn.Dropout


def test_dropout_of_rate_0_is_none():
    dense = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0), nn.Linear(8, 2))
    model, rate, inserted = dropout_baseline(dense, lambda model: abs(model[2].mc_dropout.p - 0.1))
    assert inserted and rate == 0.1
    with svdc.sampling(model.eval()):
        assert not torch.equal(*(model(torch.ones(2, 4)) for _ in range(2)))


def test_dropout_that_is_put_in_drops_the_layers_inputs():
    dense = mlp(4, 16, 3)
    model, rate, inserted = dropout_baseline(dense, lambda model: abs(model[2].mc_dropout.p - 0.2))
    assert inserted and rate == 0.2
    x = torch.randn(6, 4)
    torch.testing.assert_close(model.eval()(x), dense(x))
    with torch.no_grad(), svdc.sampling(model, generator=torch.Generator().manual_seed(0)):
        draws = model(x.repeat(4000, 1)).view(4000, 6, 3)
        hidden = dense[1](dense[0](x))
        variance = (hidden**2) @ (dense[2].weight ** 2).T * 0.2 / 0.8
    assert (draws.var(0) / variance - 1).abs().max() < 0.15


@pytest.mark.parametrize("task", ["regression", "gaussian"])
def test_regression(task, tmp_path):
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 240)[:, None]
    y = (x.sin() + 0.1 * torch.randn(x.shape))[:, 0]
    outputs = 1 if task == "regression" else 2

    def loss(output, target):
        mean, log_variance = (output, output * 0) if outputs == 1 else output.chunk(2, 1)
        return (log_variance + (mean.squeeze(1) - target).square()[:, None] * (-log_variance).exp()).mean()

    dense = fitted(mlp(1, 16, outputs, activation=nn.Tanh), x, y, loss, 300)
    sparse = svdc.convert(mlp(1, 16, outputs, activation=nn.Tanh), log_sigma2=-7)
    sparse.load_state_dict(dense.state_dict())
    test, validation = batches_of(x[::2], y[::2]), batches_of(x[1::2], y[1::2])
    result = compare(dense, sparse, test, validation, task=task, samples=20, scale=3.0)
    rows = {row["name"]: row for row in result["contenders"]}
    assert list(rows) == [name for name in NAMES if "temperature" not in name]
    with torch.no_grad():
        output, held = dense(x[::2]).double(), dense(x[1::2]).double()
    noise = (held[:, 0] - y[1::2]).square().mean() if task == "regression" else output[:, 1].exp()
    want = regression_quality(3 * output[:, 0], (9 * noise).expand(120), 3 * y[::2])
    metrics = rows["dense"]["metrics"]
    assert {name: metrics[name] for name in want} == pytest.approx(want, rel=1e-4) and set(metrics) - set(want) == {"r2"}
    assert metrics["r2"] == pytest.approx(
        1 - float((output[:, 0] - y[::2]).square().mean() / y[::2].var(correction=0)), rel=1e-4
    )
    for row in rows.values():
        assert row["metrics"]["coverage"] > 0.85 and row["metrics"]["nll"] < 1
    assert rows["dense"]["rejection"] is None or task == "gaussian"
    assert rows["sparse, samples"]["rejection"]["score"] == "variance"
    assert plot(result, tmp_path)


def test_binary_with_a_temperature():
    x, y = blobs(400, 0)
    y = (y > 0).long()
    dense = fitted(mlp(4, 8, 1), x, y, lambda out, y: nn.functional.binary_cross_entropy_with_logits(out[:, 0], y.float()))
    sparse = svdc.convert(mlp(4, 8, 1), log_sigma2=-5)
    sparse.load_state_dict(dense.state_dict())
    test = batches_of(*(lambda x, y: (x, (y > 0).float()))(*blobs(200, 1)))
    result = compare(dense, sparse, test, test, task="binary", samples=10)
    assert [row["name"] for row in result["contenders"]] == NAMES
    assert result["contenders"][1]["metrics"]["nll"] <= result["contenders"][0]["metrics"]["nll"] + 1e-12
    assert "mutual_information" not in result["contenders"][0]["ood"]


def test_the_sparse_model_alone():
    x, y = blobs(50, 0)
    result = compare(None, widen(svdc.convert(mlp(4, 8, 3))), batches_of(x, y), batches_of(x, y), samples=5)
    assert [row["name"] for row in result["contenders"]] == NAMES[3:]
    assert result["temperature"] is None and result["dropout"] is None


def test_shuffled_and_uniform_inputs_keep_what_they_should():
    x = torch.rand(6, 3, 5, 4)
    sets = outside(batches_of(x, torch.zeros(6), 4))
    shuffled = torch.cat([part for part, _ in sets["shuffled"]()])
    assert shuffled.shape == x.shape and not torch.equal(shuffled, x)
    pixels, moved = x.flatten(2).transpose(1, 2), shuffled.flatten(2).transpose(1, 2)  # colors stay together
    for before, after in zip(pixels, moved, strict=True):
        assert sorted(map(tuple, before.tolist())) == sorted(map(tuple, after.tolist()))
    uniform = torch.cat([part for part, _ in sets["uniform"]()])
    assert uniform.shape == x.shape and x.min() <= uniform.min() and uniform.max() <= x.max()
    again = torch.cat([part for part, _ in sets["uniform"]()])
    assert torch.equal(uniform, again)


def test_sets_from_elsewhere_have_a_limit():
    x = torch.rand(10, 3)
    few = outside(batches_of(x, torch.zeros(10), 3), limit=6)
    assert {name: sum(len(part) for part, _ in batches()) for name, batches in few.items()} == {"shuffled": 6, "uniform": 6}


def test_images_of_other_data_become_inputs_of_the_run():
    colour = torch.rand(7, 3, 8, 8)
    like = lambda images, **preprocessing: torch.cat(  # noqa: E731
        [part for part, _ in images_like(batches_of(images, torch.zeros(7), 3), preprocessing, limit=5)()]
    )
    luma = 0.299 * colour[:6, 0] + 0.587 * colour[:6, 1] + 0.114 * colour[:6, 2]  # whole batches, until there are at least 5
    steps = [{"normalize": {"mean": [0.5], "std": [0.25]}}, "flatten"]
    got = like(colour, input_shape=[1, 8, 8], transform=steps)
    torch.testing.assert_close(got, ((luma - 0.5) / 0.25).flatten(1))
    small = like(colour, input_shape=[1, 4, 4])
    torch.testing.assert_close(small.mean(), luma.mean(), rtol=0.02, atol=0)
    assert small.shape == (6, 1, 4, 4) and small.std() < luma.std()  # an average, not every second pixel
    grey = torch.rand(7, 1, 8, 8)
    assert torch.equal(like(grey, input_shape=[3, 8, 8]), grey[:6].expand(-1, 3, -1, -1))
    with pytest.raises(DataError, match="the run's inputs are not images"):
        like(colour, input_shape=[64])
    with pytest.raises(DataError, match="are not images, which the run needs"):
        like(torch.rand(7, 5), input_shape=[1, 8, 8])


def test_the_mean_prediction_is_the_models_own():
    model, x = mlp(4, 6, 3).train(), torch.randn(7, 4)
    got = mean_predict(model, x, temperature=2.0)
    torch.testing.assert_close(got.mean, (model(x) / 2).double().softmax(1).detach())
    assert got.samples == 1 and (got.epistemic == 0).all() and model.training


def test_differences_are_paired_and_from_the_calibrated_dense_model(classification):
    result, *_ = classification
    assert result["reference"] == "dense, temperature"
    base = result["contenders"][1]["metrics"]
    for row in result["contenders"]:
        for name, found in row["difference"].items():
            assert found["value"] == pytest.approx(row["metrics"][name] - base[name], abs=1e-5)
            assert found["low"] <= found["value"] + 1e-9 or name == "ece"  # its bootstrap is biased upwards
    assert all(found["low"] == found["high"] == 0 for found in result["contenders"][1]["difference"].values())


def test_the_share_answered_is_that_of_a_threshold_on_the_confidence(classification):
    result, dense, _, (x, y) = classification
    with torch.no_grad():
        sure, guess = dense(x).double().softmax(1).max(1)
    for entry in result["contenders"][0]["selective"]["answered"]:
        if entry["threshold"] is not None:
            kept = 1 - sure <= entry["threshold"] + 1e-12
            assert float(kept.double().mean()) == pytest.approx(entry["share"])
            assert float((guess != y)[kept].double().mean()) <= entry["loss"] + 1e-12


def test_energy_is_that_of_the_logits(classification):
    _, dense, _, (x, _) = classification
    contender = mean_contender("dense", dense, "classification", temperature=2.0)
    with torch.no_grad():
        want = [-2 * math.log(sum(math.exp(float(z) / 2) for z in row)) for row in dense(x)]
    assert contender.scores["energy"](x).tolist() == pytest.approx(want, rel=1e-5)
    assert not mean_contender("dense", dense, "binary").scores


def test_an_ensemble_averages_probabilities():
    torch.manual_seed(3)
    make = lambda outputs: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs))  # noqa: E731
    models, x = [make(3) for _ in range(3)], torch.randn(7, 4)
    got = ensemble_predict(models, x, task="classification")
    with torch.no_grad():
        each = torch.stack([model(x).double().softmax(1) for model in models])
    entropy = lambda p: -(p * p.log()).sum(-1)  # noqa: E731
    torch.testing.assert_close(got.mean, each.mean(0))
    torch.testing.assert_close(got.mutual_information, entropy(each.mean(0)) - entropy(each).mean(0))
    torch.testing.assert_close(got.epistemic, each.var(0, unbiased=False))
    assert got.samples == 3
    values = ensemble_predict([make(1), make(1)], x, task="regression")
    assert values.mean.shape == (7, 1) and (values.epistemic > 0).all()
    with pytest.raises(UsageError, match="at least one member"):
        ensemble_predict([], x, task="regression")


def test_corrupted_data_level_by_level(classification, tmp_path):
    _, dense, sparse, test = classification
    levels = shifts(batches_of(*test))
    more = [ensemble_contender([dense, dense], "classification", "the same twice")]
    found = compare(dense, sparse, batches_of(*test), batches_of(*test), shifts=levels, more=more, samples=5)
    shift = found["shift"]
    assert found["contenders"][3]["name"] == "deep ensemble of 2" and found["contenders"][3]["about"] == "the same twice"
    assert list(shift["curves"]) == ["noisy values", "missing values"] and shift["inputs"] == 200
    for kind, by_name in shift["curves"].items():
        for name, points in by_name.items():
            assert points[0]["error"] < points[5]["error"], (kind, name)
        x, y = (torch.cat(parts) for parts in zip(*levels[kind][4](), strict=True))
        with torch.no_grad():
            want = quality(dense(x).softmax(1), y)
        for name in ("dense", "deep ensemble of 2"):
            assert {key: by_name[name][4][key] for key in want} == pytest.approx(want, rel=1e-4)
    mean = shift["mean"]["dense"]
    every = [point["ece"] for kind in shift["curves"] for point in shift["curves"][kind]["dense"][1:]]
    assert mean["ece"] == pytest.approx(sum(every) / len(every), rel=1e-4)
    assert shift["mean"]["dense, temperature"]["difference"]["nll"]["value"] == 0
    assert [file.name for file in plot(found, tmp_path)][-1] == "shift.png"
