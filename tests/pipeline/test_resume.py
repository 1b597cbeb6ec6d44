"""What may differ in a resumed run: everything not used yet, and settings that remedy a loss that is not finite."""

import numpy as np
import pytest
import torch

from svdcompress.errors import DataError, Interrupted, RecipeError, TrainingError
from svdcompress.pipeline import _search_trials, run
from svdcompress.pipeline._resume import outdated
from svdcompress.recipe import load_recipe


def stopped(folder, **epochs):
    """Create a run's state with the given number of epochs done in each stage; prune=1: pruned."""
    (folder / "state").mkdir()
    for stage, done in epochs.items():
        file = folder / "state" / ("pruned.safetensors" if stage == "prune" else f"{stage}.pt")
        torch.save({"epoch": done}, file) if stage != "prune" else file.write_bytes(b"x")


@pytest.mark.parametrize(
    ("done", "changes", "stale"),
    [
        ({}, ["seed=1", "model=lenet-5", "dense.lr=1", "train.epochs=3"], []),
        ({"dense": 0}, ["data.validation=0.3", "dense.batch_size=7"], ["dense.pt"]),
        ({"dense": 3}, ["dense.lr=1e-4", "dense.clip=1", "dense.precision=bf16"], []),
        ({"dense": 3}, ["convert.share=input", "train.epochs=7", "relevance.threshold=2", "prune.round_to=4"], []),
        ({"dense": 20, "train": 0}, ["convert.log_sigma2=-8", "train.batch_size=50", "train.beta.final=0.1"], ["train.pt"]),
        ({"dense": 20, "train": 1}, ["train.lr=1e-4", "train.lr_log_sigma2=1e-3", "train.clip=1", "recover.epochs=2"], []),
        ({"train": 1}, ["train.precision=bf16", "export.opset=21", "report.html=false"], []),
        ({"dense": 20, "train": 20}, ["relevance.threshold=2", "prune.round_to=4", "recover.lr=1"], []),
        ({"dense": 20, "train": 20, "prune": 1}, ["recover.epochs=9"], []),
        ({"dense": 20, "train": 20, "prune": 1, "recover": 0}, ["recover.epochs=9"], ["recover.pt"]),
        ({"dense": 20, "train": 20, "prune": 1, "recover": 2}, ["recover.lr=1e-5"], []),
    ],
)
def test_what_nothing_was_made_with_may_change(tmp_path, done, changes, stale):
    stopped(tmp_path, **done)
    assert [file.name for file in outdated(load_recipe(None), load_recipe(None, changes), tmp_path)] == stale


@pytest.mark.parametrize(
    ("done", "change", "field"),
    [
        ({"dense": 1}, "seed=1", "seed"),
        ({"dense": 1}, "data.limit=9", "data.limit"),
        ({"dense": 1}, "dense.epochs=30", "dense.epochs"),
        ({"dense": 20}, "dense.lr=0.1", "dense.lr"),  # finished, so it would have no effect
        ({"dense": 20, "train": 0}, "loss.label_smoothing=0.1", "loss.label_smoothing"),
        ({"train": 1}, "loss.label_smoothing=0.1", "loss.label_smoothing"),  # weights were given, so there is no dense stage
        ({"dense": 20, "train": 1}, "convert.share=input", "convert.share"),
        ({"dense": 20, "train": 1}, "train.batch_size=7", "train.batch_size"),
        ({"dense": 20, "train": 20}, "train.clip=1", "train.clip"),
        ({"dense": 20, "train": 20, "prune": 1}, "relevance.threshold=2", "relevance.threshold"),
        ({"dense": 20, "train": 20, "prune": 1, "recover": 1}, "recover.beta=0.1", "recover.beta"),
        ({"dense": 20, "train": 20, "prune": 1, "recover": 5}, "recover.lr=1", "recover.lr"),
    ],
)
def test_what_was_made_already_is_not_made_otherwise(tmp_path, done, change, field):
    stopped(tmp_path, **done)
    with pytest.raises(RecipeError, match=rf"differ in {field}, which the run has used already; .* no options that"):
        outdated(load_recipe(None), load_recipe(None, [change, "relevance.tolerance=0", "export.onnx=false"]), tmp_path)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A user's model and data in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear(4, 3))\n")
    x = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    np.savez("data.npz", x=x, y=x[:, :3].argmax(1))


