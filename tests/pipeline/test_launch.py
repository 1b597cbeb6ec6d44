"""A whole run with `torchrun`: two gloo processes on the CPU, one model, one folder."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from svdcompress.errors import UsageError
from svdcompress.pipeline import open_run
from svdcompress.train._device import DEVICE_VARIABLE, make_accelerator


def torchrun(*arguments, cwd=None):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "svdcompress"]
    env = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd(), "COLUMNS": "200"}
    return subprocess.run([*command, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=900, cwd=cwd)


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["true", "false"])
def test_two_processes_make_one_run(tiny_run, tmp_path, noise):
    out = tmp_path / "runs" / "tiny"  # the default folder
    settings = [f"recover.noise={noise}", "recover.epochs=2", "train.shrink=50%", "train.batch_size=5", "device=cpu"]
    settings += ["train.epochs=5", "train.beta={start: 0, stop: 1, final: 1}"]
    wanted = [part for setting in settings for part in ("--set", setting)]
    done = torchrun("sparsify", tiny_run[0] / "recipe.yaml", "--json", *wanted, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout)  # only one process prints
    written = json.loads((out / "report.json").read_text())
    assert results["processes"] == 2 and all(results[name] == written[name] for name in written if name != "seconds")
    assert any("train.shrink works in one process only" in line for line in results["warnings"])
    assert [path.name for path in out.parent.iterdir()] == ["tiny"] and not (out / "state").exists()
    assert {row["stage"] for row in results["history"]} == {"dense", "train", "recover"}
    opened = open_run(out)
    x, y = next(opened.data.test.batches(10**6))
    with torch.no_grad():
        wrong = opened.model(x).argmax(1) != y
    assert results["sparse"]["metrics"]["error"] == pytest.approx(100 * np.mean(wrong.numpy()))
    assert results["sparse"]["parameters"] < results["dense"]["parameters"]


@pytest.mark.slow
def test_a_stopped_run_of_two_processes_goes_on(tiny_run, tmp_path):
    """Here the run ends by itself midway, since the recovery's loss is not finite."""
    out = tmp_path / "run"
    bad = torchrun("sparsify", tiny_run[0] / "recipe.yaml", "--out", out, "--set", "recover.lr=1e30", "--set", "device=cpu")
    assert bad.returncode != 0 and (out / "state").is_dir() and not (out / "report.json").exists()
    (out / "state" / "recover.pt").unlink(missing_ok=True)
    good = torchrun("sparsify", out / "recipe.yaml", "--resume", "--out", out, "--set", "recover.lr=0.001")
    assert good.returncode == 0, good.stderr[-3000:]
    assert json.loads((out / "report.json").read_text())["processes"] == 2


WHOLE = """
import sys
from types import SimpleNamespace
import torch
import svdcompress as svdc

x = torch.randn(120, 6, generator=torch.Generator().manual_seed(0))
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
settings = {"train.epochs": 2, "recover.epochs": 1, "report.latency": False, "uncertainty.samples": 0, "report.html": False}
settings |= {"train.batch_size": 20, "recover.batch_size": 20}
found = svdc.sparsify(model, (x, (x[:, 0] > 0).long()), settings=settings, quiet=True)
print(f"{found.results['processes']} {found.folder.name} {float(found.model(x).sum())}\\n", end="", flush=True)
"""


CAUGHT = """
import torch
import svdcompress as svdc

class Bessel(torch.nn.Module):
    def forward(self, x):
        return torch.special.bessel_j0(x.detach()) + x


x = torch.randn(120, 6, generator=torch.Generator().manual_seed(0))
model = torch.nn.Sequential(torch.nn.Linear(6, 8), Bessel(), torch.nn.Linear(8, 2))
settings = {"train.epochs": 1, "recover.epochs": 0, "report.latency": False, "uncertainty.samples": 0, "report.html": False}
settings |= {"train.batch_size": 20}
for out in ("taken", "late"):
    try:
        svdc.sparsify(model, (x, (x[:, 0] > 0).long()), out=out, settings=settings, quiet=True)
    except svdc.errors.SvdcError as error:
        print(f"{out} {type(error).__name__}\\n", end="", flush=True)  # in one piece, as both processes print
"""


