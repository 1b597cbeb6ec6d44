"""Tables are standardized automatically, and the files read and return their columns in original units, against plain numpy."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from svdcompress.errors import Interrupted
from svdcompress.export import read_metadata
from svdcompress.pipeline import baked, open_run, run
from svdcompress.predict import predict_run
from svdcompress.recipe import DataSection, load_recipe
from svdcompress.sources import open_data
from svdcompress.train import evaluate, fit

ROWS = 300


@pytest.fixture
def houses(tmp_path, monkeypatch):
    """A table of prices around 250,000 with columns of very different scales, one of them with two text values."""
    rng = np.random.default_rng(0)
    area, year, kind = rng.normal(120, 40, ROWS), rng.integers(1950, 2020, ROWS), rng.integers(0, 2, ROWS)
    price = 2000 * area + 900 * (year - 1985) + 30_000 * kind + rng.normal(0, 2000, ROWS)
    lines = [f"{a:.2f},{y},{('flat', 'house')[k]},{p:.0f}" for a, y, k, p in zip(area, year, kind, price, strict=True)]
    (tmp_path / "houses.csv").write_text("\n".join(["area,year,kind,price", *lines]) + "\n")
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\ndef make(outputs=1):\n"
        "    return nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, outputs))\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def section(**more):
    return DataSection(name="csv:houses.csv", target="price", **more)


def plain():
    """The table as numbers (rows, area, year, flat, house) and prices, read without the package."""
    with open("houses.csv") as file:
        rows = list(csv.DictReader(file))
    x = [[float(r["area"]), float(r["year"]), r["kind"] == "flat", r["kind"] == "house"] for r in rows]
    return np.array(x, dtype=np.float32), np.array([float(r["price"]) for r in rows])


def test_columns_and_target_have_mean_0_and_deviation_1(houses):
    data = open_data(section(), "regression")
    x, y = data.train.inputs, data.train.targets
    assert x[:, :2].mean(0).abs().max() < 1e-4 and (x[:, :2].std(0, correction=0) - 1).abs().max() < 1e-4
    assert set(x[:, 2:].flatten().tolist()) == {0.0, 1.0}  # categories are unchanged
    assert abs(float(y.mean())) < 1e-4 and abs(float(y.std()) - 1) < 1e-4
    of_text, scaled = data.notes
    assert "kind (2 values)" in of_text and "and so is price" in scaled and "data.standardize=false" in scaled
    assert not data.warnings


def scaled(data):
    return [note for note in data.notes if "standardized" in note]


def test_what_is_set_wins(houses):
    raw = open_data(section(standardize=False), "regression")
    assert raw.target_scale is None and raw.train.inputs[:, 1].min() >= 1950 and not scaled(raw)
    assert not raw.warnings  # as requested
    assert open_data(section(target_scale="none"), "regression").target_scale is None
    own = open_data(section(transform=[{"scale": 0.5}]), "regression")
    assert own.preprocessing["transform"] == [{"scale": 0.5}] and own.target_scale is None and not scaled(own)
    classes = open_data(DataSection(name="csv:houses.csv", target="kind"), "classification")
    assert classes.target_scale is None and classes.notes[0].count("price") == 0
    assert classes.train.inputs.std(0).max() < 1.1


def test_targets_of_other_scales_and_columns_too_large_for_float32_are_told_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    seconds, small, large = 1.7e9 + 3600 * rng.random(400), rng.normal(0, 1, 400), rng.normal(1000, 100, 400)
    lines = [
        f"{t:.3f},{year},{a:.5f},{b:.4f}"
        for t, year, a, b in zip(seconds, rng.integers(1950, 2020, 400), small, large, strict=True)
    ]
    Path("t.csv").write_text("\n".join(["seconds,year,a,b", *lines]), encoding="utf-8")
    found = open_data(DataSection(name="csv:t.csv", target="a,b"), "regression")
    lost, uneven = sorted(found.warnings)
    assert "column 'seconds': of 400 different values" in lost and "because values reach 1.7e+09" in lost
    left = int(lost.split("values ")[1].split(" ")[0])
    assert left == len(np.unique(seconds.round(3).astype(np.float32))) < 100
    assert "the 2 targets have means from" in uneven and "standard deviations that are far too large" in uneven
    assert "and so are a, b together, by one mean and one standard deviation" in found.notes[0]
    alone = open_data(DataSection(name="csv:t.csv", target="b", features=["year", "a"]), "regression")
    assert not alone.warnings and "and so is b; predict" in alone.notes[0]


def test_unscaled_values_that_are_no_table_are_told_of(houses):
    x, price = plain()
    np.savez("houses.npz", x=x, y=price.astype(np.float32))
    columns, target = open_data(DataSection(name="npz:houses.npz"), "regression").warnings
    assert "values up to 2.02e+03" in columns and "--set data.standardize=true" in columns
    assert "a standard deviation of 8.7" in target and "--set data.target_scale=standardize" in target
    both = open_data(DataSection(name="npz:houses.npz", standardize=True), "regression")
    assert not both.warnings and abs(float(both.train.inputs.mean())) < 1e-4 and both.target_scale is not None
    np.savez("small.npz", x=x / 2000, y=price / 1e5)
    assert not open_data(DataSection(name="npz:small.npz"), "regression").warnings


QUICK = ["dense.epochs=30", "dense.lr=0.02", "train.epochs=2", "recover.epochs=1", "uncertainty.samples=5", "report.html=false"]
QUICK += ["report.latency=false", "device=cpu", "train.beta.final=1e-6"]


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "outputs"), [("mse", 1), ("gaussian-nll", 2)])
def test_the_files_take_columns_and_give_prices(houses, loss, outputs):
    onnxruntime = pytest.importorskip("onnxruntime")
    given = ["data=csv:houses.csv", "data.target=price", f"model={{name: ./net.py:make, args: {{outputs: {outputs}}}}}"]
    results = run(load_recipe(None, [*given, f"loss={loss}", *QUICK]), "out")
    assert results["notes"] and results["sparse"]["metrics"]["rmse"] < 20_000  # in the target's own units
    x, price = plain()
    assert price.std() > 60_000
    out = onnxruntime.InferenceSession("out/model.onnx").run(None, {"input": x})[0]
    assert np.sqrt(np.mean((out[:, 0] - price) ** 2)) < 20_000
    test = open_run("out").data.test  # standardized columns and prices
    mean, std = (np.array(open_run("out").preprocessing["transform"][0]["normalize"][name]) for name in ("mean", "std"))
    shift, scale = open_run("out").preprocessing["target_scale"]
    given, paid = (test.inputs.numpy() * std + mean).astype(np.float32), test.targets.numpy().ravel() * scale + shift
    told = onnxruntime.InferenceSession("out/model.onnx").run(None, {"input": given})[0][:, 0]
    r2 = 1 - np.sum((paid - told) ** 2) / np.sum((paid - np.mean(paid)) ** 2)  # in prices
    assert results["sparse"]["metrics"]["r2"] == pytest.approx(r2, rel=1e-3)
    with torch.no_grad():  # from the checkpoint, standardized by hand
        done = open_run("out", trust_code=True).preprocessing
        numbers = done["transform"][0]["normalize"]
        prepared = (torch.tensor(x) - torch.tensor(numbers["mean"])) / torch.tensor(numbers["std"])
        shift, scale = done["target_scale"]
        expected = open_run("out", trust_code=True).model(prepared)[:, 0] * scale + shift
    assert np.abs(out[:, 0] - expected.numpy()).max() < 50  # prices in float32
    left = read_metadata("out/model_mc.onnx")["preprocessing"]
    assert left["transform"] == [] and left["target_scale"] is None and left["columns"] == ["area", "year", "kind"]
    ways = {"torch": False, "onnx": True}
    files = [predict_run("out", "houses.csv", f"{w}.npz", samples=400, onnx=o, trust_code=True)[0] for w, o in ways.items()]
    torch_, onnx_ = (np.load(file) for file in files)
    assert np.sqrt(np.mean((torch_["mean"][:, 0] - price) ** 2)) < 20_000
    assert np.corrcoef(torch_["mean"][:, 0], onnx_["mean"][:, 0])[0, 1] > 0.999
    assert np.median(torch_["variance"] / onnx_["variance"]) == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("gaussian", [False, True])
def test_a_model_in_units_is_the_model_with_its_numbers_put_in(gaussian):
    torch.manual_seed(0)
    model = nn.Linear(3, 2 if gaussian else 1)
    columns = {"mean": [1.0, -2.0, 300.0], "std": [0.5, 2.0, 40.0]}
    done = {"columns": ["a", "b", "c"], "standardized": True, "transform": [{"normalize": columns}], "input_shape": [3]}
    units = baked({**done, "target_scale": [7.0, 3.0]}, "gaussian" if gaussian else "regression")
    x = torch.randn(5, 3)
    raw = units.inputs(x)
    assert torch.allclose(raw, x * torch.tensor([0.5, 2.0, 40.0]) + torch.tensor([1.0, -2.0, 300.0]))
    with torch.no_grad():
        plain, found = model(x), units.model(model)(raw)
    assert torch.allclose(found[:, 0], 7 + 3 * plain[:, 0], atol=1e-4)
    if gaussian:
        assert torch.allclose(found[:, 1].exp(), 9 * plain[:, 1].exp(), rtol=1e-4)
    assert units.tau(4.5) == 0.5 and baked({}, "regression").tau(4.5) == 4.5
    assert units.preprocessing["transform"] == [] and units.preprocessing["target_scale"] is None
    assert baked({}, "regression").model(model) is model
    other = baked({**done, "transform": [*done["transform"], {"scale": 2}], "target_scale": None}, "regression")
    assert other.model(model) is model and len(other.preprocessing["transform"]) == 2  # the files cannot do what comes after


def test_a_run_of_before_keeps_its_columns(houses, tmp_path):
    """Its manifest does not mention standardized columns: it was trained on the original ones."""
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "recipe.yaml").write_text("data: {name: 'csv:houses.csv', target: price}\nloss: mse\nmodel: mlp\n")
    (tmp_path / "old" / "model.safetensors").write_bytes(b"")
    opened = open_run("old")
    opened.__dict__["_extra"] = {"preprocessing": {"columns": ["area", "year", "kind"], "transform": []}}
    assert opened.data.train.inputs[:, 1].min() >= 1950 and opened.data.target_scale is None
    opened = open_run("old")
    opened.__dict__["_extra"] = {"preprocessing": {"columns": ["area"], "transform": [], "standardized": True}}
    assert opened.data.target_scale is not None


def test_standardised_columns_train_where_raw_ones_do_not(houses):
    from svdcompress.likelihoods import make_loss
    from svdcompress.recipe import LossSection, Training
    from svdcompress.train import fit

    found = {}
    for standardize in (True, False):
        torch.manual_seed(0)
        data = open_data(section(standardize=standardize), "regression")
        model = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 1))
        fit(model, data.train, make_loss(LossSection(name="mse")), Training(epochs=20, lr=0.01), device="cpu")
        found[standardize] = evaluate(model, data.validation, "regression", scale=data.target_scale)["rmse"]
    assert found[True] < 0.2 * found[False]


def test_a_noise_that_is_set_is_of_the_target_in_its_own_units(houses, monkeypatch):
    """1 / variance of prices; the loss sees prices with standard deviation 1."""
    seen = {}

    def stopped(model, data, loss, settings, **more):
        if more["stage"] == "train":
            seen["loss"] = loss
            raise Interrupted("seen")
        return fit(model, data, loss, settings, **more)

    monkeypatch.setattr("svdcompress.pipeline._trainer.fit", stopped)
    fields = ["model.name=net.py:make", "data.name=csv:houses.csv", "data.target=price", "loss.name=mse", "dense.epochs=1"]
    with pytest.raises(Interrupted):
        run(load_recipe(None, [*fields, "loss.tau=2.5e-7"]), houses / "run")
    data = open_data(section(), "regression")
    wrong, loss = data.train.targets[:, None] + 0.1, seen["loss"]
    price = torch.distributions.Normal(0.0, 2000.0)  # 1 / 2000^2 = 2.5e-7
    off = 0.1 * data.target_scale[1]  # 0.1 deviations in prices
    more = float(price.log_prob(torch.zeros(1)) - price.log_prob(torch.tensor([off])))
    assert float(loss(wrong, data.train.targets) - loss(wrong - 0.1, data.train.targets)) == pytest.approx(more, rel=1e-4)
