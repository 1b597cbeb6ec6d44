"""A run that searches: its budget and goal, against metrics computed independently; stops; bad input."""

import json
import stat

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import svdcompress as svdc
from svdcompress.errors import ExportError, Interrupted, PruneError, RecipeError
from svdcompress.pipeline import open_run, run
from svdcompress.pipeline._judged import judged
from svdcompress.pipeline._measure import asked
from svdcompress.pipeline._search_start import for_objective, objective_of
from svdcompress.recipe import load_recipe

QUICK = [
    *("uncertainty.samples=0", "report.html=false", "report.latency=false", "export.onnx=false"),
    *("search.levels=3", "search.trials=3"),
]


def searching(tiny_recipe, *overrides):
    from svdcompress.recipe import dump_recipe, parse_recipe, parse_yaml

    content = parse_yaml(dump_recipe(tiny_recipe))
    for text in [*QUICK, *overrides]:
        field, _, value = text.partition("=")
        section, name = field.split(".")
        content[section][name] = parse_yaml(value)
    return parse_recipe(content)


def same_tensors(one, other):
    """Whether the models of two run folders have equal tensors; their files also hold settings."""
    one, other = (load_file(folder / "model.safetensors") for folder in (one, other))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def error_of_file(file, data):
    """The percentage of wrong answers of an ONNX file, from a loop that shares no code with the package."""
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    wrong = total = 0
    for x, y in data.batches(50):
        answer = session.run(None, {name: x.numpy()})[0]
        wrong += int((np.argmax(answer, 1) != y.numpy()).sum())
        total += len(y)
    return 100 * wrong / total


@pytest.fixture(scope="module")
def searched(tiny_recipe, tmp_path_factory):
    """A search within a wide budget, without interruption."""
    out = tmp_path_factory.mktemp("search") / "run"
    recipe = searching(tiny_recipe, "search.max_drop=25", "export.onnx=true")
    return recipe, out, run(recipe, out)


def test_the_model_that_is_written_keeps_the_budget(searched):
    _, out, results = searched
    found = results["search"]
    data = open_run(out).data.validation
    drop = error_of_file(out / "model.onnx", data) - error_of_file(out / "dense.onnx", data)
    chosen = next(trial for trial in found["trials"] if trial["number"] == found["chosen"])
    assert chosen["drop"] == pytest.approx(drop, abs=1e-6) and found["met"] is chosen["met"] is True
    assert drop <= 25
    kept = [trial for trial in found["trials"] if trial["met"]]
    assert chosen["costs"]["nonzero"] == min(trial["costs"]["nonzero"] for trial in kept) == results["sparse"]["nonzero"]
    assert found["objective"] == "nonzero" and len(found["trials"]) <= 3
    assert [row["level"] for row in found["path"]] == [1, 2, 3][: len(found["path"])]


def test_each_trial_is_kept_and_the_rest_is_cleared(searched):
    _, out, results = searched
    numbers = [trial["number"] for trial in results["search"]["trials"]]
    assert sorted(path.name for path in (out / "trials").iterdir()) == [f"{number:02d}.safetensors" for number in numbers]
    assert not (out / "state").exists()
    stages = [row["stage"] for row in results["history"]]
    assert stages[0] == "dense" and "level 1" in stages and f"trial {results['search']['chosen']}" in stages


