"""Evaluation takes as many examples at once as fit, and its figures are those of one large batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from svdcompress import batch
from svdcompress.sources import InMemory
from svdcompress.train import evaluate, losses


class Wide(nn.Module):
    def __init__(self, width: int = 64, outputs: int = 3) -> None:
        super().__init__()
        self.wide, self.narrow, self.sizes = nn.Linear(4, width), nn.Linear(width, outputs), []

    def forward(self, x):
        self.sizes.append(len(x))
        return self.narrow(self.wide(x).relu())


def case(task, count):
    torch.manual_seed(0)
    y = torch.randint(3, (count,)) if task == "classification" else torch.randn(count, 3)
    return Wide().eval(), InMemory(torch.randn(count, 4), y)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_wide_ones_are_evaluated_in_small_batches_with_the_same_figures(monkeypatch, task):
    model, examples = case(task, 95)
    whole, parts = evaluate(model, examples, task, batch_size=95), losses(model, examples, task, batch_size=95)
    assert model.sizes == [95, 95]
    monkeypatch.setattr(batch, "WIDEST", 640)
    model.sizes.clear()
    assert evaluate(model, examples, task) == pytest.approx(whole, rel=1e-6)
    assert model.sizes == [1, *[10] * 9, 5]  # one example is tried first
    for ours, theirs in zip(losses(model, examples, task), parts, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_small_ones_keep_a_thousand_and_a_number_that_is_given_stays():
    model, examples = case("classification", 2100)
    evaluate(model, examples, "classification")
    assert model.sizes == [1, 1000, 1000, 100]
    model.sizes.clear()
    evaluate(model, examples, "classification", batch_size=1500)
    assert model.sizes == [1500, 600]
