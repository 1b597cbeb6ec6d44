"""The order of what waits for a GPU, and what it says where a package is missing."""

import importlib
import subprocess
import sys
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