@pytest.mark.usefixtures("mine")
def test_a_loss_that_is_not_finite_ends_where_its_message_says(tmp_path):
    quick = ["dense.epochs=1", "train.epochs=2", "recover.epochs=0", "device=cpu", "uncertainty.samples=0"]
    quick += ["export.onnx=false", "report.html=false", "train.beta.final=1e-6", "train.lr=1e38"]
    out = tmp_path / "out"
    with pytest.raises(
        TrainingError, match=rf"train: the loss is .*svdc sparsify --resume --out {out} --set train\.lr="
    ) as error:
        run(load_recipe(None, ["model=./mine.py:make", "data=npz:data.npz", *quick]), out)
    assert "train.clip" in str(error.value) and "train.precision=no" in str(error.value)
    results = run(load_recipe(out, ["train.lr=1e-3", "train.clip=1"]), out, resume=True)
    assert [row["stage"] for row in results["history"]] == ["dense", "train", "train"]
    assert results["recipe"].count("clip: 1.0") == 1 and not (out / "state").exists()


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize("section", ["train", "recover"])
def test_a_loss_in_a_search_names_what_can_be_set(tmp_path, section):
    """Levels and trials are not sections of a recipe, so the section is named; and the advice works."""
    quick = ["dense.epochs=1", "train.epochs=2", "recover.epochs=1", "device=cpu", "uncertainty.samples=0"]
    quick += ["search.max_drop=90", "search.levels=1", "search.trials=1", "train.beta.final=1e-6"]
    quick += ["export.onnx=false", "report.html=false", f"{section}.lr=1e38"]
    out = tmp_path / "out"
    stage = "level 1" if section == "train" else "trial 1"
    with pytest.raises(TrainingError, match=rf"{stage}: the loss is .* --set {section}\.lr=") as error:
        run(load_recipe(None, ["model=./mine.py:make", "data=npz:data.npz", *quick]), out)
    said = str(error.value)
    assert f"({section}.lr), clipping ({section}.clip=1) or {section}.precision=no" in said and f"{stage}." not in said
    with pytest.raises(RecipeError, match=r"train\.batch_size"):  # the level was started with another one
        run(load_recipe(out, ["train.batch_size=7"]), out, resume=True)
    results = run(load_recipe(out, [f"{section}.lr=1e-3"]), out, resume=True)
    assert results["search"]["chosen"] == 1


def test_a_search_that_is_done_is_not_made_otherwise(tmp_path):
    stopped(tmp_path, dense=20)
    (tmp_path / "state" / "search").mkdir()
    given = load_recipe(None), load_recipe(None, ["train.lr=1e-4"])
    assert outdated(*given, tmp_path) == []  # it is still in progress
    (tmp_path / "state" / "run.json").write_text('{"seconds": {"search": 3.0}}')
    with pytest.raises(RecipeError, match=r"train\.lr, which the run has used already"):
        outdated(*given, tmp_path)


SIZED = ["calibrate.coverage=0.9", "calibrate.temperature=false", "calibrate.answer_above=0.99", "export.sets=true"]


@pytest.mark.parametrize(
    ("goal", "change", "refused"),
    [
        *(("bytes=8kB", change, True) for change in [*SIZED, "export.opset=18"]),
        *(("macs=2x", change, False) for change in [*SIZED, "export.opset=18"]),
        ("latency=2x", "export.opset=18", True),
        *(("latency=2x", change, True) for change in ("export.sets=true", "calibrate.coverage=0.9")),
        ("latency=2x", "calibrate.answer_above=0.99", False),
        ("bytes=8kB", "calibrate.epochs=3", False),
    ],
)
def test_trials_are_measured_by_one_rule(tmp_path, goal, change, refused):
    asked = [f"search.goal={goal!r}"]
    if change == "export.sets=true":
        asked.append("calibrate.coverage=0.8")
    given = load_recipe(None, asked), load_recipe(None, [*asked, change])
    stopped(tmp_path, dense=20)
    assert outdated(*given, tmp_path) == []
    (tmp_path / "state" / "search").mkdir()
    if not refused:
        assert outdated(*given, tmp_path) == []
        return
    with pytest.raises(RecipeError, match=change.partition("=")[0].replace(".", r"\.")):
        outdated(*given, tmp_path)


@pytest.mark.usefixtures("mine")
def test_a_search_of_given_weights_notices_other_data(tmp_path, monkeypatch):
    """With given weights, no state of the dense model's training records the data."""
    torch.save(torch.nn.Sequential(torch.nn.Linear(4, 3)).state_dict(), "weights.pt")
    quick = ["model=./mine.py:make", "weights=weights.pt", "data=npz:data.npz", "train.epochs=1", "recover.epochs=0"]
    quick += ["search.goal='nonzero=2x'", "search.levels=1", "search.trials=1", "device=cpu", "uncertainty.samples=0"]
    recipe = load_recipe(None, [*quick, "export.onnx=false", "report.html=false"])

    def stops(*given):
        raise Interrupted("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(_search_trials.Trials, "_trial", stops)
        with pytest.raises(Interrupted):
            run(recipe, tmp_path / "out")
    x = np.random.default_rng(1).normal(size=(150, 4)).astype(np.float32)
    np.savez("data.npz", x=x, y=x[:, :3].argmin(1))
    with pytest.raises(DataError, match="data"):
        run(recipe, tmp_path / "out", resume=True)
