"""What a run's report says about single examples and layers, against the run's own data and totals."""

from __future__ import annotations

import base64
import math

import numpy as np
import pytest
import torch

from svdcompress.likelihoods import likelihood_for
from svdcompress.pipeline import open_run
from svdcompress.pipeline._doubts import SHOWN, doubts
from svdcompress.sources import Data, InMemory
from svdcompress.uncertainty import Gathered


def pixels(picture):
    values = np.frombuffer(base64.b64decode(picture["base64"]), dtype=np.uint8)
    return values.reshape(picture["shape"]).astype(int)


def test_the_least_sure_examples_of_a_run(tiny_run):
    folder, results = tiny_run
    rows, data = results["doubts"], open_run(folder).data
    assert len(rows) == SHOWN
    assert [row["entropy"] for row in rows] == sorted((row["entropy"] for row in rows), reverse=True)
    for row in rows:
        assert row["truth"] == str(int(data.test.targets[row["example"]]))
        x = data.test.inputs[row["example"]].reshape(8, 8).numpy()
        expected = np.rint((x - x.min()) / (x.max() - x.min()) * 255)
        assert np.abs(pixels(row["picture"]) - expected).max() <= 1
        assert 0 <= row["mutual_information"] <= row["entropy"] and 0.1 <= row["confidence"] <= 1


def test_layers_add_up_to_the_model(tiny_run):
    _, results = tiny_run
    rows = results["layers"]
    assert [row["type"] for row in rows] == ["Linear", "Linear"]
    for side, suffix in (("dense", "_before"), ("sparse", "")):
        for key in ("macs", "parameters"):
            assert sum(row[key + suffix] for row in rows) == results[side][key]


def gathered(mean, targets):
    entropy = -(mean.clamp_min(1e-9).log() * mean).sum(1)
    scores = {"entropy": entropy, "softmax": 1 - mean.amax(1)}
    return Gathered(mean, mean * 0, targets, scores, torch.arange(len(mean)))


@pytest.mark.parametrize(
    ("shape", "picture"),
    [
        ((5,), None),
        ((36,), (6, 6)),
        ((1, 9, 7), (9, 7)),
        ((3, 8, 8), (8, 8, 3)),
        ((2, 8, 8), None),
        ((3, 256, 128), (48, 24, 3)),
    ],
    ids=str,
)
def test_what_is_a_picture(shape, picture):
    x = torch.rand(4, *shape, generator=torch.Generator().manual_seed(0))
    mean = torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.2, 0.8], [0.6, 0.4]])
    examples = InMemory(x, torch.tensor([0, 1, 1, 0]))
    data = Data(examples, examples, examples, "classification", 2, classes=["cat", "dog"])
    rows = doubts(gathered(mean, examples.targets), examples, data, likelihood_for("classification"))
    assert [row["example"] for row in rows] == [1, 3, 2, 0]
    chosen = doubts(gathered(mean, examples.targets), examples, data, likelihood_for("classification"), torch.arange(4) * 10)
    assert [row["example"] for row in chosen] == [10, 30, 20, 0]  # indices in the whole test set
    assert [row["truth"] for row in rows] == ["dog", "cat", "dog", "cat"] and rows[2]["guess"] == "dog"
    assert rows[0]["confidence"] == 0.5 and math.isclose(rows[0]["entropy"], math.log(2), rel_tol=1e-5)
    assert [pixels(row["picture"]).shape if "picture" in row else None for row in rows] == [picture] * 4


def test_many_targets_an_example_and_regressions_have_none():
    mean, targets = torch.full((6, 2), 0.5), torch.zeros(6, dtype=torch.long)
    found = Gathered(mean, mean, targets, {"entropy": torch.zeros(3)}, torch.tensor([0, 0, 1, 1, 2, 2]))
    examples = InMemory(torch.rand(3, 4), torch.zeros(3, 2, dtype=torch.long))
    data = Data(examples, examples, examples, "classification", 2)
    assert doubts(found, examples, data, likelihood_for("classification")) == []
    values = Gathered(mean[:, :1], mean, torch.zeros(6), {"variance": torch.zeros(6)}, torch.arange(6))
    assert doubts(values, examples, data, likelihood_for("regression")) == []