@pytest.mark.slow
def test_a_search_that_was_stopped_anywhere_ends_in_the_same_bytes(searched, tmp_path, monkeypatch):
    from svdcompress.pipeline import _trainer

    recipe, whole, results = searched
    epochs = len([row for row in results["history"] if row["stage"] != "dense"])
    out, counted = tmp_path / "run", []

    def log(self, row):
        counted.append(row["stage"])
        if len(counted) % 5 == 0:  # repeatedly, in the path and in trials
            self.context.stop.signal = "SIGTERM"

    monkeypatch.setattr(_trainer.Trainer, "_log", log)
    stops = 0
    for attempt in range(40):
        try:
            run(recipe, out, resume=attempt > 0)
            break
        except Interrupted:
            stops += 1
    assert stops >= 2 and len(counted) >= epochs
    for name in ("model.safetensors", "model.onnx", "model_mc.onnx"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    again = json.loads((out / "report.json").read_text())["search"]
    for key in ("chosen", "path"):
        assert again[key] == results["search"][key]
    for key in ("error", "mixture"):
        assert [t[key] for t in again["trials"]] == [t[key] for t in results["search"]["trials"]]


@pytest.mark.parametrize("goal", ["nonzero=5x", "parameters=2x"])
def test_a_goal_is_reached(tiny_recipe, tmp_path, goal):
    measure, _, factor = goal.partition("=")
    results = run(searching(tiny_recipe, f"search.goal='{goal}'", "search.trials=2"), tmp_path / "run")
    found = results["search"]
    assert found["objective"] == measure and found["reached"] is True and found["met"] is None
    assert results["sparse"][measure] <= 1.02 * results["dense"][measure] / float(factor[:-1])
    full = [row["weights"] == row["inputs"] * row["outputs"] for row in results["layers"]]
    assert all(full) if measure == "parameters" else not any(full)  # only shapes count: no single weight is masked


def test_a_goal_that_the_budget_forbids_gives_way(tiny_recipe, tmp_path):
    overrides = ("search.goal='nonzero=20x'", "search.max_drop=12", "search.trials=5")
    results = run(searching(tiny_recipe, *overrides), tmp_path / "run")
    found = results["search"]
    assert found["met"] is True and found["reached"] is False
    assert any("the goal nonzero=20x exceeds the budget (it would lose" in line for line in results["warnings"])
    small = [trial for trial in found["trials"] if trial["costs"]["nonzero"] <= results["dense"]["nonzero"] / 20 * 1.02]
    assert small and not any(trial["met"] for trial in small)


def test_a_goal_that_the_dense_model_has_reached_is_refused(tiny_recipe, tmp_path):
    said = r"search.goal: parameters=10m: the dense model is no larger: it has .* parameters. Ask for less, or for a factor"
    with pytest.raises(RecipeError, match=said):
        run(searching(tiny_recipe, "search.goal='parameters=10m'"), tmp_path / "run")


def test_a_percentage_of_no_error_is_refused(tmp_path):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)), torch.randn(200, 6)
    with torch.no_grad():
        own = 5 * net(x)
    settings = {"train.epochs": 0, "recover.epochs": 0, "export.onnx": False, "uncertainty.samples": 0}
    asked = {"loss": "mse", "max_drop": 5.0, "settings": settings, "out": tmp_path / "run"}
    with pytest.raises(RecipeError, match=r"search.max_drop: the dense model's RMSE .* is next to 0 .*--max-error"):
        svdc.sparsify(nn.Sequential(net, Five()), (x, own), **asked)
    off = own + 0.01 * torch.randn_like(own)  # a small error is one all the same
    assert "search" in svdc.sparsify(nn.Sequential(net, Five()), (x, off), **asked, overwrite=True).results


class Five(nn.Module):
    def forward(self, x):
        return 5 * x


def test_a_budget_that_the_dense_model_misses_is_refused(tiny_recipe, tmp_path):
    with pytest.raises(RecipeError, match=r"search.max_error: 0.001: the dense model itself has .*% on the validation data"):
        run(searching(tiny_recipe, "search.max_error=0.001"), tmp_path / "run")


def test_few_validation_examples_are_said(searched):
    warned = " ".join(searched[2]["warnings"])
    assert "validation examples cannot tell" not in warned  # a drop of 25 points is detectable
    recipe, *_ = searched
    assert recipe.search.confidence == 0.9


def test_few_examples_are_judged_by_the_nll(tiny_recipe, tmp_path):
    overrides = ("search.max_drop=0.5", "search.trials=1", "search.levels=1", "report.html=false")
    results = run(searching(tiny_recipe, *overrides), tmp_path / "run")
    (said,) = [line for line in results["warnings"] if "validation examples cannot tell a drop of 0.5 points" in line]
    assert "The drop is estimated from the NLL of validation and training examples" in said
    (trial,) = results["search"]["trials"]
    assert isinstance(trial["estimate"], float) and (trial["met"] is False or trial["at_most"] <= 0.5)


def test_the_nll_of_a_trial_is_that_of_its_best_temperature(searched):
    """Against a fine grid on the dense model's own logits."""
    _, out, results = searched
    assert all(trial["estimate"] is None for trial in results["search"]["trials"])  # errors alone detect 25 points
    opened = open_run(out)
    parts = [(opened.dense(x).detach().double(), y) for x, y in opened.data.validation.batches(64)]
    z, y = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    wrong = 100 * float((z.argmax(1) != y).double().mean())
    nll = {
        step: float(torch.nn.functional.cross_entropy(z / np.exp(step), y, reduction="sum")) for step in np.arange(-2, 2, 0.002)
    }
    best = min(nll, key=lambda step: nll[step] + 0.5 * step**2)  # as if one example were known beforehand
    found = judged(opened.dense, opened.data.validation, opened.data, "cpu")
    assert found.nll is not None and len(found.nll) == len(y) + len(opened.data.train)  # including training examples
    assert float(found.nll[: len(y)].sum()) == pytest.approx(nll[best], rel=1e-4)
    parts = [(opened.dense(x).detach().double(), y) for x, y in opened.data.train.batches(64)]
    z, seen = torch.cat([part[0] for part in parts]) / np.exp(best), torch.cat([part[1] for part in parts])
    want = float(torch.nn.functional.cross_entropy(z, seen))
    assert float(found.nll[len(y) :].mean()) == pytest.approx(want, rel=1e-3)
    assert found.error == pytest.approx(wrong)


