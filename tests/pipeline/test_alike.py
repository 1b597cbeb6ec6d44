"""What would make a run's files wrong or useless is found before training: examples of different shapes, and probabilities in
place of logits. Also, which columns of a table a pruned model no longer reads."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from svdcompress.errors import DataError, ModelError
from svdcompress.pipeline import check_model
from svdcompress.pipeline._alike import check_shapes
from svdcompress.pipeline._columns import dropped
from svdcompress.recipe import load_recipe
from svdcompress.sources import Data, FromDataset, InMemory, example_inputs


class Bag(nn.Module):
    """Counts tokens; knows no length."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 4), nn.Linear(4, 2)

    def forward(self, ids):
        return self.head(self.embed(ids).mean(1))


def padded(batch):
    return pad_sequence([ids for ids, _ in batch], batch_first=True), torch.tensor([label for _, label in batch])


def tokens(lengths):
    return FromDataset(
        [(torch.ones(length, dtype=torch.long), n % 2) for n, length in enumerate(lengths)], collate=padded, workers=2
    )


def check(model, train, *others, loss="cross-entropy", task="classification"):
    data = Data(train, *(others or (train, train)), task, 2 if task == "classification" else 1)
    check_model(model, load_recipe(None, ["model=mlp", "data=mine.py:make", f"loss={loss}"]), data, example_inputs(train, 2))
    return data.warnings


def test_batches_of_several_lengths_are_refused_before_training():
    same = tokens([7] * 40)
    assert check(Bag(), same) == []
    with pytest.raises(
        DataError, match=r"data: mine.py:make: .*: \(7,\) at first, \(9,\) in other training examples.*pad all of"
    ):
        check(Bag(), tokens([7] * 300 + [9] * 100))
    with pytest.raises(DataError, match=r"\(7,\) at first, \(5,\) in other test examples"):
        check(Bag(), same, same, tokens([5] * 40))


def test_reading_them_starts_no_processes(monkeypatch):
    seen = []
    real = DataLoader.__init__
    monkeypatch.setattr(DataLoader, "__init__", lambda self, *a, **k: (seen.append(k["num_workers"]), real(self, *a, **k))[1])
    check(Bag(), tokens([7] * 40))
    assert seen and set(seen) == {0}


def rows(count=40, classes=2):
    return InMemory(torch.randn(count, 5), torch.arange(count) % classes)


def test_probabilities_in_place_of_logits_are_refused():
    logits = nn.Linear(5, 2)
    assert check(logits, rows()) == [] and check(nn.Sequential(logits, nn.LogSoftmax(1)), rows()) == []
    assert check(nn.Sequential(logits, nn.Sigmoid()), rows()) == []  # they do not add up to 1
    with pytest.raises(ModelError, match=r"mlp returns probabilities .* cross-entropy and the files take logits.*last softmax"):
        check(nn.Sequential(logits, nn.Softmax(1)), rows())


def test_a_sigmoid_at_the_end_of_a_binary_model_is_refused():
    """By its operation, as the logits of an untrained model may all lie between 0 and 1."""
    one = nn.Linear(5, 1)
    one.weight.data.zero_()
    one.bias.data.fill_(0.5)
    given = InMemory(torch.randn(40, 5), (torch.arange(40) % 2).float())
    assert check(nn.Sequential(one, nn.Flatten(0)), given, loss="binary", task="binary") == []
    assert (
        check(nn.Sequential(one, nn.Sigmoid(), one.__class__(1, 1), nn.Flatten(0)), given, loss="binary", task="binary") == []
    )
    with pytest.raises(ModelError, match=r"mlp returns probabilities \(they come from a sigmoid\).*leave out the last sigmoid"):
        check(nn.Sequential(one, nn.Sigmoid(), nn.Flatten(0)), given, loss="binary", task="binary")


def test_batches_with_other_inputs_and_splits_without_any():
    def with_more(batch):
        ids, labels = padded(batch)
        return (ids, ids, labels) if len(batch) == 4 and batch[0][0][0] == 2 else (ids, labels)

    rows = [(torch.full((7,), 1 + (n > 20)), n % 2) for n in range(40)]
    with pytest.raises(DataError, match=r"not all batches have the same inputs: 1 tensors at first, 2 in other training"):
        check(Bag(), FromDataset(rows, collate=with_more))
    same = tokens([7] * 40)
    assert check(Bag(), same, same.subset(torch.arange(0)), same) == []


def test_the_check_draws_no_random_numbers():
    class Cropped(list):
        def __getitem__(self, at):
            torch.rand(1)
            return super().__getitem__(at)

    bag = Bag()
    torch.manual_seed(0)
    want = torch.rand(1)
    torch.manual_seed(0)
    check_shapes(
        *[Data(*[FromDataset(Cropped(tokens([7] * 40).dataset), collate=padded)] * 3, "classification", 2)],
        None,
        torch.ones(2, 7),
        bag,
        [],
    )
    assert torch.equal(torch.rand(1), want)


def test_columns_that_are_not_read():
    table = {"columns": ["size", "kind", "age"], "categories": {"kind": ["a", "b", "c"]}}
    rows = torch.ones(2, 5)
    assert dropped(table, [0, 3, 4], rows) == [] and dropped(table, [2], rows) == ["size", "age"]
    assert (
        dropped(table, [], rows) == table["columns"] and dropped(table, None, rows) is None and dropped({}, [0], rows) is None
    )
    assert dropped({**table, "tokenizer": "x"}, [0], rows) is None
    assert dropped(table, [0], torch.ones(2, 6)) is None  # a transform has added a column


def test_batches_of_several_lengths_are_fine_where_the_length_is_open():
    def check(model, axes, train):
        data = Data(train, train, train, "classification", 2)
        given = ["model=mlp", "data=mine.py:make", "loss=cross-entropy", f"export.dynamic_axes={axes}"]
        check_model(model, load_recipe(None, given), data, example_inputs(train, 2))

    several, open_length = tokens([7] * 30 + [9] * 30), "{input: {1: length}}"
    check(Bag(), open_length, several)
    with pytest.raises(DataError, match=r"\(7,\) at first, \(9,\) in other training examples.*or leave dimensions open"):
        check(Bag(), "{}", several)

    class Each(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, 2)

        def forward(self, ids):
            return self.embed(ids).cumsum(1).mT.flatten(1)[:, : 2 * (ids.shape[1] // 4) + 2]

    with pytest.raises(DataError, match=r"The model's output, of shape \(4,\) at first, follows them"):
        check_shapes(Data(*[several] * 3, "classification", 2), None, torch.ones(2, 7).long(), Each(), [{1}])

    class Odd(Bag):
        def forward(self, ids):
            if ids.shape[1] > 8:
                raise RuntimeError("too long")
            return super().forward(ids)

    with pytest.raises(DataError, match=r"\(9,\) in other .*The model fails on them: RuntimeError: too long"):
        check_shapes(Data(*[several] * 3, "classification", 2), None, torch.ones(2, 7).long(), Odd(), [{1}])
