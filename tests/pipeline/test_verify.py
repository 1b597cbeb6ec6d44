"""`svdc verify`, and the same checks before a run ends: differences are found and named."""

import hashlib
import json
import shutil

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors.torch import load_file
from typer.testing import CliRunner

import svdcompress
from svdcompress import checkpoint, report
from svdcompress.cli._app import app
from svdcompress.errors import OutputError, VerifyError
from svdcompress.pipeline import _stages, open_run, run, verify_run
from svdcompress.pipeline._verify import self_check, set_aside
from svdcompress.recipe import load_recipe
from svdcompress.report import FORMAT

QUICK = ["dense.epochs=1", "train.epochs=1", "recover.epochs=1", "uncertainty.samples=0", "report.latency=false"]


@pytest.fixture
def folder(tiny_run, tmp_path):
    """A copy of the tiny run that tests may break."""
    return shutil.copytree(tiny_run[0], tmp_path / "copy")


def stored(folder):
    return json.loads((folder / "report.json").read_text())


def write(folder, results, stamp=True):
    report.write_json(folder / "report.json", report.stamped(results, folder) if stamp else results)


def wrong(folder, **more):
    """{file: names of the failed checks}"""
    found = {}
    for check in verify_run(folder, **more).failed:
        found.setdefault(check.file, set()).add(check.name)
    return found


def scaled(path, factor=1.5):
    """Multiply all float weights of an ONNX file by a factor; the file keeps its size."""
    model = onnx.load(str(path))
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) > 1:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(factor), tensor.name))
    onnx.save(model, str(path))


def test_a_run_is_what_its_report_says(tiny_run):
    found = verify_run(tiny_run[0])
    assert found.failed == [] and found.skipped == []
    looked_at = {(check.file, check.name) for check in found.checks}
    assert looked_at >= {
        ("model.onnx", "bytes"),
        ("model.safetensors", "nonzero"),
        ("model.safetensors", "parameters"),
        ("dense.safetensors", "parameters"),
        ("model.onnx", "difference from model.safetensors"),
        ("model.onnx", "error of 60 test examples"),
        ("model_mc.onnx", "Monte-Carlo mean"),
        ("report.json", "compression: nonzero"),
    }


