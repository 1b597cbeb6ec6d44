"""Whole runs on a GPU with settings that other tests only run on the CPU."""

import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.layers import variational_layers
from svdcompress.pipeline import run
from svdcompress.recipe import load_recipe

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

QUICK = ["model.args={sizes: [64, 24, 10]}", "data.limit=400", "dense.epochs=3", "dense.lr=0.01", "train.epochs=4"]
QUICK += ["train.lr=0.01", "recover.epochs=2", "uncertainty.samples=5", "report.latency=false", "report.html=false"]
QUICK += ["export.monte_carlo=false", "device=cuda"]


def ran(folder, *sets):
    results = run(load_recipe("digits", [*QUICK, *sets]), folder / "run")
    assert results["device"].startswith("cuda") and results["verified"]["passed"] is True
    return results


def rows_of(results, stage):
    return [row for row in results["history"] if row["stage"] == stage]


@pytest.mark.parametrize("posterior", ["scaled", "refit", "laplace-diagonal", "auto"])
def test_a_posterior_is_chosen_on_the_device(tmp_path, posterior):
    results = ran(tmp_path, f"calibrate.posterior={posterior}", "calibrate.epochs=2", "calibrate.coverage=0.8")
    tried = [one["name"] for one in results["calibrate"]["tried"]]
    assert tried[0] == "variational" and (len(tried) == 4 if posterior == "auto" else posterior in tried)
    assert all(one["nll"] is not None for one in results["calibrate"]["tried"])


def test_recovery_learns_from_the_layers_of_the_dense_network(tmp_path):
    results = ran(tmp_path, "recover.distill={weight: 0.5, layers: 1.0}", "train.beta={final: 0.3}", "recover.epochs=3")
    losses = [row["loss"] for row in rows_of(results, "recover")]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert not any("distill.layers" in line for line in results["warnings"])


@pytest.mark.parametrize("stage", ["train", "recover"])
def test_teachers_are_asked_on_the_device(tmp_path, stage):
    results = ran(tmp_path, f"{stage}.distill.weight=0.5", "train.shrink=50%", "train.keep=best")
    assert len(rows_of(results, stage)) == (4 if stage == "train" else 2)


def test_compiled_steps_end_where_plain_ones_do(tmp_path):
    """Noise is drawn in another order, so the results are not bit-identical."""
    plain = ran(tmp_path / "plain")
    compiled = ran(tmp_path / "compiled", "train.compile=true")
    for row, other in zip(rows_of(compiled, "train"), rows_of(plain, "train"), strict=True):
        assert row["nll"] == pytest.approx(other["nll"], rel=0.2, abs=0.15)
        assert row["kl"] is None or row["kl"] == pytest.approx(other["kl"], rel=0.05)


@pytest.mark.parametrize("share", ["weight", "input"])
def test_the_smallest_model_within_a_budget_is_searched_for(tmp_path, share):
    sets = ["search.max_drop=20", "search.trials=2", "search.levels=2", f"convert.share={share}", "train.beta={final: 0.3}"]
    results = ran(tmp_path, *sets)
    assert 1 <= len(results["search"]["trials"]) <= 2 and results["search"]["epochs"]["search"] > 0


def test_a_search_without_any_training(tmp_path):
    results = ran(tmp_path, "search.goal=macs=2x", "train.epochs=0", "recover.epochs=0", "convert.share=input")
    assert results["compression"]["macs"] >= 1.9


def test_classes_weigh_as_they_are_told(tmp_path):
    for weights in ("balanced", str([1.0] * 9 + [5.0])):
        results = ran(tmp_path / weights[:4], f"loss.class_weights={weights}")
        losses = [row["loss"] for row in rows_of(results, "dense")]
        assert losses[-1] < losses[0]


@pytest.mark.parametrize(("prior", "posterior"), [("ard", "rank-one"), ("log-uniform", "independent")])
def test_priors_and_posteriors_in_a_run(tmp_path, prior, posterior):
    results = ran(tmp_path, f"convert.posterior={posterior}", f"convert.prior={prior}", "train.optimizer=sgd", "train.clip=1")
    model = svdc.load_run(tmp_path / "run").model
    assert {str(layer.prior) for _, layer in variational_layers(model)} == {prior}
    assert {str(layer.posterior) for _, layer in variational_layers(model)} <= {posterior, "independent"}
    assert results["compression"]["nonzero"] >= 1


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_small_files_of_a_run(tmp_path, precision):
    ran(tmp_path, f"export.precision={precision}")
    assert (tmp_path / "run" / f"model_{precision}.onnx").is_file()


