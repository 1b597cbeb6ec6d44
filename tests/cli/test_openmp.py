"""How OpenMP threads wait and who sets their number: decided before torch is loaded, and the user's settings win."""

import os
import subprocess
import sys

import pytest

from svdcompress.cli import _threads

ENTER = """
import sys
from svdcompress.cli import main
sys.argv = ["svdc", "--version"]
try:
    main()
except SystemExit:
    pass
assert "torch" not in sys.modules
import torch
"""


def shown(**environment):
    """OpenMP's display of its settings when torch is loaded in a process that started as `svdc`."""
    base = {name: value for name, value in os.environ.items() if name not in (*_threads.WAITING, *_threads.NUMBER)}
    env = {**base, "OMP_DISPLAY_ENV": "VERBOSE", "PYTHONPATH": os.getcwd(), **environment}
    found = subprocess.run([sys.executable, "-c", ENTER], env=env, capture_output=True, text=True, check=True).stderr
    if "GOMP_SPINCOUNT" not in found:
        pytest.skip("torch's OpenMP is not GNU's")
    return found


def test_threads_sleep_while_they_wait():
    found = shown()
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in found
    assert "GOMP_SPINCOUNT = '0'" in found


@pytest.mark.parametrize(("name", "value"), [("OMP_WAIT_POLICY", "active"), ("GOMP_SPINCOUNT", "1234")])
def test_what_the_user_set_stays(name, value):
    found = shown(**{name: value})
    assert f"{name} = '{value.upper()}'" in found
    assert "GOMP_SPINCOUNT = '0'" not in found


def test_a_process_that_has_torch_is_left_alone(monkeypatch):
    for name in _threads.WAITING:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "torch", object())
    _threads.wait_passively()
    assert "OMP_WAIT_POLICY" not in os.environ
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setenv("OMP_WAIT_POLICY", "before")  # so that monkeypatch restores it afterwards
    monkeypatch.delenv("OMP_WAIT_POLICY")
    _threads.wait_passively()
    assert os.environ["OMP_WAIT_POLICY"] == "passive"


def test_whether_the_user_set_a_number(monkeypatch):
    for name in _threads.NUMBER:
        monkeypatch.delenv(name, raising=False)
    assert not _threads.number_is_set()
    monkeypatch.setenv("MKL_NUM_THREADS", "2")
    assert _threads.number_is_set()
