"""Damaged files of a stopped run: the error says what to do, and that works."""

import json
import re
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from test_search import searching

from svdcompress import checkpoint
from svdcompress.convert import convert
from svdcompress.errors import CheckpointError, Interrupted, OutputError
from svdcompress.files import sealed, unsealed
from svdcompress.pipeline import _trainer, prepare, run
from svdcompress.pipeline._damaged import cured
from svdcompress.pipeline._path import Climb

SHAPES = ("search.goal='parameters=4x'", "search.trials=2", "search.levels=1", "train.epochs=4", "recover.epochs=2")
SHAPES += ("model.args={sizes: [64, 16, 10]}", "search.mixture=off", "search.reconstruct=off")


def stopping(patch, stage):
    """Stop runs after the first epoch of a stage; returns the stages of all epochs from then on."""
    seen = []

    def log(self, row):
        seen.append(row["stage"])
        if row["stage"] == stage:
            self.context.stop.signal = "SIGTERM"

    patch.setattr(_trainer.Trainer, "_log", log)
    return seen


def begun(recipe, out, stage):
    with pytest.MonkeyPatch.context() as patch:
        stopping(patch, stage)
        with pytest.raises(Interrupted):
            run(recipe, out)
    return recipe, out


@pytest.fixture(scope="module")
def searched(tiny_recipe, tmp_path_factory):
    """A search that was stopped in its second trial."""
    return begun(searching(tiny_recipe, *SHAPES), tmp_path_factory.mktemp("stopped") / "run", "trial 2")


@pytest.fixture(scope="module")
def undisturbed(searched, tmp_path_factory):
    out = tmp_path_factory.mktemp("resumed") / "run"
    shutil.copytree(searched[1], out)
    run(searched[0], out, resume=True)
    return load_file(out / "model.safetensors")


def truncated(file):
    file.write_bytes(file.read_bytes()[:-40])


def missing(file):
    file.unlink()


def flipped(file):
    """One bit of the last tensor is another."""
    content = bytearray(file.read_bytes())
    content[-3] ^= 8
    file.write_bytes(content)


def follow(said, out, file):
    """Remove what a message says."""
    told = re.search(r"; remove (\S+) to ", said)[1]
    path = file if told == "it" else Path(told)
    assert path.is_relative_to(out)
    shutil.rmtree(path) if path.is_dir() else path.unlink()


ANEW = r"remove \S+/state/search to search again"


@pytest.mark.parametrize(
    ("name", "harm", "advice", "stages"),
    [
        ("state/search/level-1.safetensors", truncated, "remove it to make it again", {"trial 2"}),
        ("state/search/cooled-2.safetensors", truncated, "remove it to make it again", {"trial 2"}),
        ("state/search/trial-2/pruned.safetensors", truncated, "remove it to prune again", {"trial 2"}),
        ("state/search/level-1.safetensors", flipped, "remove it to make it again", {"trial 2"}),
        ("state/search/cooled-2.safetensors", flipped, "remove it to make it again", {"trial 2"}),
        ("state/search/trial-2/pruned.safetensors", flipped, "remove it to prune again", {"trial 2"}),
        ("state/search/cooled-1.safetensors", truncated, ANEW, None),
        ("state/search/cooled-1.safetensors", flipped, ANEW, None),
        ("trials/01.safetensors", flipped, ANEW, None),
        ("trials/01.safetensors", truncated, ANEW, None),
        ("trials/01.safetensors", missing, ANEW, None),
    ],
)
def test_of_a_search(searched, undisturbed, tmp_path, monkeypatch, name, harm, advice, stages):
    recipe, out = searched[0], tmp_path / "run"
    shutil.copytree(searched[1], out)
    harm(out / name)
    seen = stopping(monkeypatch, None)
    with pytest.raises(
        CheckpointError, match=rf"{re.escape(name)}: (missing|not a safe|damaged, or changed).*; {advice}\. .*--resume --out"
    ) as error:
        run(recipe, out, resume=True)
    assert seen == []  # before any training
    follow(str(error.value), out, out / name)
    run(recipe, out, resume=True)
    assert stages is None or set(seen) == stages
    found = load_file(out / "model.safetensors")
    assert found.keys() == undisturbed.keys() and all(torch.equal(found[key], undisturbed[key]) for key in found)


def test_of_a_trials_figures(searched, tmp_path, monkeypatch):
    """A state without what a search decides by would fail only once all trials are made."""
    recipe, out = searched[0], tmp_path / "run"
    shutil.copytree(searched[1], out)
    file = out / "state" / "search" / "trials.json"
    content = unsealed(file.read_text())
    del content["trials"][0]["costs"]["parameters"]
    file.write_text(sealed(content))
    seen = stopping(monkeypatch, None)
    said = rf"trials\.json: damaged \(trials\.0\.costs\.parameters: .*\); {ANEW}\. .*--resume --out"
    with pytest.raises(CheckpointError, match=said):
        run(recipe, out, resume=True)
    assert seen == [] and file.is_file()


def test_of_a_trial_in_place_of_another(searched, tmp_path, monkeypatch):
    recipe, out = searched[0], tmp_path / "run"
    shutil.copytree(searched[1], out)
    file = out / "trials" / "01.safetensors"
    model = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.Linear(16, 10))
    checkpoint.save(convert(model), file, extra={"trial": 2})
    seen = stopping(monkeypatch, None)
    with pytest.raises(CheckpointError, match=rf"trials/01\.safetensors: it holds trial 2; {ANEW}"):
        run(recipe, out, resume=True)
    assert seen == []