def test_digests_are_those_of_the_files(tiny_run):
    folder, results = tiny_run
    names = {path.name for path in folder.iterdir()} - {"report.json", "report.html"}
    entries = stored(folder)["files"]
    assert set(entries) == names >= {"model.onnx", "model_mc.onnx", "model.safetensors", "dense.safetensors", "recipe.yaml"}
    for name in names:
        content = (folder / name).read_bytes()
        assert entries[name] == {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    assert stored(folder)["format"] == FORMAT == 1 and results["files"] == entries


def test_a_changed_byte_in_any_file_is_found_and_named(folder):
    for name in stored(folder)["files"]:
        path = folder / name
        before = path.read_bytes()
        path.write_bytes(before[:-3] + bytes([before[-3] ^ 1]) + before[-2:])
        digests = [check.file for check in verify_run(folder).failed if check.name == "SHA-256"]
        path.write_bytes(before)
        assert digests == [name]
    (folder / "model_mc.onnx").unlink()
    (lost,) = verify_run(folder).failed
    assert lost.file == "model_mc.onnx" and "is missing" in lost.note
    (folder / "model.safetensors").unlink()
    assert "can be opened" in wrong(folder)[str(folder)] and "SHA-256" in wrong(folder)["model.safetensors"]


@pytest.mark.parametrize(
    ("place", "file", "figure"),
    [
        (("sparse", "metrics", "error"), "model.onnx", "error of 60 test examples"),
        (("sparse", "metrics", "nll"), "model.onnx", "nll of 60 test examples"),
        (("sparse", "nonzero"), "model.safetensors", "nonzero"),
        (("sparse", "parameters"), "model.safetensors", "parameters"),
        (("sparse", "bytes"), "model.onnx", "bytes"),
        (("dense", "bytes"), "dense.onnx", "bytes"),
        (("dense", "metrics", "error"), "dense.onnx", "error of 60 test examples"),
        (("dense", "metrics", "nll"), "dense.onnx", "nll of 60 test examples"),
        (("dense", "parameters"), "dense.safetensors", "parameters"),
        (("compression", "macs"), "report.json", "compression: macs"),
        (("layers", 0, "shape_after", 0), "model.safetensors", "shapes of layers"),
        (("layers", 1, "weights"), "model.safetensors", "weights of layers"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_a_figure_that_was_changed_is_found(folder, place, file, figure):
    results = stored(folder)
    inner = results
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] += 5
    write(folder, results, stamp=False)
    assert figure in wrong(folder)[file]


def test_files_of_another_model_are_found_where_the_digests_are_theirs(folder):
    scaled(folder / "model.onnx")
    write(folder, stored(folder))
    assert wrong(folder)["model.onnx"] >= {"difference from model.safetensors", "nll of 60 test examples"}


def test_a_monte_carlo_file_of_another_model_is_found(folder):
    scaled(folder / "model_mc.onnx")
    write(folder, stored(folder))
    assert wrong(folder) == {"model_mc.onnx": {"Monte-Carlo mean"}}


def test_a_checkpoint_of_another_model_is_found(folder):
    opened = open_run(folder)
    extra = checkpoint.read_manifest(folder / "model.safetensors")["extra"]
    with torch.no_grad():
        next(opened.model.parameters()).mul_(1.5)
    checkpoint.save(opened.model, folder / "model.safetensors", extra=extra)
    write(folder, stored(folder))
    assert "difference from model.safetensors" in wrong(folder)["model.onnx"]


def test_what_cannot_be_looked_at_is_said(folder):
    text = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(text.replace("name: digits", "name: ./there-is-none.py:make", 1))
    assert "there-is-none" in (folder / "recipe.yaml").read_text()
    write(folder, stored(folder))
    found = verify_run(folder)
    assert found.failed == [] and any("--trust-code" in check.note for check in found.skipped)
    write(folder, {key: value for key, value in stored(folder).items() if key not in ("files", "format")}, stamp=False)
    assert any(check.name == "SHA-256" and "no digests" in check.note for check in verify_run(folder).skipped)


def test_a_report_of_a_later_layout_is_refused_and_an_earlier_one_read(folder):
    write(folder, {**stored(folder), "format": FORMAT + 1, "dense": "of another shape"}, stamp=False)
    with pytest.raises(OutputError, match=r"report.json: format 2, written by a newer svdcompress"):
        verify_run(folder)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/../../b", "..\\b"])
def test_nothing_outside_the_folder_is_looked_at(folder, name):
    write(folder, {**stored(folder), "files": {name: {"sha256": "0" * 64, "bytes": 1}}}, stamp=False)
    with pytest.raises(OutputError, match="must be a file within the folder"):
        verify_run(folder)


def test_the_command_ends_with_a_code_of_its_own(folder):
    runner = CliRunner()
    good = runner.invoke(app, ["verify", str(folder), "--json"])
    assert good.exit_code == 0 and json.loads(good.stdout)["passed"] is True
    results = stored(folder)
    results["sparse"]["nonzero"] += 1
    write(folder, results, stamp=False)
    bad = runner.invoke(app, ["verify", str(folder)], env={"COLUMNS": "200"})
    assert bad.exit_code == VerifyError.exit_code == 13
    assert "FAILED" in bad.stdout and f"{results['sparse']['nonzero']:,}" in bad.stdout
    assert "does not match its report: report.json, model.safetensors" in bad.stderr
    as_json = runner.invoke(app, ["verify", str(folder), "--json"])
    assert as_json.exit_code == 13 and json.loads(as_json.stdout)["failed"] >= 1
    assert "13" in runner.invoke(app, ["--help"], env={"COLUMNS": "200"}).stdout


def broken(name, change):
    """A cost stage that also breaks a run's file between its export and its checks."""

    def cost(context, *rest, work=_stages.cost_stage):
        work(context, *rest)
        change(context.out / name)

    return cost


def other_weights(path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    tensors = load_file(str(path))
    with safe_open(str(path), "pt") as file:
        metadata = file.metadata()
    name = next(name for name in sorted(tensors) if name.endswith("weight"))
    tensors[name] = tensors[name] + 1e-3
    save_file(tensors, str(path), metadata)


WAYS = pytest.mark.parametrize(
    ("name", "change", "figure"),
    [
        ("model.onnx", scaled, "difference from model.safetensors"),
        ("model_mc.onnx", scaled, "Monte-Carlo mean"),
        ("model.safetensors", other_weights, "tensors as in the run"),
        ("model.onnx", lambda path: path.write_bytes(path.read_bytes()[:-40]), "bytes"),
    ],
    ids=["other weights", "other Monte-Carlo weights", "other checkpoint", "cut off"],
)


@WAYS
def test_a_runs_own_checks_find_a_file_that_broke(tiny_run, folder, name, change, figure):
    opened = open_run(tiny_run[0])
    checked = (opened.recipe, folder, tiny_run[1], opened.model, opened.data)
    assert self_check(*checked).failed == self_check(*checked).skipped == []
    change(folder / name)
    found = self_check(*checked)
    assert figure in {check.name for check in found.failed if check.file == name}
    assert f"kept as FAILED-{name}" in str(set_aside(found))
    assert (folder / f"FAILED-{name}").is_file() and not (folder / name).exists()


@WAYS
@pytest.mark.slow
def test_a_file_that_broke_is_kept_under_another_name_and_ends_the_run(
    tiny_recipe, tmp_path, monkeypatch, name, change, figure
):
    from svdcompress.recipe import dump_recipe

    (tmp_path / "tiny.yaml").write_text(dump_recipe(tiny_recipe))
    recipe, out = load_recipe(str(tmp_path / "tiny.yaml"), QUICK), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(_stages, "cost_stage", broken(name, change))
        with pytest.raises(VerifyError, match=rf"{name}: {figure}.*kept as .*FAILED-{name}.*--resume --out"):
            run(recipe, out)
    assert (out / f"FAILED-{name}").is_file() and not (out / name).exists()
    assert stored(out)["verified"]["passed"] is False and any("own checks" in line for line in stored(out)["warnings"])
    results = run(recipe, out, resume=True)
    assert results["verified"]["passed"] is True and results["verified"]["skipped"] == 0
    assert not (out / "state").exists() and verify_run(out).failed == []


@pytest.mark.slow
def test_checks_that_cannot_be_made_are_warnings(tiny_recipe, tmp_path, monkeypatch):
    from svdcompress.pipeline import _checks

    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(_checks, "mc_predict", fail)
    from svdcompress.recipe import dump_recipe

    (tmp_path / "tiny.yaml").write_text(dump_recipe(tiny_recipe))
    results = run(load_recipe(str(tmp_path / "tiny.yaml"), QUICK), tmp_path / "run")
    assert results["verified"]["passed"] is True and results["verified"]["skipped"] == 1
    assert any("not checked: model_mc.onnx: Monte-Carlo mean (RuntimeError: out of memory)" in w for w in results["warnings"])


def test_an_experiments_folder_has_digests_too(tmp_path):
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"picture")
    write(folder, {"experiment": "leak", "seed": 0})
    assert verify_run(folder).failed == [] and len(verify_run(folder).checks) == 1
    (folder / "a.png").write_bytes(b"Picture")
    assert wrong(folder) == {"a.png": {"SHA-256"}}


def test_short_memory_says_nothing_against_a_file(folder, monkeypatch):
    from svdcompress.pipeline import _checks

    monkeypatch.setattr(_checks, "evaluate", lambda *args, **more: torch.empty(2**48))
    found = verify_run(folder)
    assert found.failed == [] and [(check.file, check.passed) for check in found.skipped] == [
        ("model.onnx", None),
        ("dense.onnx", None),
    ]
    assert "memory" in found.skipped[0].note


class Tied(torch.nn.Module):
    """Two layers that share their weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


@pytest.mark.filterwarnings("ignore::UserWarning")  # training is too short, and nothing can go
@pytest.mark.parametrize("more", [{}, {"goal": "macs=2x"}])
def test_a_run_with_tied_layers_passes_its_own_checks(tmp_path, more):
    torch.manual_seed(0)
    x = torch.randn(120, 8)
    settings = {"dense.epochs": 2, "train.epochs": 1, "recover.epochs": 1, "uncertainty.samples": 0, "report.html": False}
    settings |= {"report.latency": False, "search.trials": 1} if more else {"report.latency": False}
    found = svdcompress.sparsify(Tied(), (x, (x[:, 0] > 0).long()), out=tmp_path / "run", settings=settings, **more)
    assert {row["name"]: row["shape_after"] for row in found.results["layers"]}["b"] is not None
    assert not verify_run(tmp_path / "run", model=Tied, data=(x, (x[:, 0] > 0).long())).failed
