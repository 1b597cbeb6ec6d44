"""Promises from validation data, and predictions with another number of draws than the promises were made with."""

import dataclasses
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.calibrate import Promises, load_promises, save_promises
from svdcompress.errors import DataError, UsageError
from svdcompress.export import export_onnx
from svdcompress.likelihoods import likelihood_for
from svdcompress.pipeline import sets_of
from svdcompress.predict import predict_run
from svdcompress.recipe import CalibrateSection

_run = sys.modules["svdcompress.predict._run"]


def opened(folder, monkeypatch, task, outputs, **calibrate):
    """A stand-in for a run, which every call opens: a layer with five inputs, and the promises that its recipe asks for."""
    run = SimpleNamespace(
        folder=folder,
        file=lambda name, **_: folder / name,
        model=svdc.convert(nn.Linear(5, outputs), log_sigma2=-3.0).eval(),
        recipe=SimpleNamespace(task=task, calibrate=CalibrateSection(**calibrate)),
        preprocessing={},
        classes=None,
        tau=None,
        dim=1,
        results={},
    )
    monkeypatch.setattr(_run, "open_run", lambda folder: run)
    return run


def test_fewer_draws_than_of_the_validation_data_promise_nothing(tmp_path, monkeypatch):
    torch.manual_seed(0)
    np.save(tmp_path / "x.npy", np.ones((3, 5), np.float32))
    scores = torch.linspace(0, 1, 300, dtype=torch.float64)
    kept = Promises("classification", 4, scores=scores, labels=torch.arange(300) % 4, samples=20)
    mean = dataclasses.replace(kept, scores=scores.clone(), labels=kept.labels.clone(), samples=0)
    save_promises(tmp_path / "validation.safetensors", {"mean": mean, "samples": kept})
    run = opened(tmp_path, monkeypatch, "classification", 4)
    ask = partial(predict_run, "run", tmp_path / "x.npy", tmp_path / "p.npz")
    with pytest.raises(UsageError, match=r"samples: 19; .* with 20 draws.* --samples 20 or more"):
        ask(samples=19, coverage=0.9)
    assert not (tmp_path / "p.npz").exists()
    with monkeypatch.context() as patch:  # refused before the work
        patch.setattr(_run, "_by_torch", lambda *given: pytest.fail("predicted"))
        for asked in ({"samples": 19, "coverage": 0.9}, {"coverage": 0.999}, {"answer_above": 1.5}):
            with pytest.raises((UsageError, DataError)):
                ask(**asked)
    told = {}
    ask(samples=20, coverage=0.9, told=told)
    assert told["coverage"]["samples"] == 20 and "set" in np.load(tmp_path / "p.npz")
    run.recipe.calibrate = CalibrateSection(coverage=0.9)  # requested by the recipe, not by the call
    told = {}
    ask(samples=19, told=told)
    assert "made with 20 draws" in told["not_promised"] and "coverage" not in told and "set" not in np.load(tmp_path / "p.npz")
    ask(samples=None, told=told)
    assert told["coverage"]["samples"] == 20
    assert load_promises(tmp_path / "validation.safetensors", "mean").samples == 0


@pytest.mark.parametrize("task", ["classification", "binary"])
def test_what_a_recipe_asks_for_and_cannot_be_promised_is_told(tmp_path, monkeypatch, task):
    np.save(tmp_path / "x.npy", np.ones((3, 5), np.float32))
    confidence = torch.linspace(0.6, 1, 144, dtype=torch.float64)
    classes, likely = (4, {"scores": 1 - confidence, "labels": torch.arange(144) % 4}) if task != "binary" else (2, {})
    kept = Promises(task, classes, confidence, torch.ones(144, dtype=torch.bool), **likely)
    save_promises(tmp_path / "validation.safetensors", {"samples": kept})
    run = opened(tmp_path, monkeypatch, task, 1 if task == "binary" else 4, coverage=0.999, answer_above=0.9)
    ask = partial(predict_run, "run", tmp_path / "x.npy", tmp_path / "p.npz", samples=3)
    told = {}
    ask(told=told)
    assert told["not_promised"].startswith("coverage: ") and "coverage" not in told
    assert told["answer_above"]["accuracy"] == 0.9 and "answered" in np.load(tmp_path / "p.npz")
    ask(answer_above=0.8)  # the other promise is still the recipe's
    with pytest.raises((UsageError, DataError), match="coverage: "):
        ask(coverage=0.999)
    run.recipe.calibrate = CalibrateSection(coverage=0.999, answer_above=0.999)
    told = {}
    ask(told=told)
    assert "coverage: " in told["not_promised"] and "answer_above: 0.999 cannot be promised" in told["not_promised"]


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_files_sets_are_left_out_where_they_do_not_hold(tmp_path, monkeypatch, task):
    """`model_mc.onnx` gives them for any number of draws; with fewer than of the validation data, svdc leaves them out."""
    np.save(tmp_path / "x.npy", np.ones((3, 5), np.float32))
    names = {"set"} if task == "classification" else {"lower", "upper"}
    labels = torch.arange(300) % 4 if task == "classification" else None
    kept = Promises(task, 4, scores=torch.linspace(0, 1, 300, dtype=torch.float64), labels=labels, samples=20)
    save_promises(tmp_path / "validation.safetensors", {"samples": kept})
    run = opened(tmp_path, monkeypatch, task, 4 if labels is not None else 1, coverage=0.9)
    promises = {"promises": {"coverage": {"samples": kept.coverage(0.9).to_dict()}}}
    more = sets_of(promises, "samples", likelihood_for(task))
    export_onnx(run.model, tmp_path / "model_mc.onnx", torch.ones(2, 5), monte_carlo=True, task=task, further=more)
    assert names <= {one.name for one in onnx.load(tmp_path / "model_mc.onnx").graph.output}
    for samples, there in ((19, set()), (20, names)):
        told = {}
        predict_run("run", tmp_path / "x.npy", tmp_path / "p.npz", samples=samples, onnx=True, told=told)
        with np.load(tmp_path / "p.npz") as found:
            assert {"set", "lower", "upper"} & set(found) == there and ("coverage" in told) == bool(there)
