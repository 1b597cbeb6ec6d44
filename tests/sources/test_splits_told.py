"""Which examples are used for choices and which for the final test: as named, or with a warning."""

import numpy as np
import pytest
import torch

from svdcompress.errors import DataError
from svdcompress.recipe import DataSection
from svdcompress.sources import open_data
from svdcompress.sources.given import given


def arrays(path, **sizes):
    """An npz file with the given number of examples in each split; the inputs tell them apart."""
    rng, content = np.random.default_rng(0), {}
    for index, (split, count) in enumerate(sizes.items()):
        content[f"x_{split}"] = rng.normal(10 * index, 0.1, (count, 3)).astype(np.float32)
        content[f"y_{split}"] = rng.integers(0, 3, count)
    np.savez(path, **content)
    return f"npz:{path}"


def opened(name, task="classification", **fields):
    return open_data(DataSection(name=name, **fields), task)


def level(examples):
    return round(float(examples.inputs.mean()))


def test_a_table_is_no_validation_data_of_arrays(tmp_path):
    name = arrays(tmp_path / "a.npz", train=40, test=20)
    (tmp_path / "held.csv").write_text("a,b,c,y\n1,2,3,0\n4,5,6,1\n")
    with pytest.raises(DataError, match=r"data\.validation: csv:.*held\.csv is a table, but npz:.* is not.*test:50%"):
        opened(name, validation=f"csv:{tmp_path / 'held.csv'}")
    with pytest.raises(DataError, match="is a table, but digits is not"):
        opened("digits", validation="csv:held.csv")


@pytest.mark.parametrize("word", ["validation", "val", "valid"])
def test_validation_arrays_are_found_by_their_usual_names(tmp_path, word):
    data = opened(arrays(tmp_path / "a.npz", **{"train": 40, word: 12, "test": 20}))
    assert [len(part) for part in (data.train, data.validation, data.test)] == [40, 12, 20]
    assert (level(data.validation), data.warnings) == (10, [])


def test_arrays_that_look_like_a_split_and_are_not_read_are_named(tmp_path):
    data = opened(arrays(tmp_path / "a.npz", train=40, dev=12, test=20))
    (line,) = data.warnings
    assert "not read" in line and "x_dev, y_dev" in line and len(data.validation) == 4
    np.savez(tmp_path / "b.npz", x=np.zeros((20, 3), np.float32), y=np.arange(20) % 2, origin=np.zeros(3))
    assert opened(f"npz:{tmp_path / 'b.npz'}").warnings == []


def test_arrays_with_names_of_data_that_are_not_read_are_named(tmp_path):
    x, y = np.zeros((20, 3), np.float32), np.arange(20) % 2
    np.savez(tmp_path / "a.npz", x=x, y=y, x_train=x + 1, y_train=y, x_test=x, y_test=y, note=y)
    data = opened(f"npz:{tmp_path / 'a.npz'}")
    (line,) = data.warnings
    assert line.endswith("a.npz: not read, although named like data: x, y (read: x_train, y_train, x_test, y_test)")
    assert level(data.train) == 1
    np.savez(tmp_path / "b.npz", x=x, data=x, y=y)
    (line,) = opened(f"npz:{tmp_path / 'b.npz'}").warnings
    assert "not read, although named like data: data (read: x, y)" in line


def test_a_share_that_does_nothing_is_told(tmp_path):
    name = arrays(tmp_path / "a.npz", train=40, validation=12, test=20)
    lines = opened(name, validation=0.3, test_share=0.5).warnings
    assert [line.partition(":")[0] for line in lines] == ["data.test_share", "data.validation"]
    assert all("has no effect" in line for line in lines)
    assert opened(name).warnings == [] == opened(arrays(tmp_path / "b.npz", train=40), validation=0.3, test_share=0.5).warnings


def test_settings_of_splits_that_are_there_are_told(tmp_path):
    x, y = np.zeros((9, 2), np.float32), np.arange(9) % 3
    np.savez(tmp_path / "a.npz", **{f"{kind}_{split}": part for kind, part in (("x", x), ("y", y)) for split in SPLITS})
    name = f"npz:{tmp_path / 'a.npz'}"
    told = opened(name, split="tail", split_seed=7).warnings
    assert [line.partition(" has no effect")[0] for line in told] == ["data.split: tail", "data.split_seed: 7"]
    assert opened(name).warnings == [] == opened(name, split_seed=7, limit=12).warnings


SPLITS = ("train", "validation", "test")


@pytest.mark.parametrize("left, missing", [("x_val", "targets"), ("y_test", "inputs")])
def test_half_of_a_split_is_an_error(tmp_path, left, missing):
    """The other half may be there under a name that is not known: other data would be held out in its place."""
    x, y = np.zeros((9, 2), np.float32), np.arange(9) % 3
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, **{left: x if left[0] == "x" else y}, other=y)
    with pytest.raises(DataError, match=rf"a.npz: has .* \({left}\), but no {missing}; it has x_train, y_train, {left}, other"):
        opened(f"npz:{tmp_path / 'a.npz'}")


def test_a_missing_source_of_validation_data_is_named(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((9, 2), np.float32), y=np.arange(9) % 3)
    with pytest.raises(DataError, match=r"^data\.validation: .*nope\.npz: no such file"):
        opened(f"npz:{tmp_path / 'a.npz'}", validation=f"npz:{tmp_path / 'nope.npz'}")


