"""Files run no code unless the user allows it: each file here would leave a mark if it did."""

from __future__ import annotations

import json
import shutil
import socket

import numpy as np
import pytest
import yaml
from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner

from svdcompress.cli import app
from svdcompress.cli._sparsify import _check_code
from svdcompress.errors import TrustError
from svdcompress.pipeline import open_run
from svdcompress.pipeline._folder import resume_command
from svdcompress.predict import predict_run
from svdcompress.recipe import load_recipe, shipped_recipes
from svdcompress.sources import code_in, preprocess

pytestmark = pytest.mark.filterwarnings("ignore:.*is not the one that the run wrote")

MARK = "from pathlib import Path\nPath('mark').write_text('ran')\nfrom svdcompress.sources import NETS\n"
CODE = MARK + "def make(**args):\n    return NETS['mlp'](**args)\ndef step(x):\n    return x\n"


@pytest.fixture
def foreign(tiny_run, tmp_path, monkeypatch):
    """A copy of a run's folder, next to a file that leaves a mark when it is imported."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_run[0], tmp_path / "run")
    (tmp_path / "evil.py").write_text(CODE)
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((3, 1, 8, 8), dtype=np.float32))
    return tmp_path / "run"


def with_manifest(run, change):
    path = run / "model.safetensors"
    with safe_open(str(path), "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        manifest = json.loads(file.metadata()["svdcompress"])
    del manifest["sha256"]  # whoever changes a file can leave it out, or write another
    change(manifest)
    save_file(tensors, str(path), {"svdcompress": json.dumps(manifest)})


def with_recipe(run, **fields):
    path = run / "recipe.yaml"
    content = yaml.safe_load(path.read_text())
    for field, value in fields.items():
        section, _, name = field.partition("__")
        content[section][name] = value
    path.write_text(yaml.safe_dump(content))


def svdc(*args, code=0):
    result = CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "200"})
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    return result


PREDICT = ("predict", "run", "--input", "x.npy", "--samples", 2, "--device", "cpu")


@pytest.mark.parametrize(
    "transform",
    [{"torch:save": {"f": "mark"}}, "./evil.py:step", "evil:step", {"os:system": {"command": "touch mark"}}, "subprocess:call"],
    ids=str,
)
def test_a_transform_of_a_manifest_is_not_imported(foreign, transform):
    with_manifest(foreign, lambda manifest: manifest["extra"]["preprocessing"].update(transform=[transform]))
    said = svdc(*PREDICT, code=12).output
    name = transform if isinstance(transform, str) else next(iter(transform))
    assert name in said and "--trust-code" in said
    assert not (foreign.parent / "mark").exists()
    with pytest.raises(TrustError, match="trust_code=True"):
        predict_run(foreign, "x.npy", samples=2)
    with pytest.raises(TrustError, match="is Python code"):
        preprocess(np.zeros(1), {"transform": [transform]})  # the entry point for other readers of manifests
    assert not (foreign.parent / "mark").exists()


@pytest.mark.parametrize("name", ["./evil.py:make", "evil:make", "subprocess:call"])
@pytest.mark.parametrize(
    "command",
    [PREDICT, ("evaluate", "run", "--samples", 2), ("export", "run", "--out", "again.onnx"), ("bench", "run")],
    ids=lambda command: command[0],
)
def test_a_model_of_a_folder_is_not_imported(foreign, name, command):
    with_recipe(foreign, model__name=name)
    said = svdc(*command, code=12).output
    assert name in said and "model.name" in said and "--trust-code" in said and f"--model {name}" in said
    assert not (foreign.parent / "mark").exists()
    svdc("report", "run")  # needs no model
    assert not (foreign.parent / "mark").exists()


def test_data_losses_and_library_models_of_a_folder(foreign):
    with_recipe(foreign, data__name="./evil.py:make")
    assert "./evil.py:make (data.name)" in svdc("evaluate", "run", "--samples", 2, code=12).output
    with pytest.raises(TrustError, match=r"data\.transform\.0"):
        with_recipe(foreign, data__name="digits", data__transform=["evil:step"])
        _ = open_run(foreign).data
    with_recipe(foreign, data__transform=[], data__augment=["evil:step"])
    with pytest.raises(TrustError, match=r"data\.augment\.0"):
        _ = open_run(foreign).data
    for name, args in {
        "timm:resnet18": {"checkpoint_path": "weights.pt"},
        "timm:hf-hub:somebody/net": {},
        "hf:folder": {"attn_implementation": "somebody/kernel"},
    }.items():
        with_recipe(foreign, model__name=name, model__args=args)
        with pytest.raises(TrustError, match=r"model\.(name|args)"):
            _ = open_run(foreign).model
    with_recipe(foreign, data__augment=[], data__name="hf:pandas", data__args={"data_files": "x.pkl"})
    with pytest.raises(TrustError, match=r"data\.args\.data_files"):
        _ = open_run(foreign).data


def test_the_users_word_lets_it_run_and_says_what(foreign):
    with_recipe(foreign, model__name="./evil.py:make")
    (foreign.parent / "mark").unlink(missing_ok=True)
    said = svdc(*PREDICT, "--trust-code").output
    assert "--trust-code: running the code that run names: ./evil.py:make (model.name)" in said
    assert (foreign.parent / "mark").exists()
    assert "predictions" in svdc(*PREDICT, "--model", "./evil.py:make").output  # another form of consent
    with_recipe(foreign, data__transform=["./evil.py:step"])
    svdc(*PREDICT, "--model", "mlp")
    assert predict_run(foreign, "x.npy", samples=2, trust_code=True)[1] == 3


def test_resuming_a_folder_runs_no_code_of_its_own(foreign):
    (foreign / "state").mkdir()
    (foreign / "state" / "run.json").write_text("{}")
    with_recipe(foreign, model__name="./evil.py:make")
    said = svdc("sparsify", "--resume", "--out", "run", code=12).output
    assert "./evil.py:make (model.name)" in said and not (foreign.parent / "mark").exists()
    with_recipe(foreign, model__name="mlp", data__transform=["evil:step"])
    said = svdc("sparsify", "--resume", "--out", "run", "--data", "digits", code=12).output  # does not allow the transform
    assert "evil:step (data.transform.0)" in said and not (foreign.parent / "mark").exists()


def test_resuming_a_search_runs_no_command_of_the_folder(foreign):
    (foreign / "state").mkdir()
    (foreign / "state" / "run.json").write_text("{}")
    with_recipe(foreign, search__max_drop=1.0, search__objective="latency", search__latency_command="touch mark")
    said = svdc("sparsify", "--resume", "--out", "run", code=12).output
    assert "touch mark (search.latency_command)" in said and not (foreign.parent / "mark").exists()
    assert resume_command(foreign, open_run(foreign).recipe).endswith("--trust-code")
    svdc(*PREDICT)  # it measures no latency
    with pytest.raises(TrustError, match="touch mark"):
        _check_code(open_run(foreign).recipe, foreign, ["search.max_drop"], trust_code=False)
    _check_code(open_run(foreign).recipe, foreign, ["search.latency_command"], trust_code=False)
    _check_code(open_run(foreign).recipe, foreign, [], trust_code=True)


def test_members_of_an_ensemble_are_trained_by_no_loss_of_the_folder(foreign):
    with_recipe(foreign, loss__name="./evil.py:step", loss__task="classification")
    said = svdc("evaluate", "run", "--samples", 2, "--members", 2, code=12).output
    assert "./evil.py:step (loss.name)" in said and not (foreign.parent / "mark").exists()


def test_what_the_package_knows_needs_no_word(foreign):
    svdc(*PREDICT)
    for recipe in shipped_recipes():
        assert code_in(load_recipe(recipe)) == {}
    with_manifest(foreign, lambda m: m["extra"]["preprocessing"].update(transform=[{"torch:clamp": {"min": 0.1}}]))
    svdc(*PREDICT)


def test_no_command_asks_for_the_network(foreign, asked):
    """Nor does a whole run: the fixture's."""
    svdc(*PREDICT)
    svdc(*PREDICT, "--onnx", "--out", "p.csv")
    svdc("verify", "run")
    svdc("report", "run")
    svdc("export", "run", "--out", "again.onnx")
    assert asked == []
    with pytest.raises(OSError, match="no network"):
        socket.create_connection(("example.org", 80))
    assert asked == ["example.org"]
