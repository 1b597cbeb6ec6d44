"""Metrics on the test data from one pass of each model, and a pass that notices that the run is to stop."""

import os
import signal
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from svdcompress.errors import Interrupted
from svdcompress.likelihoods import likelihood_for, set_likelihood
from svdcompress.pipeline import _figures, _stages, run
from svdcompress.pipeline._changes import changes
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._listening import Listening, listening
from svdcompress.pipeline._passes import Passes
from svdcompress.pipeline._verify import FAILED
from svdcompress.sources import Data, InMemory
from svdcompress.train import evaluate


def data(task, seed=0):
    """Three different splits; the targets are two classes or two numbers."""
    g = torch.Generator().manual_seed(seed)

    def part(n):
        x = torch.randn(n, 3, generator=g)
        numbers = x[:, :2] + torch.randn(n, 2, generator=g)
        return InMemory(x, numbers if task == "regression" else (numbers[:, 0] > 0).long())

    scale = (1.0, 3.0) if task == "regression" else None
    return Data(part(40), part(50), part(60), task, 2, target_scale=scale)


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("carries", [False, True])
def test_figures_are_those_of_a_pass_for_each(task, carries):
    """They equal those of `evaluate`, called for each metric; a model may carry a temperature or noise of its own."""
    torch.manual_seed(1)
    source, model = data(task), nn.Linear(3, 2).eval()
    own = likelihood_for(task)
    if carries:
        own = likelihood_for(task, tau=7.0) if task == "regression" else type(own)(1, 2.5)
        set_likelihood(model, own)
    found = Passes(model, source)
    tau = None
    if task == "regression":
        with torch.no_grad():
            tau = 1 / float((model(source.validation.inputs) - source.validation.targets).square().mean())
        assert found.noise_precision == pytest.approx(tau, rel=1e-6)
    scale = source.target_scale
    assert found.validation_metrics() == evaluate(model, source.validation, own, scale=scale)
    wanted = evaluate(model, source.test, own, scale=scale, tau=tau)
    assert found.test_metrics() == pytest.approx(wanted, rel=1e-6) and found.test_metrics() != found.validation_metrics()


def test_each_model_sees_each_split_once_for_all_figures():
    seen = []

    class Counting(nn.Linear):
        def forward(self, x):
            seen.append((id(self), len(x)))
            return super().forward(x)

    source, models = data("regression"), [Counting(3, 2).eval() for _ in range(2)]
    passes = [Passes(model, source) for model in models]
    for each in passes:
        each.validation_metrics(), each.test_metrics(), each.noise_precision
    changes(*passes, source)
    assert sorted(seen) == sorted((id(model), n) for model in models for n in (1, 50, 1, 60))  # one example is tried first


def test_a_pass_stops_after_the_batch_under_way():
    asked, done = [], []

    def check():
        if asked:
            raise Interrupted("stopped.")

    source = listening(data("classification"), check)
    assert len(source.test) == 60 and len(source.test.subset(torch.arange(5))) == 5
    whole = [x for x, _ in source.validation.batches(20)]
    assert torch.equal(torch.cat(whole), data("classification").validation.inputs)
    with pytest.raises(Interrupted):
        for x, _ in source.test.subset(torch.arange(40)).batches(10, device="cpu"):
            done.append(len(x))
            if len(done) == 2:
                asked.append(True)
    assert done == [10, 10]


@pytest.mark.parametrize("stage", ["calibrate", "evaluate", "figures"])
def test_a_signal_ends_the_stages_after_training(tiny_recipe, tiny_run, tmp_path, monkeypatch, stage):
    """It arrives during a pass; the resumed run ends like one that never stopped."""
    (whole, plain), stopped = tiny_run, tmp_path / "stopped"
    batches, under_way = Listening.batches, []
    real = Context.stage

    def staged(self, name):
        under_way[:] = [name]
        return real(self, name)

    def signalled(self, *args, **kwargs):
        for batch in batches(self, *args, **kwargs):
            if under_way == [stage]:
                under_way.clear()
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(Context, "stage", staged)
        patch.setattr(Listening, "batches", signalled)
        with pytest.raises(Interrupted, match=r"stopped by SIGTERM before the run's figures were done.*Continue with"):
            run(tiny_recipe, stopped)
    assert not (stopped / "report.json").exists()
    found = run(tiny_recipe, stopped, resume=True)
    assert found["sparse"]["metrics"] == plain["sparse"]["metrics"] and found["changes"] == plain["changes"]
    assert found["recall"] == plain["recall"]
    for name in ("model.safetensors", "model.onnx", "model_mc.onnx"):
        assert (stopped / name).read_bytes() == (whole / name).read_bytes()
    assert not found.get("failed")


def test_a_signal_while_files_are_checked_makes_none_of_them_wrong(tiny_recipe, tmp_path, monkeypatch):
    """An interrupted check does not count as failed or as impossible."""
    real, recipe = _stages.verify_stage, tiny_recipe.model_copy(deep=True)
    recipe.export.precision, recipe.uncertainty.samples = "int8", 0  # a file with fewer bits is tried on the test data

    def signalled(*given):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*given)

    monkeypatch.setattr(_stages, "verify_stage", signalled)
    with pytest.raises(Interrupted, match="before the run's figures were done"):
        run(recipe, tmp_path / "run")
    monkeypatch.setattr(_stages, "verify_stage", real)
    found = run(recipe, tmp_path / "run", resume=True)
    assert found["verified"]["passed"] and not list((tmp_path / "run").glob(f"{FAILED}*"))


def test_the_work_of_calibration_is_bounded_wherever_the_model_is(tiny_recipe, tmp_path, monkeypatch):
    """The cost is counted on the CPU, where the inputs are; elsewhere the model would not run on them, and count as free."""
    away, counted = [], []
    there, macs_of = _figures.there, _figures.macs_of

    @contextmanager
    def going(device, *models):
        away.append(device)
        with there(device, *models):
            yield
        away.pop()

    monkeypatch.setattr(_figures, "there", going)
    monkeypatch.setattr(_figures, "macs_of", lambda *given: counted.append((bool(away), macs_of(*given))) or counted[-1][1])
    fitted = []
    monkeypatch.setattr(Passes, "noise_precision", property(lambda self: fitted.append(bool(away))))
    recipe = tiny_recipe.model_copy(deep=True)
    recipe.calibrate.coverage, recipe.uncertainty.samples, recipe.export.onnx = 0.8, 0, False
    run(recipe, tmp_path / "run")
    assert len(counted) == 3 and all(not gone and macs > 0 for gone, macs in counted)
    assert len(fitted) > 2 and all(fitted)  # needs a pass over the data, so it runs on the device
