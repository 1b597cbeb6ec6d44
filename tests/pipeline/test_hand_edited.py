"""Run folders: killed at the very start, resumed twice at once, edited by hand, on another number of threads."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from svdcompress import report
from svdcompress.errors import CheckpointError, Interrupted, OutputError, SvdcError
from svdcompress.files import TEMPORARY
from svdcompress.pipeline import open_run, prepare, run
from svdcompress.pipeline._folder import LOCK, RunState, locked
from svdcompress.pipeline._lock import is_held
from svdcompress.train import StateFile

ROOT = Path(__file__).parents[2]


# The very start and the very end


@pytest.mark.parametrize(
    "left",
    [
        [],
        ["state/"],
        [f"state/.run.json.77{TEMPORARY}"],
        ["state/run.json", f"state/.run.json.77{TEMPORARY}"],
        ["state/run.json", "state/lock"],
        ["state/run.json", "state/lock", f".recipe.yaml.77{TEMPORARY}"],
    ],
    ids=str,
)
def test_what_a_kill_leaves_in_the_first_moments_is_free(tmp_path, left):
    out = tmp_path / "run"
    (out / "state").mkdir(parents=True) if left else out.mkdir()
    for name in left:
        if not name.endswith("/"):
            (out / name).write_text("{}")
    assert prepare(out) == ""
    assert sorted(path.name for path in out.rglob("*") if path.name != "lock") == ["run.json", "state"]


@pytest.mark.parametrize("left", [["run.json", "lock", "train.pt"], ["run.json"], ["lock"], []])
def test_a_kill_in_the_last_moments_leaves_a_finished_run(tiny_run, tmp_path, left):
    out = tmp_path / "run"
    shutil.copytree(tiny_run[0], out)
    (out / "state").mkdir()
    for name in left:
        (out / "state" / name).write_text('{"finished": true}' if name == "run.json" else "")
    with pytest.raises(OutputError, match="is finished; its figures: svdc report"):
        prepare(out, resume=True)
    assert not (out / "state").exists() and open_run(out).model is not None


def test_a_finished_folder_holds_no_temporary_files_and_one_mode(tiny_run, tmp_path, monkeypatch):
    mask = os.umask(0)
    os.umask(mask)
    assert {path.stat().st_mode & 0o777 for path in tiny_run[0].iterdir() if path.is_file()} == {0o666 & ~mask}
    recipe, out = user_run(tmp_path, monkeypatch, "def make():\n    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))\n")
    out.mkdir()
    (out / f".model.onnx.7{TEMPORARY}").mkdir()
    (out / f".model.onnx.7{TEMPORARY}" / "model.onnx").write_text("half")
    state = out / "state"
    state.mkdir()
    (state / "run.json").write_text("{}")
    run(recipe, out)
    assert not [path.name for path in out.rglob(".*")] and (out / "report.json").is_file()


def test_what_a_killed_export_leaves_is_known_as_temporary(tmp_path, monkeypatch):
    from svdcompress.export import _write, export_onnx
    from svdcompress.files import is_temporary

    seen = []
    monkeypatch.setattr(_write, "_check", lambda path: seen.extend(tmp_path.iterdir()))
    export_onnx(torch.nn.Linear(3, 2).eval(), tmp_path / "model.onnx", torch.zeros(2, 3))
    assert seen and all(map(is_temporary, seen))


# The lock


HOLD = "import sys, time; from pathlib import Path; from svdcompress.pipeline._folder import locked\nwith locked(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(60)"  # noqa: E501


def test_two_processes_on_one_folder(tiny_recipe, tmp_path):
    pytest.importorskip("fcntl")
    out = tmp_path / "run"
    (out / "state").mkdir(parents=True)
    RunState(out, writer=True).write_recipe(tiny_recipe)
    RunState(out, writer=True).put(seconds={})
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, out], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        assert other.stdout.readline() == b"held\n"
        assert is_held(out / LOCK)
        with pytest.raises(OutputError, match="another process is working on this run"):
            run(tiny_recipe, out, resume=True)
        for overwrite in (False, True):
            with pytest.raises(OutputError, match="a run is under way"):
                run(tiny_recipe, out, overwrite=overwrite)
        assert sorted(path.name for path in (out / "state").iterdir()) == ["lock", "run.json"]  # nothing was touched
    finally:
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
    with locked(out):  # a killed process holds no lock
        pass


HOLD_WITH_A_WORKER = """
import multiprocessing, sys, time
from pathlib import Path
from svdcompress.pipeline._folder import locked
with locked(Path(sys.argv[1])):
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    worker.start()
    print(worker.pid, flush=True)
    time.sleep(60)
