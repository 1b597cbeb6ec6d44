"""A coverage that the validation data cannot promise is reported before training."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from svdcompress.pipeline import estimate
from svdcompress.pipeline._advice import unpromised
from svdcompress.recipe import load_recipe
from svdcompress.sources import InMemory


def told(task, targets, *settings):
    examples = InMemory(torch.zeros(len(targets), 2), targets)
    return unpromised(load_recipe(None, list(settings)), SimpleNamespace(task=task, dim=1, validation=examples))  # type: ignore[arg-type]


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_too_few_validation_examples_are_told(task):
    targets = torch.zeros(80, dtype=torch.long) if task == "classification" else torch.zeros(80, 1)
    (line,) = told(task, targets, "calibrate.coverage=0.99")
    assert "0.99 cannot be promised from 80 validation examples; it takes 99" in line
    assert told(task, targets, "calibrate.coverage=0.9") == [] == told(task, targets)
    assert told(task, torch.zeros(80, 4, 4, dtype=targets.dtype), "calibrate.coverage=0.99") == []  # each position counts


def test_of_several_targets_each_takes_its_examples():
    (line,) = told("regression", torch.zeros(80, 4), "calibrate.coverage=0.99")
    assert "cannot be promised for each of 4 targets from 80" in line
    assert told("classification", torch.zeros(80, 4, dtype=torch.long), "calibrate.coverage=0.99") == []  # positions count


def test_a_single_example_is_told_as_one():
    (line,) = told("classification", torch.zeros(1, dtype=torch.long), "calibrate.coverage=0.9")
    assert "cannot be promised from 1 validation example; it takes 9" in line


def test_what_no_validation_data_can_promise_is_told_as_such():
    (line,) = told("classification", torch.zeros(80, dtype=torch.long), "calibrate.coverage=0.99999")
    assert "at most 20,000 are kept; ask for a coverage of 0.99995 or less" in line and "larger" not in line
    assert "it takes 19,999: set a larger" in told("regression", torch.zeros(80, 1), "calibrate.coverage=0.99995")[0]


def test_a_task_without_sets_is_told():
    (line,) = told("binary", torch.zeros(80, 1), "calibrate.coverage=0.9")
    assert "neither prediction sets nor intervals" in line


def test_a_dry_run_tells_it():
    asked = ["dense.epochs=1", "train.epochs=1", "recover.epochs=1", "device=cpu", "calibrate.coverage=0.999"]
    assert any(
        "calibrate.coverage: 0.999 cannot be promised" in line for line in estimate(load_recipe("digits", asked)).warnings
    )
