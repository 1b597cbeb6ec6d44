"""How much validation error fewer bits may cost: at least one answer; and the examples that layers are ranked by."""

from pathlib import Path

import pytest
import torch

from svdcompress.pipeline._allowed import Allowed
from svdcompress.pipeline._baked import Baked
from svdcompress.sources import Data, InMemory

MAP = torch.arange(20 * 8 * 8).view(20, 8, 8) % 3
"""Classes of the pixels of twenty images. EDGES are the pixels that do not count."""
EDGES = torch.ones(8, 8, dtype=torch.bool)
EDGES[1:7, 1:7] = False


def allowed(targets, task):
    examples = InMemory(torch.zeros(len(targets), 2), targets)
    found = Allowed(Path("model.onnx"), Data(examples, examples, examples, task, outputs=3), Baked())
    found.float_error = 2.0  # without a file
    return found


@pytest.mark.parametrize(
    ("targets", "task", "answers"),
    [
        (torch.arange(50) % 3, "classification", 50),
        (MAP[:2], "classification", 2 * 64),
        (MAP.masked_fill(EDGES, -100), "classification", 20 * 36),
        (torch.ones(30, 4), "binary", 120),
        (MAP, "classification", 1000),  # of 1280, a tenth of a percentage point is more than one
    ],
    ids=["examples", "pixels", "pixels that count", "questions", "many"],
)
def test_one_answer_is_one_target_that_counts(targets, task, answers):
    assert allowed(targets, task).limit == pytest.approx(2.0 + 100 / answers)


def test_layers_are_ranked_by_all_classes_of_data_that_are_sorted():
    found = allowed(torch.arange(10).repeat_interleave(200), "classification")
    assert len(found.few) == 500 and found.few.targets.unique().tolist() == list(range(10))
    assert len(allowed(torch.arange(300) % 3, "classification").few) == 300