"""


def test_a_worker_that_outlives_a_killed_run_holds_no_lock(tmp_path):
    """Workers that read data notice only after some seconds that their run is gone."""
    pytest.importorskip("fcntl")
    (tmp_path / "state").mkdir()
    command = [sys.executable, "-c", HOLD_WITH_A_WORKER, tmp_path]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)})
    worker = int(other.stdout.readline())
    try:
        assert is_held(tmp_path / LOCK)  # the run itself still holds it
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        os.kill(worker, 0)  # it lives
        with locked(tmp_path):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


# Edited by hand


@pytest.mark.parametrize(
    "text",
    ["[]", "3", '{"seconds": 3}', '{"seconds": {"data": "long"}}', '{"torch_threads": "two"}', '{"finished": "yes"}',
     '{"torch_threads": 0}', '{"torch_threads": "2"}', "{" * 10_000, '{"seconds": {"data": NaN}}', "\x00"],
)  # fmt: skip
def test_run_json(tmp_path, text):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "run.json").write_text(text)
    with pytest.raises(OutputError, match=r"run\.json: damaged"):
        RunState(tmp_path, writer=False)


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 3},
        {"layers": [{"name": 3}]},
        {"dense": {"metrics": {"error": "low"}}},
        {"sparse": {"bytes": -4}},
        {"compression": {"latency": {"batch_1": "2x"}}},
        {"history": [{"stage": "train", "epoch": "first"}]},
        {"log_alpha": {"0": {"edges": [1], "counts": []}}},
        {"warnings": "none"},
        {"seconds": {"data": "1"}},
        {"pictures": [{"file": "../../etc/passwd"}]},
        {"pictures": [{"file": "/etc/passwd.png"}]},
        {"pictures": [{"file": "report.json"}]},
    ],
    ids=str,
)
def test_report_json(tiny_run, tmp_path, change):
    results = {**json.loads((tiny_run[0] / "report.json").read_text()), **change}
    (tmp_path / "report.json").write_text(json.dumps(results))
    with pytest.raises(OutputError, match=rf"report\.json: not a report written by svdc: {next(iter(change))}"):
        report.load(tmp_path)
    assert report.load(tiny_run[0])["name"] == "tiny"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"preprocessing": 3}, "preprocessing"),
        ({"preprocessing": {"transform": "flatten"}}, "transform"),
        ({"preprocessing": {"image_size": [0, 4]}}, "image_size"),
        ({"preprocessing": {"target_scale": [1]}}, "target_scale"),
        ({"classes": [1, 2]}, "classes"),
        ({"tau": "1"}, "tau"),
        ({"inputs": {"inputs_kept": [-1]}}, "inputs_kept"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*is not the one that the run wrote")
def test_what_a_manifest_says_of_its_run(tiny_run, tmp_path, change, said):
    from safetensors import safe_open
    from safetensors.torch import save_file

    shutil.copytree(tiny_run[0], tmp_path / "run")
    path = tmp_path / "run" / "model.safetensors"
    with safe_open(str(path), "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        manifest = json.loads(file.metadata()["svdcompress"])
    manifest["extra"].update(change)
    save_file(tensors, str(path), {"svdcompress": json.dumps(manifest)})
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*extra\..*{said}"):
        _ = open_run(tmp_path / "run").preprocessing


@pytest.mark.parametrize(
    "state",
    [3, {}, {"epoch": "two"}, {"epoch": -1}, {"epoch": True}, [1, 2], {"stage": "train", "epoch": 1, "model": 7}],
    ids=str,
)
def test_states_of_training(tmp_path, state):
    torch.save(state, tmp_path / "train.pt")
    with pytest.raises(CheckpointError, match=r"train\.pt: damaged .*remove it to start this stage again"):
        StateFile(tmp_path / "train.pt").load()


class Harmful:
    """Runs code when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_a_state_of_training_runs_no_code(tmp_path):
    torch.save({"epoch": 1, "model": Harmful(tmp_path / "ran")}, tmp_path / "train.pt")
    with pytest.raises(CheckpointError, match=r"train\.pt: damaged"):
        StateFile(tmp_path / "train.pt").epochs()
    assert not (tmp_path / "ran").exists()


# Threads


