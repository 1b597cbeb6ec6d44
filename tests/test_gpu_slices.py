"""The order of what waits for a GPU, and what it says where a package is missing."""

import importlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    sys.modules.pop("gpu", None)
    yield importlib.import_module("gpu")
    sys.modules.pop("gpu", None)


def test_what_failed_waits_for_what_was_never_tried_or_was_stopped(gpu):
    all_steps = [gpu.Step(name, []) for name in ("tests", "a", "b", "c", "d")]
    known = {"tests": {"rc": 1}, "a": {"rc": 0}, "b": {"rc": None}, "c": {"rc": 2}}
    assert [step.name for step in gpu.in_turn(all_steps, known)] == ["b", "d", "tests", "c"]
    assert [step.name for step in gpu.in_turn(all_steps, {})] == ["tests", "a", "b", "c", "d"]


def test_a_missing_package_is_named_before_anything_is_done(tmp_path):
    """By a Python that sees none of ours."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(BENCHMARKS / "gpu.py")], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1 and "lacks torch, numpy, pydantic" in done.stderr and "Traceback" not in done.stderr


def test_results_are_brought_along_to_a_folder_elsewhere(gpu, tmp_path, monkeypatch):
    results = tmp_path / "benchmarks" / "results"
    (results / "gpu").mkdir(parents=True)
    for name in ("speed.json", "real_nets.md", "other.json"):
        (results / name).write_text(name)
    monkeypatch.setattr(gpu, "HERE", tmp_path / "benchmarks")
    gpu.bring_along(results / "gpu")
    assert not list((results / "gpu").iterdir())
    (away := tmp_path / "away").mkdir()
    gpu.bring_along(away)
    assert {file.name: file.read_text() for file in away.iterdir()} == {n: n for n in ("speed.json", "real_nets.md")}


def test_all_that_a_step_has_started_ends_with_it(gpu, tmp_path):
    """The step itself dies at once; its child takes its time, and is waited for."""
    child = "import signal, sys, time; signal.signal(15, lambda *_: (time.sleep(1), open('done', 'w').close(), sys.exit()))"
    child += "; open('ready', 'w').close(); time.sleep(60)"
    step = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", step], cwd=tmp_path, start_new_session=True)
    end = time.monotonic() + 30
    while not (tmp_path / "ready").exists() and time.monotonic() < end:
        time.sleep(0.05)
    gpu.end_group(process)
    assert (tmp_path / "done").exists() and process.poll() == -15
