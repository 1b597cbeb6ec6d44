"""Labels that count from 1, labels outside the classes of given weights, and images with channels last."""

import numpy as np
import pytest
import torch
from torch import nn

from svdcompress.errors import DataError, ModelError
from svdcompress.pipeline import check_model
from svdcompress.recipe import DataSection, load_recipe
from svdcompress.sources import FromDataset, InMemory, check_labels, open_data

SAID = "the labels seem to start at 1: subtract 1, because the first class is 0"


@pytest.fixture
def opened(tmp_path):
    def work(labels, x=None, task="classification"):
        x = np.zeros((len(labels), 4), np.float32) if x is None else x
        np.savez(tmp_path / "x.npz", x=x, y=np.asarray(labels))
        return open_data(DataSection(name=f"npz:{tmp_path / 'x.npz'}"), task)

    return work


@pytest.mark.parametrize(
    ("labels", "outputs", "from_one"),
    [(np.arange(60) % 4 + 1, 4, True), (np.arange(60) % 5, 4, False), (np.arange(60) % 4 + 2, 4, False)],
)
def test_labels_that_count_from_one(opened, labels, outputs, from_one):
    data = opened(labels)
    with pytest.raises(DataError, match=r"out of range 0 to 3: the model has 4 outputs") as error:
        check_labels(data, outputs, "; add --model-arg num_classes=5")
    assert (SAID in str(error.value)) == from_one != ("num_classes" in str(error.value))


def test_positions_that_do_not_count_are_passed_over():
    labels = torch.tensor([[1, 2, -100], [3, -100, 1]])
    part = InMemory(torch.zeros(2, 4), labels)
    data = type("Data", (), {"train": part, "validation": part, "test": part, "task": "classification"})()
    with pytest.raises(DataError, match=SAID):
        check_labels(data, 3)


def test_labels_that_count_from_one_are_seen_in_batches_too():
    from svdcompress.sources._check import Check

    rows = [(torch.zeros(4), i % 4 + 1) for i in range(16)]
    part = FromDataset(rows, check=Check("classification", "mine", "train"))  # type: ignore[arg-type]
    data = type("Data", (), {"train": part, "validation": part, "test": part, "task": "classification"})()
    check_labels(data, 4, "; add --model-arg num_classes=5")
    with pytest.raises(DataError, match=f"label 4 in row 3 .*0 to 3: {SAID}$"):
        list(part.batches(8))
    check_labels(data, 3, "; hint")
    with pytest.raises(DataError, match=r"0 to 2: the model has 3 outputs; hint$"):
        list(part.batches(8))


def tried(data, model, *settings):
    recipe = load_recipe(None, ["model=lenet-5", *settings])
    check_model(model, recipe, data, data.train.inputs[:2])


def test_given_weights_do_not_fit_another_number_of_outputs(opened):
    labels = np.arange(60) % 5
    with pytest.raises(DataError, match="4 outputs; add --model-arg outputs=5"):
        tried(opened(labels), nn.Linear(4, 4))
    with pytest.raises(DataError, match="add --model-arg outputs=5"):  # for a new head
        tried(opened(labels), nn.Linear(4, 4), "weights={file: w.pt, trained: false}")
    with pytest.raises(DataError, match=r"4 outputs; its weights \(w\.pt\) are for that many\. Do they belong") as error:
        tried(opened(labels), nn.Linear(4, 4), "weights=w.pt")
    assert "model-arg" not in str(error.value)
    with pytest.raises(DataError, match=r"1 output; for a regression use --loss mse, .* question --loss binary$"):
        tried(opened(labels), nn.Linear(4, 1), "weights=w.pt")


@pytest.mark.parametrize(
    ("shape", "hint"), [((8, 8, 3), True), ((9, 8, 1), True), ((4, 8, 3), False), ((8, 8, 8), False), ((8, 3), False)]
)
def test_images_with_their_channels_last_are_guessed(opened, shape, hint):
    data = opened(np.arange(60) % 3, np.zeros((60, *shape), np.float32))
    with pytest.raises(ModelError, match="fails on inputs of shape") as error:
        tried(data, nn.Sequential(nn.Conv2d(5, 2, 3), nn.Flatten(), nn.LazyLinear(3)))
    told = str(error.value).endswith(". (N, H, W, C)? PyTorch takes (N, C, H, W): x.transpose(0, 3, 1, 2)")
    assert told == hint
