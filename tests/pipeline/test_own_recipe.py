"""A stopped run whose recipe.yaml was edited, truncated or emptied by hand, or whose state was removed."""

import json
import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

from svdcompress.cli import app
from svdcompress.errors import Interrupted, OutputError, RecipeError
from svdcompress.files import sealed, unsealed
from svdcompress.pipeline import _stages, prepare, run
from svdcompress.pipeline._folder import locked
from svdcompress.pipeline._own_recipe import check_own_recipe, recipe_used
from svdcompress.recipe import load_recipe

QUICK = ["dense.epochs=1", "train.epochs=2", "recover.epochs=1", "device=cpu", "uncertainty.samples=0", "export.onnx=false"]
QUICK += ["report.html=false", "model=./mine.py:make", "data=npz:data.npz"]


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """The recipe and folder of a run that was stopped after its training."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear(4, 3))\n")
    x = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    np.savez("data.npz", x=x, y=x[:, :3].argmax(1))
    recipe, out = load_recipe(None, QUICK), tmp_path / "out"

    def stops(*given, **more):
        raise Interrupted("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(_stages, "threshold_stage", stops)
        with pytest.raises(Interrupted):
            run(recipe, out)
    return recipe, out


def edit(out, before, after):
    file = out / "recipe.yaml"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


def resumed(out, *options):
    """The command that resumes a run, in this process: its exit code and what it says, in one line."""
    result = CliRunner().invoke(app, ["sparsify", "--resume", "--out", str(out), "--trust-code", "--quiet", *options])
    return result.exit_code, " ".join(result.stderr.split())


def test_an_edit_of_what_was_used_is_refused(begun):
    _, out = begun
    edit(out, "\n  epochs: 2\n", "\n  epochs: 9\n")
    code, said = resumed(out)
    assert code == RecipeError.exit_code and "differ in train.epochs, which the run has used already" in said
    assert "recipe.yaml, changed since" in said and "restore the file (train.epochs: 2)" in said
    edit(out, "\n  epochs: 9\n", "\n  epochs: 2\n")
    assert resumed(out)[0] == 0
    assert json.loads((out / "report.json").read_text())["recipe"].count("epochs: 2\n") == 1


def test_an_edit_of_what_was_not_used_counts(begun):
    _, out = begun
    edit(out, "tolerance: 0.0", "tolerance: 0.25")
    with pytest.raises(RecipeError, match=r"out/recipe\.yaml and the given recipe differ in seed, .* no options that"):
        run(load_recipe(out, ["seed=3"]), out, resume=True)
    assert "tolerance: 0.25" in run(load_recipe(out), out, resume=True)["recipe"]


def test_accepted_changes_are_accepted_at_the_next_resume_too(begun, monkeypatch):
    _, out = begun

    def stops(*given, **more):
        raise Interrupted("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(_stages, "prune_stage", stops)
        with pytest.raises(Interrupted):
            run(load_recipe(out, ["recover.lr=1e-5"]), out, resume=True)
    assert recipe_used(out).recover.lr == 1e-5
    results = run(load_recipe(out), out, resume=True)
    assert next(row["lr"] for row in results["history"] if row["stage"] == "recover") <= 1e-5


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        (lambda text: "", "recipe.yaml: empty"),
        (lambda text: "# nothing\n", "recipe.yaml: empty"),
        (lambda text: text[: text.index("\nrecover:") + 1], "recipe.yaml: truncated, or edited: it lacks recover"),
        (lambda text: text[: text.index("\nreport:") + 1], "it lacks report"),
        (lambda text: text[:-1].rpartition("\n")[0], "it lacks "),
        (lambda text: text[: text.index("\nrecover:")] + "\nrecover: [", "recipe.yaml, line"),
        (lambda text: text.replace("train:\n", "train:\n  epoch: 3\n", 1), "recipe.yaml: train.epoch: unknown field"),
    ],
)
def test_a_file_that_is_not_whole_is_named(begun, keep, said):
    recipe, out = begun
    file = out / "recipe.yaml"
    whole = file.read_text()
    file.write_text(keep(whole))
    code, told = resumed(out)
    assert code == RecipeError.exit_code and said in told, told
    assert "restore it, or give the run's recipe again (svdc sparsify RECIPE --resume" in told and "--overwrite" in told
    assert "metrics" in run(recipe, out, resume=True)["sparse"] and file.read_text() == whole  # the last but one cure


def test_a_run_of_an_earlier_version_has_only_the_file(begun):
    recipe, out = begun
    facts = unsealed((out / "state" / "run.json").read_text())
    assert facts.pop("recipe") and facts.pop("run")
    (out / "state" / "run.json").write_text(json.dumps(facts))
    edit(out, "\nreport:\n", "\nreport:\n  # as it was\n")
    check_own_recipe(out)
    assert recipe_used(out) == recipe.model_copy(update={"out": None})
    assert resumed(out)[0] == 0


def test_a_recipe_in_the_state_that_cannot_be_read(begun):
    recipe, out = begun
    facts = unsealed((out / "state" / "run.json").read_text())
    (out / "state" / "run.json").write_text(sealed({**facts, "recipe": "train: {epochs: many}"}))
    with pytest.raises(OutputError, match=r"run\.json: recipe: damaged \(.*train\.epochs.*; remove .*state and resume"):
        run(recipe, out, resume=True)


def test_a_run_whose_state_was_removed_starts_over(begun):
    """As the message about a damaged run.json says."""
    recipe, out = begun
    (out / "state" / "run.json").write_text("{")
    code, said = resumed(out)
    assert code == OutputError.exit_code and f"remove {out}/state and resume to run all stages again" in said
    shutil.rmtree(out / "state")
    with pytest.raises(OutputError, match=rf"not finished: continue with `svdc sparsify --resume --out {out} --trust-code`"):
        run(recipe, out)
    assert "all stages of" in prepare(out, resume=True) and (out / "state").is_dir()
    shutil.rmtree(out / "state")
    assert resumed(out)[0] == 0
    results = json.loads((out / "report.json").read_text())
    assert [row["stage"] for row in results["history"]] == ["dense", "train", "train", "recover"]
    assert not (out / "state").exists() and "is finished" in resumed(out)[1]


def test_a_state_that_says_finished_needs_a_report(begun):
    _, out = begun
    (out / "state" / "run.json").write_text('{"finished": true}')
    assert prepare(out, resume=True) == "" and (out / "state" / "train.pt").is_file()


def test_a_state_that_is_removed_at_the_last_moment(begun, monkeypatch):
    pytest.importorskip("fcntl")
    _, out = begun

    def removed(file):
        shutil.rmtree(out / "state")
        return True

    monkeypatch.setattr("svdcompress.pipeline._lock._lock", removed)
    with pytest.raises(OutputError, match=r"state has just been removed; give the command again"), locked(out):
        pass


def test_a_folder_with_a_recipe_of_ones_own_holds_no_run(tmp_path):
    (tmp_path / "recipe.yaml").write_text("train: {epochs: 3}")
    with pytest.raises(OutputError, match=r"holds no run \(no run wrote its recipe\.yaml\); leave out --resume"):
        prepare(tmp_path, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]