def test_of_a_training_state(tiny_recipe, tmp_path):
    """torch.load does not compare the checksums of what it reads."""
    recipe, out = begun(tiny_recipe, tmp_path / "run", "train")
    file = out / "state" / "train.pt"
    with zipfile.ZipFile(file) as parts:
        largest = max(parts.infolist(), key=lambda part: part.file_size)
    content = bytearray(file.read_bytes())
    content[largest.header_offset + 200 + largest.file_size // 2] ^= 8
    file.write_bytes(content)
    said = r"train\.pt: damaged \(ValueError: the checksum of .*/data/\d+ differs\); remove it to start this stage again"
    with pytest.raises(CheckpointError, match=said):
        run(recipe, out, resume=True)
    file.unlink()
    assert "metrics" in run(recipe, out, resume=True)["sparse"]


def test_of_a_training_state_of_another_run(tiny_recipe, tmp_path):
    """Of the same recipe and stage, so that nothing else would tell."""
    recipe, out = begun(tiny_recipe, tmp_path / "run", "train")
    begun(tiny_recipe, tmp_path / "other", "train")
    file = out / "state" / "train.pt"
    file.write_bytes((tmp_path / "other" / "state" / "train.pt").read_bytes())
    with pytest.raises(CheckpointError, match=r"train\.pt: it belongs to another run; remove it to start this stage again"):
        run(recipe, out, resume=True)
    state = {name: value for name, value in torch.load(file).items() if name != "owner"}
    torch.save(state, file)  # as earlier versions wrote it
    assert "metrics" in run(recipe, out, resume=True)["sparse"]


def test_of_facts_of_a_run_that_were_changed(tiny_recipe, tmp_path):
    recipe, out = begun(tiny_recipe, tmp_path / "run", "train")
    file = out / "state" / "run.json"
    whole = file.read_text()
    file.write_text(whole.replace('"examples": ', '"examples": 1', 1))
    assert file.read_text() != whole
    with pytest.raises(OutputError, match=r"run\.json: damaged \(changed since it was written\); remove \S+/state and resume"):
        run(recipe, out, resume=True)
    file.write_text(json.dumps({name: value for name, value in json.loads(whole).items() if name not in ("sha256", "run")}))
    assert "metrics" in run(recipe, out, resume=True)["sparse"]  # as earlier versions wrote it


def test_of_the_facts_of_a_run(tiny_recipe, tmp_path):
    """Without them, nothing would say that the weights or the data are others than before."""
    recipe, out = begun(tiny_recipe, tmp_path / "run", "train")
    (out / "state" / "run.json").unlink()
    with pytest.raises(OutputError, match=r"run\.json is missing, so it is not known what dense\.pt.*; remove \S+/state and"):
        run(recipe, out, resume=True)


def test_of_a_lost_recipe(tiny_recipe, tmp_path):
    recipe, out = begun(tiny_recipe, tmp_path / "run", "train")
    text = (out / "recipe.yaml").read_text()
    (out / "recipe.yaml").unlink()
    run(recipe, out, resume=True)
    assert (out / "recipe.yaml").read_text() == text


def test_of_a_finished_run_whose_report_is_gone(tiny_run, tmp_path, monkeypatch):
    """It looks unfinished. Run again, it loses nothing."""
    out = shutil.copytree(tiny_run[0], tmp_path / "run")
    (out / "report.json").unlink()
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    monkeypatch.chdir(out)
    said = prepare(Path("."), resume=True)
    aside = tmp_path / "run.old-1"
    assert said.endswith(f"are run again; what they had written is now in {aside}")
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == before
    assert sorted(path.name for path in out.iterdir()) == ["recipe.yaml", "state"]


def test_of_a_run_without_a_search(tiny_recipe, tmp_path):
    recipe = searching(tiny_recipe, "train.epochs=2", "recover.epochs=2")
    _, out = begun(recipe, tmp_path / "run", "recover")
    file = out / "state" / "pruned.safetensors"
    truncated(file)
    with pytest.raises(CheckpointError, match=r"pruned\.safetensors: not a safe.*; remove it to prune again\. ") as error:
        run(recipe, out, resume=True)
    follow(str(error.value), out, file)
    results = run(recipe, out, resume=True)
    assert [row["stage"] for row in results["history"]].count("recover") == 2


def test_of_the_converted_model(tmp_path):
    """A search that has it is another search than one without it."""
    recipe = SimpleNamespace(model=SimpleNamespace(name="mlp", args={}))
    climb = Climb(SimpleNamespace(recipe=recipe), None, None, None, tmp_path, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("svdcompress.pipeline._path.make_model", lambda section: torch.nn.Linear(3, 2))
        (tmp_path / "level-0.safetensors").write_bytes(b"half")
        with pytest.raises(CheckpointError, match=rf"level-0\.safetensors: .*; remove {tmp_path} to search again"):
            climb.posterior(0)


def test_of_another_content(tmp_path):
    """A file that `save` wrote for something else has none of a trial's figures."""
    file = tmp_path / "cooled-1.safetensors"
    checkpoint.save(convert(torch.nn.Sequential(torch.nn.Linear(3, 2))), file)
    with (
        pytest.raises(CheckpointError, match=r"cooled-1\.safetensors: damaged \(KeyError: 'cooled'\); remove it"),
        cured(file, "remove it"),
    ):
        json.dumps(checkpoint.read_manifest(file)["extra"]["cooled"])
