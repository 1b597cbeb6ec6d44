"""The experiments' claims, on reduced runs."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from svdcompress.errors import OutputError, RecipeError
from svdcompress.experiments import Context, run, run_recipe
from svdcompress.experiments import _co2 as co2
from svdcompress.experiments import _leak as leak
from svdcompress.experiments import _rotated_digit as rotated
from svdcompress.experiments import _vae as vae
from svdcompress.recipe import DataSection, load_recipe
from svdcompress.uncertainty import Prediction

PLACES = (os.environ.get("SVDC_MNIST", ""), "data/mnist", "../shared/data/mnist")
MNIST = next((Path(place) for place in PLACES if place and (Path(place) / "raw").is_dir()), None)
needs_mnist = pytest.mark.skipif(MNIST is None, reason="MNIST is not here")


def ran(name, settings, folder, **context):
    results = run(name, settings, Context(folder / name, **context))
    assert json.loads((folder / name / "report.json").read_text()) == results
    for picture in results["pictures"]:
        for key in ("file", "dark"):
            assert (folder / name / picture[key]).read_bytes().startswith(b"\x89PNG")
        assert picture["title"] and picture["caption"]
    assert (folder / name / "report.html").read_text().count("data:image/png") == 2 * len(results["pictures"]) > 0
    return results


@pytest.mark.slow
def test_the_variational_posterior_is_the_exact_one(tmp_path):
    results = ran("bayes-linear", {"epochs": 900}, tmp_path)
    design = {key: torch.tensor(value) for key, value in results["designs"]["orthogonal"].items()}
    std = design["exact_variance"].sqrt()
    assert ((design["mean"] - design["exact_mean"]).abs() < 0.25 * std).all()
    assert (design["variance"] / design["exact_variance"] - 1).abs().max() < 0.25
    # The closed form of the optimum, where it has one.
    plain = design["z2"] > 2
    assert plain.sum() >= 5
    assert ((design["mean"] - design["best_mean"]).abs() < 0.25 * std)[plain].all()
    assert (design["variance"] / design["best_variance"] - 1).abs()[plain].max() < 0.25
    assert (design["log_alpha"] + (design["z2"] - 1).log()).abs()[plain].max() < 0.6
    assert design["kept"].tolist()[:5] == [True] * 5 and not any(design["kept"][design["z2"] < 0.9])
    # A correlated design: the means are exact, the variances those of a weight given the others.
    design = {key: torch.tensor(value) for key, value in results["designs"]["correlated"].items()}
    assert ((design["mean"] - design["exact_mean"]).abs() < 0.25 * design["exact_variance"].sqrt()).all()
    assert (design["variance"] / design["conditional_variance"] - 1).abs().max() < 0.25
    assert (design["variance"] < design["exact_variance"])[:5].all()


@pytest.mark.slow
def test_bands_at_this_size_are_wider_beyond_the_record_and_coverage_is_told(tmp_path):
    pytest.importorskip("statsmodels")
    settings = {"width": 64, "layers": 2, "epochs": 500, "sparse_epochs": 800, "years": 6, "scale": 5.0, "batch_size": 128}
    results = ran("co2", settings, tmp_path)
    nets = results["nets"]
    assert len(nets) == 9 and nets["dense, ReLU"]["band_beyond_ppm"] == 0
    assert nets["dropout 0.1, ReLU, weight averaging"]["band_beyond_ppm"] == 0
    widening = ("Gaussian process", "MC dropout 0.1, ReLU", "MC dropout 0.2, ReLU", "sparse variational, ReLU")
    for name in (*widening, "sparse, delta method"):
        assert nets[name]["band_beyond_ppm"] > 2 * nets[name]["band_known_ppm"] > 0, name
    assert results["sparsity"]["compression"] > 3 and min(results["delta"]["prior_variance"].values()) > 0
    assert results["delta"]["evidence"] > results["delta"]["evidence_of_one_variance"]
    for net in nets.values():
        assert 0 <= net["coverage_held_back"] <= 1 and 0 <= net["coverage_known"] <= 1
    assert nets["sparse variational, ReLU"]["coverage_known"] > 0.8


def test_coverage_of_the_months_held_back_is_counted():
    """Counted by hand: a net whose mean is 0, with its own band for each month, plus noise fitted on the training months."""
    count, known = 48, 36
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(2 * count, 1, generator=generator)
    times = torch.arange(count)[:, None].float()
    series = co2.Series(times, y[:count], known, times, 0.0, 1.0, (0.0, 0.0), 2.0)
    epistemic = torch.rand(2 * count, 1, generator=generator)
    zero = torch.zeros_like(y)
    prediction = Prediction("regression", 10, zero, epistemic, zero, epistemic)
    found = co2.judge(prediction, series)
    noise = (found["noise_ppm"] / series.std) ** 2
    for name, months in (("held_back", range(known, count)), ("known", series.trained.tolist())):
        inside = [abs(float(y[m])) <= 1.959964 * (float(epistemic[m]) + noise) ** 0.5 for m in months]
        assert found[f"coverage_{name}"] == pytest.approx(sum(inside) / len(inside))


def test_the_surest_mistake_is_the_one_of_most_confidence():
    track = {"label": [1, 7, 7, 2, 1], "confidence": [1.0, 0.5, 0.92, 0.6, 0.99]}
    assert rotated.surest_mistake(track, [0, 35, 70, 90, 180]) == {"degrees": 70, "label": 7, "confidence": 0.92}
    assert rotated.surest_mistake({"label": [1], "confidence": [0.4]}, [0]) == {}


@pytest.mark.slow
def test_leaks_are_found_the_larger_the_surer(tmp_path):
    results = ran("leak", {}, tmp_path)  # full size
    for name, figures in results["nets"].items():
        assert figures["error"] < 12 and figures["ece"] < 0.05, name
        sizes = [figures["tonnes"][size] for size in ("0", "30", "300", "3000")]
        scores = [size["auroc"] for size in sizes[1:]]
        assert scores == sorted(scores) and scores[0] > 0.88 and scores[1] > 0.99, name
        probabilities = [size["probability"] for size in sizes]
        assert probabilities == sorted(probabilities) and probabilities[0] < 0.35 and probabilities[2] > 0.95, name
        # unsure where a leak and nature look alike, sure of what is obvious
        assert min(sizes[0]["std"], sizes[1]["std"]) > 0.02 and max(sizes[2]["std"], sizes[3]["std"]) < 0.015, name
        onset = results["onset"][name]
        assert all(onset[size]["after"] > onset[size]["before"] + 0.6 for size in ("300", "3000")), name
        assert onset["30"]["after"] > onset["30"]["before"] + 0.2 and onset["0"]["after"] < 0.35, name
        days, mean, std = (onset["300"]["track"][key] for key in ("days", "mean", "std"))
        assert len(days) == len(mean) == len(std) > 100 and days[-1] == 12 and min(std) >= 0
    assert results["sparsity"]["compression"] > 6
    assert results["nets"]["sparse variational"]["error"] < results["nets"]["MC dropout"]["error"] + 2


def test_signal_to_noise_is_that_of_the_same_series_with_and_without_the_leak():
    found = leak.signal_to_noise(torch.Generator().manual_seed(5), 1500)
    for size in (30, 3000):
        both = [leak.simulate(1500, 97, torch.full((1500,), t), -24, torch.Generator().manual_seed(8)) for t in (0.0, size)]
        nature, signal = both[0][:, 0], both[1][:, 0] - both[0][:, 0]
        want = 10 * math.log10(float(signal.var(1).mean() / nature.var(1).mean()))
        assert found[str(size)]["snr_db"] == pytest.approx(want, abs=0.4)
        steps = 10 * math.log10(float(signal.diff(dim=1).var(1).mean() / nature.diff(dim=1).var(1).mean()))
        assert found[str(size)]["snr_differences_db"] == pytest.approx(steps, abs=0.4)
    sizes = [found[size]["snr_db"] for size in ("30", "300", "3000")]
    assert sizes[1] - sizes[0] == pytest.approx(10, abs=0.5)  # amplitudes are proportional to the square root of the tonnes


def test_simulated_series_are_what_they_say():
    generator = torch.Generator().manual_seed(0)
    tonnes = torch.tensor([0.0, 30.0, 3000.0]).repeat_interleave(200)
    series = leak.simulate(600, 97, tonnes, 48, generator)
    assert series.shape == (600, 3, 97) and series.isfinite().all()
    late = series[:, 0, 72:].var(1).view(3, 200).mean(1)
    early = series[:, 0, :48].var(1).view(3, 200).mean(1)
    assert late[2] > 5 * late[0] and (early / early[0] - 1).abs().max() < 0.2  # plumes show only after their onset
    noise = leak._autocorrelated(4000, 3, 0.9, generator)
    assert noise.var(0) == pytest.approx(torch.ones(3), abs=0.1)
    assert float((noise[:, 0] * noise[:, 1]).mean()) == pytest.approx(0.9, abs=0.08)
    changed = leak.difference(series)
    torch.testing.assert_close(changed[:, 0], series[:, 0, 1:] - series[:, 0, :-1])
    torch.testing.assert_close(changed[:, 2], series[:, 2, 1:])


@needs_mnist
@pytest.mark.slow
def test_the_turned_digit_is_doubted(tmp_path):
    settings = {"digits": 1500, "epochs": 4, "sparse_epochs": 3, "samples": 30, "angles": 7, "beta": 0.02}
    data = DataSection(name=f"mnist:{MNIST}", limit=1700)
    results = ran("rotated-digit", settings, tmp_path, data=data)
    turned = results["turned"]
    assert results["widened"]["factor"] >= 1
    for name in ("MC dropout", "sparse variational", "sparse, widened"):
        information = turned[name]["mutual_information"]
        assert max(information[1:]) > information[0], name
        assert all(mi <= entropy + 1e-12 for mi, entropy in zip(information, turned[name]["entropy"], strict=True))
    assert turned["MC dropout"]["label"][0] == 1
    assert list(results["calibration"]) == [
        "dense",
        "dense, temperature",
        "MC dropout",
        "sparse, mean",
        "sparse, samples",
        "sparse, widened",
    ]
    assert all(results["calibration"][name]["error"] < 25 for name in ("dense", "MC dropout"))


def test_rotation_turns_anticlockwise():
    image = torch.zeros(1, 5, 5)
    image[0, 2, 4] = 1  # at three o'clock
    quarter, half = rotated.rotate(image, torch.tensor([90.0, 180.0]))
    assert quarter[0, 0, 2] == pytest.approx(1, abs=1e-5) and half[0, 2, 0] == pytest.approx(1, abs=1e-5)


@needs_mnist
@pytest.mark.slow
def test_digits_come_back(tmp_path):
    results = ran("vae", {}, tmp_path, data=DataSection(name=f"mnist:{MNIST}"))  # full size
    dense, sparse = results["models"]["dense"], results["models"]["sparse"]
    assert sparse["bound"] < 1.02 * dense["bound"] < 110
    for name, model in results["models"].items():
        assert model["mse"] < 0.018 and model["few_mse"] < 0.052, name  # the mean digit has 0.067
        assert model["few_std"] > 0.05 and 0.93 < model["few_covered"] < 0.995, name
    assert results["sparsity"]["compression"] > 3.5
    decoder = {name: layer for name, layer in results["kept_by_layer"].items() if name.startswith(("decoder", "enter"))}
    assert len(decoder) == 3 and all(0 < layer["kept"] < layer["weights"] for layer in decoder.values())


def test_the_latent_kl_is_torchs():
    generator = torch.Generator().manual_seed(0)
    q, p = torch.randn(2, 5, 6, generator=generator)
    want = kl_divergence(Normal(q[:, :3], (0.5 * q[:, 3:]).exp()), Normal(p[:, :3], (0.5 * p[:, 3:]).exp())).sum(1)
    torch.testing.assert_close(vae.latent_kl(q, p), want)


def test_few_pixels_are_the_same_ones_in_eval():
    model = vae.Vae(4, 10)
    x = torch.rand(3, 1, 28, 28)
    first, again = model.eval().measure(x), model.measure(x)
    assert torch.equal(first, again) and first[:, 1].flatten(1).sum(1).tolist() == [10] * 3
    assert torch.equal(first[:, 0], x[:, 0] * first[:, 1])
    assert not torch.equal(model.train().measure(x), first)


@pytest.mark.parametrize(
    "name, settings, message",
    [
        ("co3", {}, "unknown 'co3'"),
        ("co2", {"epoch": 3}, "did you mean epochs"),
        ("co2", {"epochs": "many"}, "whole number"),
        ("co2", {"epochs": -1}, "whole number"),
        ("leak", {"p": "0.1"}, "number like"),
    ],
)
def test_settings_that_do_not_do(tmp_path, name, settings, message):
    with pytest.raises(RecipeError, match=message):
        run(name, settings, Context(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(OutputError, match="holds other files"):
        run("bayes-linear", {"epochs": 1}, Context(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_noise_of_co2_is_that_of_months_held_out_amid_the_known(tmp_path):
    pytest.importorskip("statsmodels")
    series = co2.load(co2.Settings(years=6))
    held, trained = series.held.tolist(), series.trained.tolist()
    assert sorted(held + trained) == list(range(series.known)) and len(held) >= 6
    assert min(held) > 0 and max(held) < series.known - 1  # within the observed range
    assert len({month % 12 for month in held}) == len(held)  # in all seasons
    everywhere = torch.cat([series.t, series.beyond])
    # A net that knows its training months by heart, but is off by 0.1 between them: that is the noise.
    mean = torch.cat([series.y, torch.zeros_like(series.beyond)])
    mean[series.held] += 0.1
    prediction = Prediction("regression", 2, mean, torch.full_like(everywhere, 1e-8), *[torch.full_like(everywhere, 1e-8)] * 2)
    assert co2.judge(prediction, series)["noise_ppm"] == pytest.approx(0.1 * series.std, rel=0.02)


@pytest.mark.parametrize("name", ["bayes-linear", "co2", "flow", "leak", "rotated-digit", "vae"])
def test_each_has_a_recipe_with_settings_that_it_knows(name):
    import importlib

    from svdcompress.experiments._common import read_settings
    from svdcompress.experiments._run import EXPERIMENTS

    recipe = load_recipe(name)
    assert recipe.experiment.name == name
    module = importlib.import_module(f"svdcompress.experiments.{EXPERIMENTS[name]}")
    read_settings(module.Settings, recipe.experiment.settings, name)


def test_a_recipes_settings_can_be_set_and_its_folder_holds_it(tmp_path):
    recipe = load_recipe("bayes-linear", ["experiment.settings.epochs=3", "experiment.settings.curve_epochs=2", "seed=5"])
    lines = []
    results = run_recipe(recipe, tmp_path / "run", lines.append)
    assert results["settings"]["epochs"] == 3 and results["seed"] == 5 and lines
    assert results["device"] in ("cpu", "cuda", "mps") and "torch" in results["versions"]
    curve = {*(f"member {number}" for number in range(1, 6)), "dropout", "sparse"}
    assert set(results["seconds"]) == {"orthogonal", "correlated", "figures"} | curve and min(results["seconds"].values()) >= 0
    assert load_recipe(tmp_path / "run").experiment == recipe.experiment
