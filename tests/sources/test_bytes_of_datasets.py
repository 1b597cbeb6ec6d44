"""Bytes are divided by 255: in images of the user's own with a note, in what does not have their shape with a warning."""

import numpy as np
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


IMAGES = torch.randint(256, (40, 1, 6, 6), dtype=torch.uint8)
LABELS = torch.arange(40) % 2


@pytest.mark.parametrize("kind", ["dataset", "loader", "arrays", "several"])
def test_bytes_of_images_of_the_users_own_are_noted(kind):
    made = {
        "dataset": Rows(IMAGES),
        "loader": DataLoader(Rows(IMAGES), batch_size=8),
        "arrays": (IMAGES, LABELS),
        "several": ((torch.rand(40, 3), IMAGES), LABELS),
    }[kind]
    with given(data=made) as names:
        data = open_data(DataSection(name=names["data"]), "classification")
    (line,) = data.notes
    assert "byte inputs (uint8) are divided by 255 like images" in line and "pass them as float32" in line
    assert data.preprocessing["bytes"] == "divided by 255"
    inputs = next(iter(data.train.batches(4)))[0]
    assert float((inputs[1] if kind == "several" else inputs).max()) <= 1  # which is what the note says


def test_vectors_of_bytes_are_warned_of_alone():
    with given(data=(IMAGES.flatten(1), LABELS)) as names:
        data = open_data(DataSection(name=names["data"]), "classification")
    assert data.preprocessing["bytes"] == "divided by 255" and not data.notes and "uint8" in data.warnings[0]


def test_other_numbers_are_not_divided():
    for inputs in (IMAGES.float(), Rows(torch.rand(40, 1, 6, 6))):
        with given(data=inputs if isinstance(inputs, Rows) else (inputs, LABELS)) as names:
            data = open_data(DataSection(name=names["data"]), "classification")
        assert data.preprocessing["bytes"] is None and not data.notes


def test_images_in_files_are_bytes_as_expected(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for index in range(20):
        (tmp_path / "photos" / "ab"[index % 2]).mkdir(parents=True, exist_ok=True)
        image.fromarray(np.full((6, 6, 3), index, np.uint8)).save(tmp_path / "photos" / "ab"[index % 2] / f"{index}.png")
    data = open_data(DataSection(name=f"imagefolder:{tmp_path / 'photos'}"), "classification")
    assert data.preprocessing["bytes"] == "divided by 255" and not any("uint8" in line for line in data.notes)
    np.savez(tmp_path / "x.npz", x=IMAGES.numpy(), y=LABELS.numpy())
    data = open_data(DataSection(name=f"npz:{tmp_path / 'x.npz'}"), "classification")
    assert data.preprocessing["bytes"] == "divided by 255" and any("uint8" in line for line in data.notes)