def test_no_number_is_kept_by_steps_that_are_not_finite(tmp_path):
    """The loss is checked rarely on a GPU; the epoch is repeated to find the step."""
    from svdcompress.errors import TrainingError

    with pytest.raises(TrainingError, match=r"train: the loss is (nan|inf) at step \d+ \(epoch 1\)"):
        ran(tmp_path, "train.lr=1e38")


def images(n=240):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, 2, 8, 8, generator=generator)
    return x, (3 * x.mean((1, 2, 3)) * 10).long() % 3


SETTINGS = {"train.epochs": 2, "recover.epochs": 1, "dense.epochs": 2, "uncertainty.samples": 5, "device": "cuda"}
SETTINGS |= {"report.latency": False, "report.html": False, "export.monte_carlo": False}


def smaller(model, data, folder, **more):
    settings = SETTINGS | more.pop("settings", {})
    found = svdc.sparsify(model, data, trained=False, settings=settings, out=folder / "run", **more)
    assert found.results["verified"]["passed"] is True and found.results["device"].startswith("cuda")
    return found


class Residual(nn.Module):
    """Normalized convolutions in parallel with an identity, a depthwise convolution, and group norms."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.each = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.mix = nn.Sequential(nn.Conv2d(8, 24, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 8, 1))
        self.last, self.group, self.head = nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        x = x + self.last(self.mix(self.each(x))).relu()
        return self.head(self.group(x).mean((2, 3)))


class Volumes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Conv3d(1, 6, 3, padding=1), nn.BatchNorm3d(6), nn.Conv3d(6, 4, 2)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.norm(self.first(x.reshape(-1, 1, 2, 8, 8))).relu()
        return self.head(self.second(x).mean((2, 3, 4)))


class Series(nn.Module):
    """A recurrence between variational layers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        self.rnn, self.head = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.rnn(self.first(x.reshape(-1, 8, 16)))[0][:, -1])


class Patches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 8)
        self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 1)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.body(self.first(x.reshape(-1, 8, 16))).mean(1))


NETS = {"residual": Residual, "volumes": Volumes, "series": Series, "patches": Patches}


@pytest.mark.parametrize("norms", ["batch", "keep"])
def test_running_statistics_are_those_of_the_training(tmp_path, norms):
    torch.manual_seed(0)
    found = smaller(Residual(), images(), tmp_path, settings={"train.norms": norms, "recover.norms": norms})
    assert all(bool(tensor.isfinite().all()) for tensor in found.model.state_dict().values() if tensor.is_floating_point())


@pytest.mark.parametrize("name", NETS)
def test_units_go_from_networks_of_each_kind(tmp_path, name):
    """Ranked by gradients in eval(), pruned, and recovered; the given model is on the device and unchanged."""
    torch.manual_seed(0)
    model = NETS[name]().cuda()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    settings = {"search.trials": 1, "search.levels": 1, "train.beta.final": 1e-6, "convert.share": "input"}
    found = smaller(model, images(), tmp_path, goal="parameters=1.3x", settings=settings)
    assert found.results["compression"]["parameters"] > 1.2
    assert all(value.is_cuda and torch.equal(value, before[key]) for key, value in model.state_dict().items())


class Plain(nn.Module):
    """A tensor that is not a buffer, so it does not move with the model."""

    def __init__(self, there):
        super().__init__()
        self.scale = torch.ones(128).to(there)
        self.first, self.head = nn.Linear(128, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.first(x.flatten(1) * self.scale).relu())


def test_a_tensor_that_does_not_travel_is_an_error_of_the_model(tmp_path):
    """torch's own message about mixed devices, in an error of ours that names the stage."""
    from svdcompress.errors import SvdcError

    if torch.device("cuda").type == "cpu":
        pytest.skip("nothing travels on one device")
    with pytest.raises(SvdcError) as raised:
        smaller(Plain("cpu"), images(), tmp_path)
    assert "cuda" in str(raised.value) and "cpu" in str(raised.value)


@pytest.mark.parametrize("loss", ["mse", "gaussian-nll", "binary"])
def test_other_tasks(tmp_path, loss):
    x, _ = images()
    flat = x.flatten(1)
    values = torch.stack([flat[:, :60].mean(1), flat[:, 60:].mean(1)], 1) * 10
    outputs, y = {"mse": (2, values), "gaussian-nll": (4, values), "binary": (2, (values > 5).float())}[loss]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(128, 12), nn.Tanh(), nn.Linear(12, outputs))
    more = {"calibrate.posterior": "laplace-diagonal", "recover.distill.weight": 0.5}
    found = smaller(model, (x, y), tmp_path, loss=loss, settings=more)
    assert found.results["calibrate"]["tried"][-1]["nll"] is not None
