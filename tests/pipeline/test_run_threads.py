"""A run's number of threads: chosen once, stored before training, the same after a stop."""

import json

import pytest
import torch

from svdcompress.errors import Interrupted
from svdcompress.pipeline import run as run_recipe
from svdcompress.pipeline._context import Context
from svdcompress.recipe import load_recipe
from svdcompress.train import Trial, _threads

SETS = [
    *("dense.epochs=2", "train.epochs=2", "recover.epochs=1", "data.limit=300"),
    *("export.onnx=false", "report.html=false", "report.latency=false", "uncertainty.samples=0"),
]


@pytest.fixture
def counts(monkeypatch):
    """Timing chooses 2 of 3 threads; yields the threads used in each training step, and the largest number of each timing."""
    seen, trials = [], []

    def fastest(step, most):
        trials.append(most)
        return Trial(2, {1: 0.2, 2: 0.1, 3: 0.3})

    step = _threads.Steps.step
    monkeypatch.setattr(_threads, "fastest", fastest)
    monkeypatch.setattr(_threads.Steps, "step", lambda self, *args: (seen.append(torch.get_num_threads()), step(self, *args)))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield seen, trials
    torch.set_num_threads(before)


def recipe():
    return load_recipe("digits", SETS)


def facts(out):
    return json.loads((out / "state" / "run.json").read_text())


def stopping(monkeypatch, stage_to_stop):
    """Make runs stop at a stage, as by a signal."""

    def stage(self, name, work=Context.stage):
        if name == stage_to_stop:
            self.stop.signal = "SIGTERM"
        return work(self, name)

    monkeypatch.setattr(Context, "stage", stage)


def test_a_run_chooses_once_and_keeps_what_it_chose(tmp_path, counts, monkeypatch):
    seen, trials = counts
    with monkeypatch.context() as patch:
        stopping(patch, "convert")
        with pytest.raises(Interrupted):
            run_recipe(recipe(), tmp_path / "run", choose_threads=True)
    assert set(seen) == {2} and trials == [3]
    assert torch.get_num_threads() == 3
    assert facts(tmp_path / "run")["torch_threads"] == 2 and facts(tmp_path / "run")["torch_threads_first"] == 3
    torch.set_num_threads(1)  # a resumed run first uses 3, then 2
    results = run_recipe(recipe(), tmp_path / "run", resume=True, choose_threads=True)
    assert set(seen) == {2} and trials == [3]
    assert results["torch_threads"] == 2 and torch.get_num_threads() == 1
    assert json.loads((tmp_path / "run" / "report.json").read_text())["torch_threads"] == 2


def test_a_run_that_is_not_asked_to_choose_keeps_what_is_set(tmp_path, counts):
    seen, trials = counts
    results = run_recipe(recipe(), tmp_path / "run")
    assert set(seen) == {3} and not trials and results["torch_threads"] == 3


def test_a_run_stopped_before_it_chose_chooses_when_it_goes_on_or_takes_what_is_set_then(tmp_path, counts, monkeypatch):
    seen, trials = counts
    for name, choose, expected in (("chooses", True, 2), ("set", False, 4)):
        with monkeypatch.context() as patch:
            stopping(patch, "dense")
            with pytest.raises(Interrupted):
                run_recipe(recipe(), tmp_path / name, choose_threads=True)
        assert "torch_threads" not in facts(tmp_path / name)
        torch.set_num_threads(4)
        results = run_recipe(recipe(), tmp_path / name, resume=True, choose_threads=choose)
        assert results["torch_threads"] == expected and set(seen) == {expected}
        seen.clear()
        torch.set_num_threads(3)
    assert trials == [3]  # the number that the run started with
