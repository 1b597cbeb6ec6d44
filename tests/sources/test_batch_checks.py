"""Data read on demand: checked and converted batch by batch, by as many processes as make sense."""

import os

import pytest
import torch

from svdcompress.errors import DataError
from svdcompress.recipe import DataSection
from svdcompress.sources import FromDataset, check_labels, example_inputs, open_data

FACTORY = """
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, WeightedRandomSampler

x = torch.arange(40.0).view(20, 2)

class Rows(Dataset):
    def __init__(self, targets, inputs=x):
        self.inputs, self.targets = inputs, targets
    def __len__(self): return len(self.targets)
    def __getitem__(self, i): return self.inputs[i], self.targets[i]

class Broken(Rows):
    def __getitem__(self, i):
        if i == 7:
            raise OSError("7.png is cut off")
        return super().__getitem__(i)

def labels(kind="int32", at=None, value=0):
    y = (torch.arange(20) % 3).to(getattr(torch, kind))
    if at is not None:
        y[at] = float(value)  # text in a recipe: what is not finite could not be stored
    return Rows(y)
def column(): return Rows((torch.arange(20) % 3).view(20, 1))
def doubles(): return Rows(torch.arange(20.0, dtype=torch.float64))
def words(): return Rows(["cat"] * 20)
def holes():
    inputs = x.clone()
    inputs[13, 1] = float("nan")
    return Rows(torch.arange(20) % 3, inputs)
def broken(): return Broken(torch.arange(20) % 3)
def many(): return Rows(torch.zeros(300).long(), torch.zeros(300, 2))
def loader(sampler):
    rows = Rows(torch.arange(20) % 3)
    if sampler == "weighted":
        return DataLoader(rows, sampler=WeightedRandomSampler(torch.ones(20), 20), num_workers=0)
    if sampler == "batches":
        return DataLoader(rows, batch_sampler=[[0, 1], [2, 3]])
    return DataLoader(rows, shuffle=sampler == "shuffle", batch_size=4)
def short(): return (x, torch.zeros(19).long()), (x, torch.zeros(20).long())
def lists(): return ([[1.0, 2.0]] * 20, [0, 1] * 10), ({"a": x.numpy(), "b": x}, [0, 1] * 10)
fixed = Rows(torch.arange(20) % 3)
"""


@pytest.fixture
def opened(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FACTORY)

    def open_(factory, task="classification", workers=0, **args):
        section = DataSection(name=f"{path}:{factory}", args=args, split="tail", validation=2, test_share=0.2, workers=workers)
        return open_data(section, task)

    return open_


def read(data):
    for examples in (data.train, data.validation, data.test):
        for _ in examples.batches(5):
            pass


@pytest.mark.parametrize("kind", ["int32", "uint8", "float32", "bool"])
def test_labels_of_all_kinds_become_classes(opened, kind):
    _, y = next(opened("labels", kind=kind).train.batches(3))
    assert y.dtype == torch.int64
    assert y.tolist() == ([0, 1, 1] if kind == "bool" else [0, 1, 2])


def test_columns_become_vectors_and_doubles_floats(opened):
    assert next(opened("column").train.batches(3))[1].tolist() == [0, 1, 2]
    assert next(opened("doubles", "regression").train.batches(3))[1].dtype == torch.float32


@pytest.mark.parametrize(
    ("factory", "task", "args", "said"),
    [
        (
            "labels",
            "classification",
            {"at": 5, "value": -1},
            r"data\.target: .*mine\.py:labels: label -1 in row 5 \(train\) is out",
        ),
        ("labels", "classification", {"kind": "float32", "at": 5, "value": 0.5}, r"0\.5 in row 5 \(train\) is not a class"),
        (
            "labels",
            "classification",
            {"kind": "float32", "at": 18, "value": "inf"},
            r"inf in row 18 \(test\) is not a class",
        ),
        ("labels", "binary", {}, r"2\.0 in row 14 \(validation\) is neither 0 nor 1"),
        (
            "labels",
            "regression",
            {"kind": "float32", "at": 15, "value": "nan"},
            r"data\.target: .* nan in row 15 \(valid",
        ),
        ("holes", "classification", {}, r"data: .*mine\.py:holes: nan in row 13, position \[1\] \(train\)"),
        ("broken", "classification", {}, r"data: .*mine\.py:broken: an example could not be read: OSError: 7\.png is cut off"),
    ],
)
def test_what_is_wrong_in_a_batch_is_said_with_its_row(opened, factory, task, args, said):
    with pytest.raises(DataError, match=said):
        read(opened(factory, task, **args))