APART = """
import os
import torch
import svdcompress as svdc
from svdcompress.pipeline import _stages

rank, convert, sums = int(os.environ["RANK"]), _stages.convert_stage, []

def spy(context, opened, dense):
    sums.append(sum(float(value.double().sum()) for value in dense.model.state_dict().values()))
    return convert(context, opened, dense)

_stages.convert_stage = spy
x = torch.randn(120, 6, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] > 0).long()
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
model[1].running_mean += rank
settings = {"train.epochs": 2, "recover.epochs": 1, "report.latency": False, "uncertainty.samples": 0, "report.html": False}
settings |= {"train.batch_size": 20, "recover.batch_size": 20, "train.distill.weight": 0.5}
for data in ((x[rank::2], y[rank::2]), (x[: 120 - 40 * rank], y[: 120 - 40 * rank]), (x, y)):
    try:
        found = svdc.sparsify(model, data, settings=settings)
        print(f"{found.results['notes'][0][:41]} {sums}\\n", end="", flush=True)
    except svdc.errors.SvdcError as error:
        print(f"{error}\\n".partition("process 1")[2], end="", flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="processes take a device each")
def test_processes_with_other_data_are_refused_and_those_with_other_models_get_the_first_ones(tmp_path):
    lines = sorted(run_twice(APART, tmp_path))
    assert lines[0] == lines[1] and lines[0].startswith(" has others than process 0 (train: 58 examples, not 86)")
    assert lines[2] == lines[3] and lines[2].startswith(" has others than process 0 (train: other values)")
    assert lines[4] == lines[5] and lines[4].startswith("the processes had models with other weigh")


ALONE = """
import datetime
import pathlib
import time
import torch
import svdcompress as svdc
from svdcompress.train import _together

_together.PATIENCE = 1
torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=8))
rank, ended = torch.distributed.get_rank(), pathlib.Path("ended")
x = torch.randn(120, 6, generator=torch.Generator().manual_seed(0))

def call():
    try:
        svdc.sparsify(torch.nn.Linear(6, 2), (x, (x[:, 0] > 0).long()), settings={"search.max_drop": 1.0})
    except svdc.errors.SvdcError as error:
        print(f"{rank} {type(error).__name__}: {error}\\n", end="", flush=True)

if rank == 0:
    call()
    ended.touch()
else:
    while not ended.exists():
        time.sleep(0.1)
call()
torch.distributed.destroy_process_group()  # the caller's own: its threads may abort a process that ends before them
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="processes take a device each")
def test_a_call_in_one_process_alone_is_told_and_ends(tmp_path):
    """Afterwards the other one joins the next call, which both refuse."""
    said = []
    lines = sorted(run_twice(ALONE, tmp_path, said))
    assert lines[0].startswith("0 RecipeError: search: works in one process only") and lines[2] == lines[0].replace("0", "1", 1)
    assert lines[1].startswith("0 UsageError: svdcompress.sparsify was called in process 0 of 2, but not in process 1: call it")
    assert any("process 0 of 2 waits for the others" in line for line in said)


def run_twice(script, folder, said=None):
    """The lines that two processes of a script print, as `torchrun` alone starts them. said: receives those on stderr."""
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "script.py"]
    env = {name: value for name, value in os.environ.items() if name != "ACCELERATE_USE_CPU"}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    if said is not None:
        said += done.stderr.splitlines()
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="processes take a device each")
def test_processes_join_without_being_told_that_there_are_only_cpus(tmp_path):
    """In Python, without a folder, each process has the whole result."""
    lines = run_twice(WHOLE, tmp_path)
    assert len(lines) == 2 and lines[0] == lines[1] and lines[0].startswith("2 run ")


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="processes take a device each")
def test_an_error_of_the_first_process_is_raised_in_all(tmp_path):
    """At the start (the folder is taken) and at the end (ONNX cannot hold the model). A script that catches it goes on, and so
    must all its processes."""
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    lines = run_twice(CAUGHT, tmp_path)
    assert sorted(lines) == ["late ExportError"] * 2 + ["taken OutputError"] * 2


def test_processes_that_did_not_join_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    alone = SimpleNamespace(num_processes=1, device="cpu")
    monkeypatch.setattr("accelerate.Accelerator", lambda **given: alone)
    with pytest.raises(UsageError, match=r"2 processes were launched, but did not join \(1 here, on cpu\)"):
        make_accelerator()


@pytest.mark.parametrize(("device", "asked"), [("auto", None), ("cuda", None), ("cpu", "cpu")])
def test_each_process_of_a_launch_takes_a_gpu_of_its_own(monkeypatch, device, asked):
    """accelerate gives each process the GPU of its rank, unless the variable names one for all."""
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda")  # left by an earlier fit
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    found = []

    def joined(**given):
        found.append(os.environ.get(DEVICE_VARIABLE))
        return SimpleNamespace(num_processes=2, device=device)

    monkeypatch.setattr("accelerate.Accelerator", joined)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    make_accelerator(device)
    assert found == [asked]


def test_one_gpu_for_several_processes_is_refused(monkeypatch):
    monkeypatch.setenv(DEVICE_VARIABLE, "")  # so that what is set below ends with the test
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(UsageError, match=r"cuda:1 cannot be shared by the 2 processes .* use auto or cuda"):
        make_accelerator("cuda:1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # two machines with a process each
    monkeypatch.setattr("accelerate.Accelerator", lambda **given: SimpleNamespace(num_processes=2, device="cuda:1"))
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    assert make_accelerator("cuda:1").device == "cuda:1"