def test_what_is_made_small_follows_the_shares():
    assert objective_of(load_recipe(None)) == "nonzero"
    assert objective_of(load_recipe(None, ["convert.share={weight: 0.8, input: 0.2}"])) == "macs"
    assert objective_of(load_recipe(None, ["search.objective=bytes"])) == "bytes"
    assert objective_of(load_recipe(None, ["search.goal='latency=2x'"])) == "latency"
    with pytest.raises(RecipeError, match="contradict each other"):
        load_recipe(None, ["search.objective=bytes", "search.goal='latency=2x'"])


# The latency of another machine


def command(folder, body):
    file = folder / "ask.sh"
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


def test_a_command_is_asked_for_the_milliseconds_of_a_file(tmp_path):
    file = tmp_path / "model.onnx"
    file.write_bytes(b"12345")
    assert asked(command(tmp_path, 'echo "took $(wc -c < "$1")"'), file) == 5.0


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("echo no; exit 3", "exit code 3"),
        ("echo fast", "must be the milliseconds"),
        ("true", "printed ''"),
        ("echo -1", "'-1'"),
    ],
)
def test_a_command_that_fails_is_an_error_that_names_it(tmp_path, body, said):
    with pytest.raises(ExportError, match=f"search.latency_command: .*ask.sh.*{said}"):
        asked(command(tmp_path, body), tmp_path / "model.onnx")
    with pytest.raises(ExportError, match="could not be run"):
        asked(str(tmp_path / "nobody"), tmp_path / "model.onnx")


# In one call


def test_sparsify_takes_objects_and_leaves_the_model():
    torch.manual_seed(0)
    x = torch.randn(600, 12)
    y = (x[:, 0] + x[:, 1] > 0).long()
    model = torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[:400]), y[:400]).backward()
        optimizer.step()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    settings = {"train.epochs": 10, "recover.epochs": 2, "search.trials": 2, "search.levels": 2, "uncertainty.samples": 5}
    data = {"train": (x[:400], y[:400]), "validation": (x[400:500], y[400:500]), "test": (x[500:], y[500:])}
    found = svdc.sparsify(model, data, max_drop=10, settings={**settings, "report.latency": False})
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        answer = found.model(x[500:])
    error = 100 * float((answer.argmax(1) != y[500:]).float().mean())
    assert found.report.sparse is not None and found.report.sparse.metrics is not None
    assert found.report.sparse.metrics["error"] == pytest.approx(error, abs=1e-4)
    assert found.onnx.is_file() and repr(found).startswith("Sparsified(error ")
    assert found.results["search"]["chosen"] >= 1
    figure = svdc.plot_tradeoff(found)
    assert figure.axes[0].get_xlabel() == "times fewer multiply-accumulates"


def test_sparsify_says_what_is_no_model():
    with pytest.raises(svdc.SvdcError, match=r"model: list is not a torch.nn.Module"):
        svdc.sparsify([], ())


def test_a_search_for_shapes_asks_units_too(tiny_recipe):
    asked_for, said = for_objective(searching(tiny_recipe, "search.goal='macs=2x'"))
    assert asked_for.convert.share == {"weight": 0.8, "input": 0.1, "output": 0.1} and "convert.share" in str(said)
    for kept in (searching(tiny_recipe, "search.goal='nonzero=2x'"), tiny_recipe):
        assert for_objective(kept) == (kept, None)
    own = searching(tiny_recipe, "search.goal='macs=2x'", "convert.share=input")
    assert for_objective(own) == (own, None)


def test_an_estimate_counts_the_search(tiny_recipe):
    from svdcompress.pipeline import estimate

    plain = estimate(tiny_recipe).seconds
    found = estimate(searching(tiny_recipe, "search.max_drop=1")).seconds
    assert "search" in found and "train" not in found and {"train", "recover"} <= set(plain)
    many = estimate(searching(tiny_recipe, "search.max_drop=1", "search.trials=500")).seconds
    assert many["search"] > 5 * found["search"]  # step times vary from call to call


