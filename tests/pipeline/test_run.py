"""A run: what it writes, that it can be stopped anywhere, and that it never takes another run's folder."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from rich.console import Console
from safetensors import SafetensorError

from svdcompress.errors import DataError, Interrupted, OutputError, PruneError, RecipeError
from svdcompress.export import check_parity, read_metadata
from svdcompress.layers import variational_layers
from svdcompress.likelihoods import likelihood_of
from svdcompress.pipeline import OpenRun, converted, estimate, free_folder, open_run, prepare, run
from svdcompress.pipeline._select import bare
from svdcompress.recipe import load_recipe

FILES = {"recipe.yaml", "model.safetensors", "model.onnx", "model_mc.onnx", "report.json", "report.html"}


def test_a_run_writes_all_its_files_and_nothing_of_its_state_stays(tiny_run):
    folder, results = tiny_run
    assert {path.name for path in folder.iterdir()} >= FILES
    assert not (folder / "state").exists()
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    assert json.loads((folder / "report.json").read_text())["sparse"]["metrics"] == results["sparse"]["metrics"]


def test_the_report_has_the_keys_of_the_design(tiny_run):
    results = json.loads((tiny_run[0] / "report.json").read_text())
    for name in ("dense", "sparse"):
        assert set(results[name]["metrics"]) >= {"error", "nll"}
        assert set(results[name]) >= {"parameters", "nonzero", "bytes", "macs", "latency_ms"}
        assert set(results[name]["latency_ms"]) == {"batch_1", "batch_128"}
    assert set(results["compression"]) >= {"nonzero", "parameters", "bytes", "macs", "latency"}
    assert set(results["parity"]) == {"dense.onnx", "model.onnx", "model_compact.onnx", "model_mc.onnx"}
    assert max(results["parity"].values()) < 1e-4
    assert set(results) >= {"layers", "seconds", "seed", "device", "versions", "history", "recipe"}
    assert set(results) >= {"log_alpha", "threshold_curve", "calibration", "uncertainty", "pruning"}
    assert {row["stage"] for row in results["history"]} == {"dense", "train", "recover"}
    ends = {row["stage"]: row["sparsity"] for row in results["history"] if row["stage"] != "dense"}
    assert ends["recover"] >= ends["train"] > 0  # a fraction of all weights, even after units are removed
    for row in results["layers"]:
        assert set(row) >= {"name", "shape_before", "shape_after", "sparsity"}


def test_the_figures_are_those_of_the_files(tiny_run):
    """Recomputed from the files: the model's own zeros, and onnxruntime's errors on the test data."""
    onnxruntime = pytest.importorskip("onnxruntime")
    folder, results = tiny_run
    opened = open_run(folder)
    biases = sum(layer.bias.numel() for _, layer in variational_layers(opened.model) if layer.bias is not None)
    kept = sum(int((layer.relevant() & (layer.weight != 0)).sum()) for _, layer in variational_layers(opened.model))
    dead_biases = sum(int((layer.bias == 0).sum()) for _, layer in variational_layers(opened.model) if layer.bias is not None)
    assert results["sparse"]["nonzero"] == kept + biases - dead_biases
    assert results["dense"]["parameters"] == 64 * 24 + 24 + 24 * 10 + 10
    x, y = next(opened.data.test.batches(10**6))
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    wrong = session.run(None, {"input": x.numpy()})[0].argmax(1) != y.numpy()
    assert results["sparse"]["metrics"]["error"] == pytest.approx(100 * np.mean(wrong))
    assert results["sparse"]["bytes"] == (folder / "model.onnx").stat().st_size


def test_validation_figures_are_of_the_validation_data(tiny_run):
    """Each metric by hand, and different from that of the test data."""
    folder, results = tiny_run
    opened = open_run(folder)
    figures = {}
    for split in ("validation", "test"):
        x, y = next(getattr(opened.data, split).batches(10**6))
        with torch.no_grad():
            logits = opened.model(x)
        figures[split] = {
            "error": 100 * float((logits.argmax(1) != y).double().mean()),
            "nll": float(torch.nn.functional.cross_entropy(logits, y)),
        }
    assert figures["validation"]["nll"] != pytest.approx(figures["test"]["nll"], rel=1e-3)
    assert results["sparse"]["validation"] == pytest.approx(figures["validation"], rel=1e-4)
    assert results["sparse"]["metrics"] == pytest.approx(figures["test"], rel=1e-4)
    last = results["history"][-1]  # recovery keeps the last epoch
    assert last["val_error"] == pytest.approx(figures["validation"]["error"], rel=1e-4)
    assert last["val_nll"] == pytest.approx(figures["validation"]["nll"], rel=1e-4)


def test_a_run_opened_again_predicts_as_it_was_exported(tiny_run):
    opened = open_run(tiny_run[0])
    assert isinstance(opened, OpenRun)
    x, _ = next(opened.data.test.batches(5))
    assert opened.model(x).shape == opened.dense(x).shape == (5, 10)
    assert opened.preprocessing["transform"] == []
    assert repr(likelihood_of(opened.model)) == "Classification(dim=1)"
    assert opened.classes == [str(digit) for digit in range(10)]


def test_the_resolved_recipe_runs_again_to_the_same_model(tiny_run, tmp_path):
    folder, results = tiny_run
    recipe = load_recipe(folder / "recipe.yaml", ["export.onnx=false", "report.html=false"])
    again = run(recipe, tmp_path / "again")
    assert again["sparse"]["metrics"] == results["sparse"]["metrics"]
    left, right = open_run(folder).model.state_dict(), open_run(tmp_path / "again").model.state_dict()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_run_that_shrinks_while_it_trains(tiny_run, tmp_path):
    whole = tiny_run[1]
    settings = ["train.shrink=1", "train.epochs=5", "train.batch_size=10", "train.beta={start: 0, stop: 1, final: 1}"]
    settings += ["prune.remove_inputs=true", "data.transform=[flatten]"]
    results = run(load_recipe(tiny_run[0] / "recipe.yaml", settings), tmp_path / "run")
    assert [layer["shape_before"] for layer in results["layers"]] == [layer["shape_before"] for layer in whole["layers"]]
    assert results["sparse"]["parameters"] < results["dense"]["parameters"] == whole["dense"]["parameters"]
    trained, recovered = (next(row for row in reversed(results["history"]) if row["stage"] == s) for s in ("train", "recover"))
    assert recovered["sparsity"] >= trained["sparsity"] - 0.1  # a fraction of all weights, not of the remaining ones
    opened = open_run(tmp_path / "run")  # its manifest records what each step removed
    kept = {name: tuple(layer.weight.shape) for name, layer in variational_layers(bare(opened.model))}
    assert kept == {layer["name"]: tuple(layer["shape_after"]) for layer in results["layers"]}
    x = next(opened.data.test.batches(3))[0]
    assert opened.model(x).shape == (3, 10) and x.shape == (3, 64)
    read = read_metadata(tmp_path / "run" / "model.onnx")["inputs"]
    assert read == {"kept": results["pruning"]["inputs_kept"], "dim": 1} and len(read["kept"]) < 64
    gathers = [node for node in onnx.load(tmp_path / "run" / "model.onnx").graph.node if node.op_type == "Gather"]
    assert bool(gathers) is results["pruning"]["inputs_gathered"]
    assert check_parity(tmp_path / "run" / "model.onnx", opened.model, x) < 1e-5


SLOWLY = """
import sys, time
from svdcompress import pipeline
from svdcompress.pipeline import _trainer
from svdcompress.recipe import load_recipe