def test_what_is_wrong_with_the_first_examples_is_said_on_opening(opened):
    with pytest.raises(DataError, match="label -7 in row 0"):
        opened("labels", at=0, value=-7)
    with pytest.raises(DataError, match=r"words: the targets of a batch are not numbers: .*'cat'"):
        opened("words")


def test_labels_are_held_to_the_models_outputs(opened):
    data = opened("labels", at=9, value=5)
    read(data)  # the number of classes was not given
    check_labels(data, 4)
    with pytest.raises(DataError, match=r"label 5 in row 9 \(train\) is out of range 0 to 3: the model has 4 outputs"):
        read(data)
    check_labels(data, 6)
    read(data)


def test_an_error_in_a_loader_process_comes_without_its_traceback(opened, tmp_path):
    data = opened("broken", workers=1)
    with pytest.raises(DataError) as error:
        read(data)
    assert str(error.value).endswith("broken: an example could not be read: OSError: 7.png is cut off")

    class Files(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            raise DataError("data: 3.png: not a readable image (cut off)")

    with pytest.raises(DataError) as error:
        list(FromDataset(Files(), workers=1).batches(2))
    assert str(error.value) == "data: 3.png: not a readable image (cut off)"

    class Killed(Files):
        def __getitem__(self, index):
            os._exit(9)

    with pytest.raises(DataError, match=r"Killed: an example could not be read: .*data\.workers=0 reads without"):
        list(FromDataset(Killed(), workers=1).batches(2))


def test_first_examples_are_read_without_loader_processes(opened, monkeypatch):
    data = opened("labels", workers=3)
    monkeypatch.setattr(torch.utils.data.dataloader, "_MultiProcessingDataLoaderIter", None)
    assert example_inputs(data.train, 3).tolist() == [[0, 1], [2, 3], [4, 5]]


def test_datasets_are_read_by_processes_where_there_are_many_examples(opened, monkeypatch):
    import multiprocessing

    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none=False: "fork")
    assert opened("many", workers=None).train.workers == 3
    assert opened("many", workers=1).train.workers == 1
    assert opened("labels", workers=None).train.workers == 0
    assert opened("loader", workers=None, sampler="none").train.workers == 0  # as in the DataLoader
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none=False: "spawn")
    assert opened("many", workers=None).train.workers == 0


def test_a_sampler_of_a_loaders_own_is_warned_of(opened):
    for plain in ("shuffle", "none"):
        assert opened("loader", sampler=plain).warnings == []
    for sampler, name in (("weighted", "WeightedRandomSampler"), ("batches", "list")):
        (line,) = opened("loader", sampler=sampler).warnings
        assert f"the {name} of the train DataLoader is not used" in line


def test_pairs_that_do_not_fit_and_lists(opened):
    with pytest.raises(DataError, match=r"mine\.py:short: 20 inputs, but 19 targets"):
        opened("short")
    data = opened("lists")
    assert next(data.train.batches(2))[0].tolist() == [[1, 2], [1, 2]]
    assert {key: tuple(value.shape) for key, value in next(data.test.batches(2))[0].items()} == {"a": (2, 2), "b": (2, 2)}


def test_arguments_for_what_is_no_function(opened):
    assert len(opened("fixed").train) == 14
    with pytest.raises(DataError, match=r"data\.args: .*mine\.py:fixed is a Rows, not a function"):
        opened("fixed", size=3)