def test_a_resumed_run_takes_the_number_of_threads_it_began_with(tmp_path, monkeypatch):
    """Another number would change the last bits, and with them every byte."""
    from svdcompress.pipeline import _run

    seen = []

    def looks(context, run_stages=_run.run_stages):
        seen.append(torch.get_num_threads())
        if len(seen) == 1:
            context.state.write_recipe(context.recipe)
            context.stop.signal = "SIGTERM"
        return run_stages(context)

    monkeypatch.setattr(_run, "run_stages", looks)
    recipe, out = user_run(tmp_path, monkeypatch, "def make():\n    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))\n")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with pytest.raises(Interrupted):
            run(recipe, out)
        assert json.loads((out / "state" / "run.json").read_text())["torch_threads"] == 3
        torch.set_num_threads(1)
        results = run(recipe, out, resume=True)
        assert seen == [3, 3] and results["torch_threads"] == 3 and torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


# Behavior of a user's own model


def user_run(tmp_path, monkeypatch, model, *sets):
    import numpy as np

    from svdcompress.recipe import load_recipe

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import torch\nfrom torch import nn\n" + model)
    x = np.random.default_rng(0).normal(size=(41, 4)).astype(np.float32)
    np.savez("d.npz", x=x, y=x[:, :3].argmax(1))
    quick = ["dense.epochs=1", "train.epochs=1", "recover.epochs=0", "device=cpu", "uncertainty.samples=0", "export.onnx=false"]
    return load_recipe(None, ["model=./mine.py:make", "data=npz:d.npz", "report.html=false", *quick, *sets]), tmp_path / "out"


BROKEN = """
class Net(nn.Sequential):
    calls = 0
    def forward(self, x):
        if self.training:
            Net.calls += 1
            if Net.calls > 2:
                raise FAILURE
        return super().forward(x)
def make():
    return Net(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
"""


@pytest.mark.parametrize(
    ("failure", "kind", "said"),
    [
        ("KeyError('no such part')", "ModelError", r"mine\.py, line 10, in forward: KeyError: 'no such part'"),
        (
            "torch.OutOfMemoryError('CUDA out of memory')",
            "TrainingError",
            r"out of memory in a batch of 20: lower dense\.batch_size",
        ),
        ("MemoryError()", "TrainingError", r"lower dense\.batch_size"),
    ],
)
def test_a_failure_in_training_is_said_in_the_users_terms_and_the_state_is_kept(tmp_path, monkeypatch, failure, kind, said):
    recipe, out = user_run(tmp_path, monkeypatch, BROKEN.replace("FAILURE", failure), "dense.batch_size=20", "dense.epochs=3")
    with pytest.raises(SvdcError, match=said) as error:
        run(recipe, out)
    assert type(error.value).__name__ == kind
    assert f"continue with: svdc sparsify --resume --out {out} --trust-code" in str(error.value)
    assert (out / "state" / "dense.pt").is_file() and (out / "recipe.yaml").is_file()


def test_batch_normalisation_of_a_single_example(tmp_path, monkeypatch):
    model = "def make():\n    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))\n"
    recipe, out = user_run(tmp_path, monkeypatch, model, "dense.batch_size=1")
    with pytest.raises(SvdcError, match=r"batch normalization needs at least two examples.*dense\.batch_size to 2"):
        run(recipe, out)


def test_a_model_with_all_parameters_frozen(tmp_path, monkeypatch):
    model = "def make():\n    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)).requires_grad_(False)\n"
    recipe, out = user_run(tmp_path, monkeypatch, model)
    with pytest.raises(SvdcError, match=r"all its parameters are frozen \(requires_grad is False\)"):
        run(recipe, out)


@pytest.mark.parametrize("samples", [10**20, 0, -1, True, 2.5])
def test_numbers_of_samples(tmp_path, samples):
    from svdcompress.errors import UsageError
    from svdcompress.predict import predict_run

    with pytest.raises(UsageError, match=r"samples: .*; a whole number from 1 to"):
        predict_run(tmp_path, "x.npy", samples=samples)


def test_the_lock_is_given_back_when_a_run_ends(tiny_run, tmp_path):
    started = time.monotonic()
    with pytest.raises(OutputError, match="is finished"):
        run(open_run(tiny_run[0]).recipe, tiny_run[0], resume=True)
    assert time.monotonic() - started < 60 and not (tiny_run[0] / "state").exists()


def test_a_run_that_is_stopped_before_its_first_stage_can_be_resumed(tmp_path, monkeypatch):
    from svdcompress.pipeline import _run

    def stopped(context, run_stages=_run.run_stages):
        context.stop.signal = "SIGINT"
        return run_stages(context)

    recipe, out = user_run(tmp_path, monkeypatch, "def make():\n    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))\n")
    with monkeypatch.context() as patch:
        patch.setattr(_run, "run_stages", stopped)
        with pytest.raises(Interrupted, match=r"before the stage data.*--resume --out"):
            run(recipe, out)
    assert "metrics" in run(recipe, out, resume=True)["sparse"]
