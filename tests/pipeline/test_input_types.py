"""Inputs of a type that the model does not take: the error names their place and the type to store them as."""

import numpy as np
import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.errors import ModelError
from svdcompress.pipeline._dense import check_model
from svdcompress.recipe import load_recipe
from svdcompress.sources import example_inputs, open_data
from svdcompress.sources.given import given


class Both(nn.Module):
    """Takes token ids and numbers."""

    def __init__(self):
        super().__init__()
        self.embedding, self.linear, self.head = nn.Embedding(9, 4), nn.Linear(6, 24), nn.Linear(24, 3)

    def forward(self, ids, numbers):
        return self.head(self.embedding(ids).flatten(1) + self.linear(numbers))


def dense():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def tokens():
    return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(24, 3))


def whole(kind="int64"):
    return np.random.default_rng(0).integers(0, 2, (60, 6)).astype(kind)


def checked(model, name=None, **objects):
    with given(model=model, **objects) as names:
        recipe = load_recipe(None, fields={"model.name": names["model"], "data.name": name or names["data"]})
        data = open_data(recipe.data, recipe.task)
        check_model(model, recipe, data, example_inputs(data.train, 2))


@pytest.mark.parametrize(
    ("make", "kind", "read", "wanted"),
    [
        (dense, "int16", "int16", "float32"),
        (dense, "uint16", "int64", "float32"),
        (dense, "bool", "bool", "float32"),
        (tokens, "int16", "int16", "int64"),
        (tokens, "uint8", r"float32 \(as are bytes, uint8, divided by 255\)", "int64"),
    ],
)
def test_a_file_and_its_array_are_named_with_the_type_to_store(tmp_path, make, kind, read, wanted):
    np.savez(tmp_path / "a.npz", inputs=whole(kind), y=np.arange(60) % 3)
    said = rf"The inputs \(inputs in .*a\.npz\) are read as {read}, but the model takes {wanted}: store them as {wanted}"
    with pytest.raises(ModelError, match=said):
        checked(make(), f"npz:{tmp_path / 'a.npz'}")


def test_ids_stay_ids(tmp_path):
    np.savez(tmp_path / "a.npz", x=whole(), y=np.arange(60) % 3)
    checked(tokens(), f"npz:{tmp_path / 'a.npz'}")


@pytest.mark.parametrize(
    ("ids", "numbers", "said"),
    [
        (torch.int64, torch.int32, r"The input 'numbers' \(the data object\) is read as int32, .*: store it as float32"),
        (torch.int16, torch.float32, r"The input 'ids' .* is read as int16, .*: store it as int64"),
        (torch.float32, torch.int64, r"scalar type.*FloatTensor instead.*embedding\)$"),  # both are wrong
    ],
)
def test_of_several_inputs_the_one_is_named(ids, numbers, said):
    x = torch.as_tensor(whole())
    with pytest.raises(ModelError, match=said):
        checked(Both(), data=({"ids": x.to(ids), "numbers": x.to(numbers)}, torch.arange(60) % 3))


def test_several_inputs_of_one_wrong_type_are_told_together():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, a, b):
            return self.a(a) + self.b(b)

    x = torch.as_tensor(whole())
    with pytest.raises(ModelError, match=r"The inputs \(the data object\) are read as int64, .*: store them as float32"):
        checked(Sum(), data=((x, x), torch.arange(60) % 3))


def test_another_fault_is_not_blamed_on_the_type():
    with pytest.raises(ModelError, match=r"fails on inputs of shape \(2, 5\): RuntimeError: [^()]*$"):
        checked(dense(), data=(torch.zeros(60, 5).long(), torch.arange(60) % 3))


def test_unlabelled_inputs_are_told_before_the_model_is_asked():
    with pytest.raises(ModelError, match="are read as int64, but the model takes float32"):
        svdc.sparsify(dense(), torch.as_tensor(whole()), settings={"data.unlabelled": True})
