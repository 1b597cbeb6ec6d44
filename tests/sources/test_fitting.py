"""The first example of a data set tells how many fit into a pass; reading it starts no processes and draws no numbers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from svdcompress import batch
from svdcompress.errors import DataError, Interrupted
from svdcompress.sources import FromDataset, InMemory, _examples, fitting


class Crops(Dataset):
    """Examples with noise of three generators; those of `broken` cannot be read."""

    def __init__(self, broken: bool = False) -> None:
        self.broken, self.read = broken, []

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.read.append(index)
        if self.broken:
            raise OSError("no such file")
        return torch.rand(4) + random.random() + np.random.rand(), 0


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setattr(batch, "WIDEST", 640)
    return nn.Linear(4, 64)


def test_one_example_is_read_in_this_process(narrow, monkeypatch):
    asked, loader = [], _examples.DataLoader
    monkeypatch.setattr(_examples, "DataLoader", lambda *args, **how: asked.append(how["num_workers"]) or loader(*args, **how))
    data = Crops()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    assert fitting(narrow, FromDataset(data, workers=3), 1000) == 10
    assert data.read == [0] and asked == [0]
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])


def test_examples_in_memory_and_those_that_are_only_read(narrow):
    held = InMemory(torch.randn(30, 4), torch.zeros(30))
    assert fitting(narrow, held, 1000) == 10 and fitting(narrow, held, 7) == 7
    assert fitting(narrow, held, 1000, draws=2) == 5
    assert fitting(None, held, 1000) == 160
    assert fitting(narrow, held.subset(torch.arange(1)), 1000) == 1000  # there is nothing to split


def test_what_cannot_be_read_is_left_to_the_pass(narrow):
    broken = FromDataset(Crops(broken=True))
    assert fitting(narrow, broken, 1000) == 1000
    with pytest.raises(DataError, match="no such file"):
        next(iter(broken.batches(fitting(narrow, broken, 1000))))


def test_a_stop_is_not_swallowed(narrow):
    class Stopping(InMemory):
        def subset(self, indices):
            raise Interrupted("stopped")

    with pytest.raises(Interrupted):
        fitting(narrow, Stopping(torch.randn(30, 4), torch.zeros(30)), 1000)