def wait(self, row):
    print(row["stage"], row["epoch"], flush=True)
    time.sleep(1 if row["stage"] == sys.argv[3] else 0)

_trainer.Trainer._log = wait
try:
    pipeline.run(load_recipe(sys.argv[1]), sys.argv[2])
except Exception as error:
    print(error, flush=True)
    sys.exit(getattr(error, "exit_code", 1))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "kill"), [("dense", "KILL"), ("train", "KILL"), ("train", "TERM"), ("recover", "INT")])
def test_a_killed_run_goes_on_to_the_same_model(tiny_run, tmp_path, stage, kill):
    folder, results = tiny_run
    out = tmp_path / "stopped"
    process = subprocess.Popen(
        [sys.executable, "-c", SLOWLY, str(folder / "recipe.yaml"), str(out), stage],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    while process.stdout.readline() != f"{stage} 1\n":
        assert process.poll() is None
    time.sleep(0.3)
    process.send_signal(getattr(signal, f"SIG{kill}"))
    said = process.communicate(timeout=120)[0]
    if kill == "KILL":
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == Interrupted.exit_code
        assert f"svdc sparsify --resume --out {out}" in said
    resumed = run(load_recipe(out / "recipe.yaml"), out, resume=True)
    assert resumed["sparse"]["metrics"] == results["sparse"]["metrics"]
    assert [row["loss"] for row in resumed["history"]] == [row["loss"] for row in results["history"]]
    left, right = open_run(folder).model.state_dict(), open_run(out).model.state_dict()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_folder_in_use_is_left_alone(tiny_run, tiny_recipe, tmp_path):
    folder, _ = tiny_run
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(OutputError, match="holds another run; choose another --out"):
        run(tiny_recipe, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="holds other files"):
        run(tiny_recipe, tmp_path / "mine")
    with pytest.raises(OutputError, match="is a file"):
        run(tiny_recipe, tmp_path / "mine" / "notes.txt")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"


def test_overwriting_moves_the_old_folder_aside(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "recipe.yaml").write_text("old")
    said = prepare(out, overwrite=True)
    assert (tmp_path / "run.old-1" / "recipe.yaml").read_text() == "old"
    assert str(tmp_path / "run.old-1") in said
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(out)
        (out / "mine.txt").write_text("mine")
        for folder in (Path(), out, tmp_path):
            with pytest.raises(OutputError, match="is the working folder, or holds it; start the command in another folder"):
                prepare(folder, overwrite=True)
    (out / "mine.txt").unlink()
    (out / "recipe.yaml").write_text("new")
    with pytest.raises(OutputError, match="not finished: continue with `svdc sparsify --resume"):
        prepare(out)


def test_what_was_moved_aside_is_back_after_a_run_that_failed_at_once(tmp_path):
    """A mistyped path costs the former run not even its name."""
    out, console = tmp_path / "run", Console(file=io.StringIO(), width=300)
    out.mkdir()
    (out / "recipe.yaml").write_text("old")
    recipe = load_recipe("digits", [f"data=npz:{tmp_path / 'none.npz'}", "device=cpu"])
    with pytest.raises(DataError, match=r"none\.npz: no such file") as error:
        run(recipe, out, overwrite=True, quiet=False, console=console)
    assert [path.name for path in tmp_path.iterdir()] == ["run"] and [path.name for path in out.iterdir()] == ["recipe.yaml"]
    assert (out / "recipe.yaml").read_text() == "old" and "--resume" not in str(error.value)
    assert f"what was moved to {out}.old-1 is back in {out}" in console.file.getvalue()  # type: ignore[attr-defined]


def test_resuming_asks_for_a_run_and_its_own_recipe(tiny_recipe, tmp_path):
    with pytest.raises(OutputError, match="holds no run"):
        run(tiny_recipe, tmp_path, resume=True)
    (tmp_path / "recipe.yaml").write_text("train: {epochs: 3}")
    (tmp_path / "state").mkdir()
    torch.save({"epoch": 1}, tmp_path / "state" / "train.pt")
    with pytest.raises(RecipeError, match=r"differ in .*train\.epochs"):
        run(tiny_recipe, tmp_path, resume=True)


def test_an_unfinished_run_cannot_be_opened(tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "recipe.yaml").write_text("model: mlp")
    with pytest.raises(OutputError, match="not finished"):
        open_run(tmp_path)
    with pytest.raises(OutputError, match="no such folder"):
        open_run(tmp_path / "absent")


def test_no_permission_and_no_space_are_said_before_training(tmp_path, monkeypatch):
    from svdcompress.pipeline import _folder

    def full(path, write):
        raise OutputError(f"{path}: cannot be written (No space left on device)")

    monkeypatch.setattr(_folder, "write_atomically", full)
    with pytest.raises(OutputError, match="No space left"):
        prepare(tmp_path / "new")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be created"):
        prepare(tmp_path / "file" / "run")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")])
def test_a_failed_write_leaves_the_old_file(tmp_path, error):
    from svdcompress.train import write_atomically

    path = tmp_path / "kept"
    path.write_text("old")

    def half(temporary):
        temporary.write_text("ne")
        raise error

    with pytest.raises(OutputError, match="No space left on device"):
        write_atomically(path, half)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


def test_a_model_pruned_to_nothing_says_what_to_try(tiny_recipe, tmp_path):
    recipe = tiny_recipe.model_copy(deep=True)
    recipe.relevance.threshold = -50.0
    with pytest.raises(PruneError, match=r"nothing is left of layer '1'.*--resume.*relevance\.threshold.*train\.beta\.final"):
        run(recipe, tmp_path / "run")
    other = load_recipe(tmp_path / "run", ["train.epochs=9"])
    with pytest.raises(RecipeError, match=r"differ in train\.epochs, which the run has used already"):
        run(other, tmp_path / "run", resume=True)
    quick = ["export.onnx=false", "report.html=false", "uncertainty.samples=0", "recover.epochs=0"]
    results = run(load_recipe(tmp_path / "run", ["relevance.threshold=3", *quick]), tmp_path / "run", resume=True)
    assert results["threshold"] == 3.0  # the training is not lost, and later stages may have other settings
    assert load_recipe(tmp_path / "run").relevance.threshold == 3.0


def test_layer_rules_set_layers_apart():
    recipe = load_recipe(
        "digits",
        ["convert.layers=[{match: '1', share: input, threshold: 5}, {match: '3', prior: log-uniform, log_sigma2: -4}]"],
    )
    from svdcompress.sources import make_model

    layers = dict(variational_layers(converted(make_model(recipe.model), recipe)))
    assert [layer.share for layer in layers.values()] == [{"input": 1.0}, {"weight": 1.0}, {"weight": 1.0}]
    assert [layer.prior for layer in layers.values()] == ["ard", "log-uniform", "ard"]
    assert layers["1"].threshold["input"] == 5.0
    assert layers["3"].log_sigma2[0, 0].item() == -4.0


def test_the_sparsest_candidate_within_the_tolerance_is_chosen():
    from svdcompress import convert
    from svdcompress.selection import choose

    torch.manual_seed(0)
    model = convert(torch.nn.Sequential(torch.nn.Linear(40, 2)))
    with torch.no_grad():
        model[0].log_sigma2.uniform_(-12, 4)
    errors = {}

    def validate(m):
        return {"error": errors[int(m[0].mask.sum())], "nll": 0.0}

    from svdcompress import relevance

    kept = [relevance(model, t).kept for t in (1.0, 2.0, 4.0)]
    assert kept[0] < kept[1] < kept[2]
    errors = dict.fromkeys((relevance(model, t).kept for t in (0.0, 3.0, 5.0, 6.0)), 9.0)
    errors |= dict(zip(kept, (3.0, 2.1, 2.0), strict=True))
    for tolerance, expected in ((0.0, 4.0), (0.2, 2.0), (1.0, 1.0)):
        recipe = load_recipe(None, ["relevance.candidates=[1, 2, 4]", f"relevance.tolerance={tolerance}"])
        chosen = choose(model, recipe, validate)
        assert chosen.threshold == chosen.asked == expected
        assert chosen.masks.kept == relevance(model, expected).kept
        assert model[0].mask is None
        assert {point["threshold"] for point in chosen.curve} >= {1.0, 2.0, 4.0}


def test_an_estimate_writes_nothing(tiny_recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = estimate(tiny_recipe)
    assert found.converted == 64 * 24 + 24 * 10
    assert found.beta == 0.02
    assert found.memory == 4 * 4 * (2 * found.converted + 34)
    assert set(found.seconds) == {"dense", "train", "recover", "rest"} and min(found.seconds.values()) > 0
    assert not list(tmp_path.iterdir())


def test_new_folders_are_numbered(tmp_path):
    assert free_folder("a", tmp_path).name == "a"
    (tmp_path / "a").mkdir()
    (tmp_path / "a-2").mkdir()
    assert re.fullmatch("a-3", free_folder("a", tmp_path).name)
