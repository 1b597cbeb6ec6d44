"""Bytes of a dataset that don't have the shape of images are divided by 255 with a warning, like those of an array."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from svdcompress.recipe import DataSection
from svdcompress.sources import open_data
from svdcompress.sources.given import given


class Rows(Dataset):
    def __init__(self, inputs):
        self.inputs = inputs

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], index % 2


def warned(data):
    with given(data=data) as names:
        return [line for line in open_data(DataSection(name=names["data"]), "classification").warnings if "uint8" in line]


@pytest.mark.parametrize("loaded", [False, True])
def test_vectors_of_bytes_are_told(loaded):
    vectors = Rows(torch.randint(256, (40, 6), dtype=torch.uint8))
    (line,) = warned(DataLoader(vectors, batch_size=8) if loaded else vectors)
    assert "are divided by 255 like images; pass token ids as int64, and other data (counts, codes) as float32" in line


def test_images_and_floats_are_not_told():
    assert not warned(Rows(torch.randint(256, (40, 1, 6, 6), dtype=torch.uint8))) and not warned(Rows(torch.rand(40, 6)))