def test_an_estimate_counts_the_epochs_of_each_kind(tiny_recipe, monkeypatch):
    """By hand: an epoch of training takes 1 s, one without noise 0.1 s, and the teacher's answers 100 s per epoch."""
    from svdcompress.pipeline import _estimate, estimate, levels_and_trials

    def seconds(model, examples, loss, settings, device, teacher=None, noise=True):
        return (1.0 if noise else 0.1) + 100.0 * (teacher is not None)

    monkeypatch.setattr(_estimate, "_epoch_seconds", seconds)
    monkeypatch.setattr(_estimate, "_forward_seconds", lambda *given: 0.0)
    epochs = tiny_recipe.train.epochs, tiny_recipe.recover.epochs
    assert [estimate(tiny_recipe).seconds[stage] for stage in ("train", "recover")] == list(epochs)

    mean = ("recover.noise=false", "recover.distill={weight: 0.5, layers: 1}", "search.goal='macs=2x'", "recover.epochs=6")
    once = searching(tiny_recipe, "train.epochs=0", "search.trials=2", *mean)
    assert estimate(once).seconds["search"] == pytest.approx(2 * 6 * 100.1) and levels_and_trials(once) == (0, 2)
    steps = searching(tiny_recipe, "train.epochs=16", "search.levels=1", "search.trials=1", *mean)
    level, cooling = (max(1, round(16 * share)) for share in (_estimate.LEVEL_EPOCHS, _estimate.COOLING_EPOCHS))
    assert estimate(steps).seconds["search"] == pytest.approx(level + cooling + 6 * 100.1)


def test_an_estimate_times_steps_as_they_will_be(tiny_recipe, monkeypatch):
    """The teacher's answers, steps without noise where it is left out, and the validation of each epoch."""
    from svdcompress.layers import variational_layers
    from svdcompress.pipeline import _estimate, estimate

    called = []

    def call(model, x):
        layers = [layer for _, layer in variational_layers(model)]
        called.append((bool(layers), model.training, any(layer.training for layer in layers)))
        return model(x)

    monkeypatch.setattr(_estimate, "call", call)
    estimate(tiny_recipe)
    dense, drawn, mean, teacher = (False, True, False), (True, True, True), (True, True, False), (False, False, False)
    plain = called.count(teacher)
    assert called.count(dense) and called.count(drawn) and not called.count(mean) and plain  # it validates
    called.clear()
    taught = "distill={weight: 0.5, layers: 1}"  # the teacher is called in each step
    estimate(searching(tiny_recipe, "recover.noise=false", f"recover.{taught}", f"train.{taught}"))
    assert called.count(mean) and called.count(drawn)
    assert called.count(teacher) == plain + called.count(mean) + called.count(drawn)

    monkeypatch.setattr(_estimate, "_epoch_seconds", lambda *given, **more: 0.0)
    monkeypatch.setattr(_estimate, "_forward_seconds", lambda *given: 1.0)
    found = estimate(tiny_recipe)
    for stage in ("train", "recover"):
        assert found.seconds[stage] == getattr(tiny_recipe, stage).epochs * found.examples["validation"]
    searched = estimate(searching(tiny_recipe, "search.goal='macs=2x'", "search.trials=1", "search.levels=1")).seconds["search"]
    assert searched > 2 * found.examples["train"]  # ways of cutting are compared on training examples
    judged = found.examples["validation"] + found.examples["test"]
    assert found.seconds["rest"] > judged  # at least once each
    scaled = estimate(searching(tiny_recipe, "calibrate.posterior=scaled")).seconds["rest"]
    plain = estimate(searching(tiny_recipe, "calibrate.posterior=variational")).seconds["rest"]
    assert scaled - plain == 15 * 50 * found.examples["validation"]  # 15 more evaluations with 50 draws each


def test_a_size_that_leaves_one_answer_is_not_reached_by_it(tiny_recipe, tmp_path):
    """Smaller than the biases alone: no weight could remain."""
    with pytest.raises(PruneError, match="every trial left a model that gives the same answer to all inputs"):
        run(searching(tiny_recipe, "search.goal='nonzero=10'", "search.trials=2"), tmp_path / "run")


def test_a_loss_of_ones_own_and_another_recipes_settings(tmp_path):
    """Nothing from the recipe's own model and data is reused."""
    torch.manual_seed(0)
    x = torch.randn(200, 5)
    y = (x[:, 0] > 0).long()
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    quick = {"train.epochs": 2, "recover.epochs": 1, "uncertainty.samples": 0, "report.latency": False, "export.onnx": False}
    own = torch.nn.CrossEntropyLoss()
    found = svdc.sparsify(model, (x, y), recipe="digits", loss=own, settings={**quick, "loss.task": "classification"})
    assert found.model(x).shape == (200, 2)


def test_max_drop_of_nothing_is_judged_in_whole_examples(tiny_recipe, tmp_path):
    results = run(searching(tiny_recipe, "search.max_drop=0", "search.trials=1"), tmp_path / "run")
    (line,) = [line for line in results["warnings"] if "no number of them could" in line]
    assert "set data.validation" not in line and line.endswith("allow more")
