"""Passes of a run after training take as many examples as fit, and a stage that runs out of memory says what helps there."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from svdcompress import batch
from svdcompress.errors import TrainingError
from svdcompress.pipeline import _adapted, _calibrate, _checks, _judged, _label, _run, _stages, run
from svdcompress.pipeline._adapted import adapted
from svdcompress.sources import Data, InMemory


class Wide(nn.Module):
    """Logits (B, 3, T) of positions; `sizes` are the batches it was called with."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.wide, self.norm, self.narrow = nn.Conv1d(2, width, 1), nn.BatchNorm1d(width), nn.Conv1d(width, 3, 1)
        self.sizes: list[int] = []

    def forward(self, x):
        self.sizes.append(len(x))
        return self.narrow(self.norm(self.wide(x)).relu())


def case(validation=30, train=90, positions=4):
    torch.manual_seed(0)

    def part(count):
        return InMemory(torch.randn(count, 2, positions), torch.randint(3, (count, positions)))

    return Wide().eval(), Data(part(train), part(validation), part(validation), "classification", 3)


@pytest.mark.parametrize("positions", [1, 4, 50])
def test_training_examples_that_are_judged_have_as_many_targets_as_allowed(monkeypatch, positions):
    monkeypatch.setattr(_judged, "TEMPERED", 1500)
    monkeypatch.setattr(_judged, "TRAINED", 60)
    model, data = case(positions=positions)
    found = _judged.judged(model, data.validation, data, "cpu")
    assert len(found.nll) == 30 + {1: 60, 4: 60, 50: 30}[positions]


def test_labels_and_new_statistics_take_small_batches(monkeypatch):
    model, data = case()
    whole = model(data.validation.inputs).argmax(1)
    with adapted(model, data.train, "cpu"):
        pass
    assert model.sizes[-1] == 90 <= _adapted.BATCH
    monkeypatch.setattr(batch, "WIDEST", 64 * 4 * 20)
    model.sizes.clear()
    with adapted(model, data.train, "cpu"):
        pass
    assert model.sizes == [1, 20, 20, 20, 20, 10]
    monkeypatch.setattr(batch, "WIDEST", 10)
    model.sizes.clear()
    with adapted(model, data.train, "cpu"):
        pass
    assert max(model.sizes) == 2  # the variance of one is none
    monkeypatch.setattr(batch, "WIDEST", 64 * 4 * 20)
    model.sizes.clear()
    _label.label(data, model, True, "cpu", dim=1)
    assert max(model.sizes) == 20 and torch.equal(data.validation.targets, whole)


def test_files_are_checked_in_batches_that_fit_the_model_or_else_the_inputs(monkeypatch, tmp_path):
    model, data = case()
    monkeypatch.setattr(batch, "WIDEST", 64 * 4 * 20)
    material = SimpleNamespace(units=None)
    assert _checks._fitting(lambda: model, tmp_path, material, data.test) == 20

    def broken():
        raise OSError("damaged")

    monkeypatch.setattr(_checks, "OnnxModel", lambda *given: nn.Identity())
    assert _checks._fitting(broken, tmp_path, material, data.test) == 64 * 4 * 20 // (batch.UNSEEN * 2 * 4)


def test_promises_are_from_as_many_examples_as_predictions_fit(monkeypatch):
    model, data = case()
    context = SimpleNamespace(place=SimpleNamespace(device=torch.device("cpu")))
    assert _calibrate._fits(model, data) == _calibrate.EXAMPLES
    monkeypatch.setattr(_calibrate, "MOST_NUMBERS", 100)
    assert _calibrate._fits(model, data) == 100 // (3 * 4)
    monkeypatch.setattr(batch, "WIDEST", 64 * 4 * 20)
    assert [len(x) for x, _ in _calibrate._batches(data.test, context, model)()] == [20, 10]


@pytest.mark.parametrize(
    ("stage", "where", "said"),
    [
        ("evaluate_stage", "evaluate", r"use smaller inputs \(data\.transform\), or fewer of them \(data\.limit\)"),
        (
            "calibrate_stage",
            "calibrate",
            r"calibrate\.posterior=variational.* calibrate\.temperature=false.*data\.validation",
        ),
        ("figures_stage", "figures", r"lower uncertainty\.samples"),
        ("train_stage", "train", r"lower train\.batch_size \(accumulate makes up for it\)"),
    ],
)
def test_what_helps_is_said_for_the_stage(tiny_recipe, tmp_path, monkeypatch, stage, where, said):
    def hungry(*given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(_stages, stage, hungry)
    with pytest.raises(TrainingError, match=rf"out of memory in the stage {where}: .*{said}.*, or use a machine"):
        run(tiny_recipe, tmp_path / "run")


def test_every_stage_with_advice_is_one():
    text = inspect.getsource(_stages)
    assert all(f'context.stage("{name}")' in text for name in _run.LESS)