def test_warnings_about_validation_data_of_their_own_are_told(tmp_path):
    x, y = np.ones((20, 3), np.float32), np.arange(20) % 2
    np.savez(tmp_path / "a.npz", x=x, y=y)
    np.savez(tmp_path / "b.npz", x=x, data=x, y=y)
    (line,) = opened(f"npz:{tmp_path / 'a.npz'}", validation=f"npz:{tmp_path / 'b.npz'}").warnings
    assert line == f"data.validation: {tmp_path / 'b.npz'}: not read, although named like data: data (read: x, y)"
    both = opened(f"npz:{tmp_path / 'b.npz'}", validation=f"npz:{tmp_path / 'b.npz'}").warnings
    assert len(both) == 1 and not both[0].startswith("data.validation")  # the same file: told once


def test_warnings_about_a_table_of_validation_data_are_told(tmp_path):
    rows = "".join(f"{row},{row % 2}\n" for row in range(20))
    (tmp_path / "a.csv").write_text(f"t,y\n{rows}")
    (tmp_path / "b.csv").write_text("t,y\n" + "".join(f"{2**31 + row},{row % 2}\n" for row in range(20)))
    held = f"csv:{tmp_path / 'b.csv'}"
    data = opened(f"csv:{tmp_path / 'a.csv'}", validation=held, target="y")
    told = [line for line in data.warnings if line.startswith("data.validation")]
    (line,) = told
    assert line.startswith(f"data.validation: {held}: data.features: column 't': of 20 different values 1 are left")


def test_a_limit_takes_examples_of_all_classes(tmp_path):
    labels = np.arange(400) // 40  # in class order, as in a folder of images
    np.savez(tmp_path / "a.npz", x=np.arange(1200).reshape(400, 3).astype(np.float32), y=labels)
    name = f"npz:{tmp_path / 'a.npz'}"
    data = opened(name, limit=100)
    assert sum(map(len, (data.train, data.validation, data.test))) == 100
    assert len(data.train.targets.unique()) >= 9
    again = opened(name, limit=100)
    assert torch.equal(again.train.inputs, data.train.inputs)
    assert not torch.equal(opened(name, limit=100, split_seed=1).train.inputs, data.train.inputs)
    last = opened(name, limit=100, split="tail")  # as for a series, whose order matters
    assert int(last.test.inputs.max()) == 299 and last.train.targets.unique().tolist() == [0, 1]


def test_classes_without_a_training_example_are_told(tmp_path):
    from PIL import Image

    for kind, count in (("cat", 8), ("dog", 8), ("eel", 1)):
        (tmp_path / kind).mkdir()
        for index in range(count):
            Image.fromarray(np.full((4, 4, 3), index, np.uint8)).save(tmp_path / kind / f"{index}.png")
    told = [opened(f"imagefolder:{tmp_path}", split="tail", validation=2, workers=0, limit=limit).warnings for limit in (17, 8)]
    told = [[line for line in lines if "no training example" in line] for lines in told]
    assert "1 of the 3 classes (eel)" in told[0][0] and "2 of the 3 classes (dog, eel)" in told[1][0]


def splits(path, name="a.npz", **targets):
    """An npz file with the given targets in each split."""
    content = {f"y_{split}": np.array(labels) for split, labels in targets.items()}
    content |= {f"x_{split}": np.ones((len(labels), 3), np.float32) for split, labels in targets.items()}
    np.savez(path / name, **content)
    return f"npz:{path / name}"


def test_classes_that_only_other_splits_have_are_told(tmp_path):
    name = splits(tmp_path, train=[0, 1] * 9, validation=[0, 1] + [2] * 7, test=[0, 1, 2, 4])
    (line,) = opened(name).warnings
    assert line == "training data have no example of classes 2 (validation has 7, test has 1), 4 (test has 1)"
    assert opened(splits(tmp_path, train=[0, 2, 4], validation=[2], test=[0])).warnings == []


def test_pixels_of_no_class_and_words_of_one_text_are_not_told(tmp_path):
    maps = {"train": [[[0, 1]]] * 9, "validation": [[[-100, 0]]] * 2, "test": [[[1, 2]]]}
    (line,) = opened(splits(tmp_path, **maps)).warnings
    assert "no example of class 2 (test has 1)" in line
    assert opened(splits(tmp_path, train=[[0, 1]] * 9, validation=[[0, 5]], test=[[1, 2]])).warnings == []


def test_the_target_is_no_feature(tmp_path):
    (tmp_path / "t.csv").write_text("a,b,y\n" + "".join(f"{row},{row % 3},{row % 2}\n" for row in range(20)))
    with pytest.raises(DataError, match=r"data\.features: 'y' is the target"):
        opened(f"csv:{tmp_path / 't.csv'}", target="y", features=["a", "y"])
    assert opened(f"csv:{tmp_path / 't.csv'}", target="y", features=["a"]).preprocessing["columns"] == ["a"]


def test_inputs_of_several_arrays_make_a_pair_with_their_targets():
    a, b, y = torch.randn(40, 3), torch.randn(40, 2), torch.arange(40) % 3
    for inputs in ((a, b), {"ids": a, "mask": b}):
        with given(model=None, data=(inputs, y)) as names:
            data = opened(names["data"])
        assert [len(part) for part in (data.train, data.validation, data.test)] == [29, 3, 8]
        assert sorted(data.train.targets.unique().tolist()) == [0, 1, 2]
    with given(model=None, data=((a, y), (a[:7], y[:7]))) as names:  # still train and test
        assert len(opened(names["data"]).test) == 7
