"""Inputs and targets that are lists, as `tolist()` makes them: a pair, unless they may be two splits."""

import numpy as np
import pytest
import torch

from svdcompress.errors import DataError
from svdcompress.recipe import DataSection
from svdcompress.sources import open_data
from svdcompress.sources.given import given

X = torch.arange(120.0).view(60, 2)
Y = torch.arange(60) % 3


def opened(data, task="classification"):
    with given(data=data) as names:
        return open_data(DataSection(name=names["data"], split="tail"), task)


@pytest.mark.parametrize(
    "pair",
    [
        (X.tolist(), Y.tolist()),
        (X, Y.tolist()),
        (X.numpy(), list(Y)),
        [X.tolist(), list(Y.numpy())],
        ((X, X), Y.tolist()),
    ],
)
def test_a_list_of_numbers_holds_targets(pair):
    data = opened(pair)
    assert [len(part) for part in (data.train, data.validation, data.test)] == [43, 5, 12]
    assert data.train.targets.tolist() == Y[:43].tolist()


@pytest.mark.parametrize("kind", [list, np.array, lambda names: np.array(names, dtype=object)])
@pytest.mark.parametrize("wrapped", [lambda pair: pair, lambda pair: {"train": pair}])
def test_names_as_targets_are_refused(kind, wrapped):
    with pytest.raises(DataError, match="the targets are texts: pass arrays or tensors of numbers"):
        opened(wrapped((X, kind(["cat"] * 60))))


W = torch.ones(60)


@pytest.mark.parametrize("made", [(X, Y, W), [X, Y, W.numpy()], ((X, Y, W), (X, Y, W)), {"train": (X, Y, W)}])
def test_three_arrays_are_no_pair(made):
    with pytest.raises(DataError) as told:
        opened(made)
    for part in ("of 3: Tensor (60, 2), Tensor (60,), ", " (60,), which is no (inputs, targets)", "no weights", "accepted are"):
        assert part in str(told.value)


@pytest.mark.parametrize(
    ("made", "got"), [((X, Y, W, 3), "a tuple of 4: Tensor (60, 2), "), ({"x": X}, "a dict with x"), (3, "returned a int; a D")]
)
def test_what_is_no_data_is_told_with_what_would_be(made, got):
    with pytest.raises(DataError) as told:
        opened(made)
    assert got in str(told.value) and "DataLoader" in str(told.value)


def test_a_single_number_is_no_target():
    with pytest.raises(DataError, match="are not arrays of numbers"):
        opened((X, np.array(1)))


def test_nested_lists_that_may_be_pair_or_splits_are_refused():
    with pytest.raises(DataError, match=r"may be \(inputs, targets\) or \(train, test\): pass arrays or tensors"):
        opened((X.tolist(), X.tolist()), "regression")


def test_lists_of_examples_are_splits():
    examples = list(zip(X, Y.tolist(), strict=True))
    assert len(opened((examples, examples[:20])).test) == 20
    assert len(opened(((X.tolist(), Y.tolist()), (X[:20].tolist(), Y[:20].tolist()))).test) == 20
