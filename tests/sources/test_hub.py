"""Hugging Face data sets saved in a folder: images, text, numbers; and that predict reads files as in training."""

import numpy as np
import pytest
import torch

from svdcompress.errors import DataError
from svdcompress.predict import read_inputs
from svdcompress.recipe import DataSection
from svdcompress.sources import open_data

datasets = pytest.importorskip("datasets")
image = pytest.importorskip("PIL.Image")


def opened(path, task="classification", **fields):
    return open_data(DataSection(name=f"hf:{path}", split="tail", validation=2, test_share=0.2, **fields), task)


def saved(path, columns, **splits):
    made = {name: datasets.Dataset.from_dict(part) for name, part in splits.items()}
    (datasets.DatasetDict({"train": datasets.Dataset.from_dict(columns), **made})).save_to_disk(str(path))
    return path


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of 12 pictures, in 8-bit and 16-bit gray and in color, and a data set with the same content."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 256, (9, 7, 3), dtype=np.uint8) for _ in range(4)]
    arrays += [rng.integers(0, 256, (9, 7), dtype=np.uint8) for _ in range(4)]
    arrays += [rng.integers(0, 65536, (9, 7), dtype=np.uint16) for _ in range(4)]
    files = [folder / f"{index:02}.png" for index in range(12)]
    for file, array in zip(files, arrays, strict=True):
        image.fromarray(array).save(file)
    features = datasets.Features({"picture": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    columns = {"picture": [str(file) for file in files], "label": [0, 1] * 6}
    made = datasets.Dataset.from_dict(columns, features=features)
    made.save_to_disk(str(folder / "set"))
    return folder, arrays


@pytest.mark.parametrize("size", [None, (6, 5), (12, 16)])
def test_images_are_decoded_as_predict_decodes_them(photos, size):
    folder, _ = photos
    data = opened(folder / "set", image_size=size)
    assert (data.classes, len(data.train), len(data.validation), len(data.test)) == (["cat", "dog"], 8, 2, 2)
    trained = torch.cat([examples.inputs for examples in (data.train, data.validation, data.test)])
    again, _ = read_inputs(folder, data.preprocessing, tuple(data.preprocessing["input_shape"]))
    assert torch.equal(trained, again.float() / 255)
    assert data.preprocessing["image_size"] == (list(size) if size else None)


def test_sixteen_bits_keep_their_upper_eight(photos):
    folder, arrays = photos
    data = opened(folder / "set")
    assert torch.equal((data.test.inputs[0, 1] * 255).round().int(), torch.from_numpy((arrays[10] // 256).astype(np.int32)))


def test_what_is_not_for_images_is_refused(photos, tmp_path):
    folder, _ = photos
    with pytest.raises(DataError, match=r"data\.args: saved data sets know tokenizer, max_length, text, not 'nonsense'"):
        opened(folder / "set", args={"nonsense": 3})
    with pytest.raises(DataError, match=r"data\.args\.tokenizer: .* is not read as text"):
        opened(folder / "set", args={"tokenizer": "."})
    with pytest.raises(DataError, match=r"data\.features: .* has no column 'q'; it has picture, label"):
        opened(folder / "set", features=["q"])
    numbers = saved(tmp_path / "numbers", {"a": [1.0, 2.0] * 5, "label": [0, 1] * 5})
    with pytest.raises(DataError, match=r"data\.image_size: .* no column of images among a"):
        opened(numbers, image_size=(4, 4))


def test_numbers_are_predicted_from_tables(tmp_path):
    pytest.importorskip("pandas")
    columns = {"a": [float(i) for i in range(20)], "b": [i % 3 for i in range(20)], "label": [0, 1] * 10}
    data = opened(saved(tmp_path / "numbers", columns), features=["b", "a"])
    (tmp_path / "more.csv").write_text("a,b,c\n7,8,9\n")
    assert read_inputs(tmp_path / "more.csv", data.preprocessing)[0].tolist() == [[8, 7]]
    lists = opened(saved(tmp_path / "lists", {"a": [[1.0, 2.0]] * 20, "label": [0, 1] * 10}))
    with pytest.raises(DataError, match="not trained on tables"):
        read_inputs(tmp_path / "more.csv", lists.preprocessing)


def test_text_is_predicted_from_tables(tmp_path):
    pytest.importorskip("pandas")
    transformers = pytest.importorskip("transformers")
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\ngood\nbad\nfilm\n")
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "words")
    texts = {"text": ["good film", "bad film"] * 10, "label": ["yes", "no"] * 10}
    args = {"tokenizer": str(tmp_path / "words"), "max_length": 4}
    data = opened(saved(tmp_path / "texts", texts), args=args)
    (tmp_path / "more.csv").write_text("text\nbad film\ngood film\n")
    inputs, names = read_inputs(tmp_path / "more.csv", data.preprocessing)
    assert names == ["0", "1"]
    assert torch.equal(inputs["input_ids"].flip(0), next(data.train.batches(2))[0]["input_ids"])
    assert data.classes == ["no", "yes"]


@pytest.mark.parametrize(
    ("columns", "task", "said"),
    [
        ({"a": [1.0, None] * 5, "label": [0, 1] * 5}, "classification", r"data\.features: .*'a': no value in row 1"),
        ({"a": [1.0, 2.0] * 5, "label": [0, None] * 5}, "classification", r"data\.target: .*'label': no value in row 1"),
        ({"a": [1.0, 2.0] * 5, "label": [0, -1] * 5}, "classification", r"label -1 in row 1 \(train\) is out of range"),
        (
            {"a": [[1.0], [1.0, 2.0]] * 5, "label": [0, 1] * 5},
            "classification",
            r"data\.features: .*'a' is not an array of numbers",
        ),
        (
            {"a": [1.0, 2.0] * 5, "label": [{"x": 1}] * 10},
            "regression",
            r"data\.target: .*'label' holds \{'x': 1\}, not numbers",
        ),
    ],
)
def test_bad_columns_are_named(tmp_path, columns, task, said):
    with pytest.raises(DataError, match=said):
        opened(saved(tmp_path / "bad", columns), task)


@pytest.mark.parametrize("word", ["validation", "valid", "val", "dev"])
def test_validation_splits_go_by_several_names(tmp_path, word):
    columns = {"a": [float(row) for row in range(40)], "label": [row % 2 for row in range(40)]}
    held = {"a": [100.0] * 6, "label": [0, 1] * 3}
    data = opened(saved(tmp_path / "set", columns, **{word: held, "test": held}), standardize=False)
    assert [len(part) for part in (data.train, data.validation, data.test)] == [40, 6, 6]


def test_splits_that_are_not_read_are_named_where_one_is_missing(tmp_path):
    columns = {"a": [float(row) for row in range(40)], "label": [row % 2 for row in range(40)]}
    data = opened(saved(tmp_path / "set", columns, validation_matched=columns, test=columns))
    (line,) = [line for line in data.warnings if "not read" in line]
    assert "the splits validation_matched are not read; validation data are held out of train" in line
    data = opened(saved(tmp_path / "more", columns, validation=columns, test=columns, extra=columns))
    assert not [line for line in data.warnings if "not read" in line]


def test_the_label_is_no_feature(tmp_path):
    columns = {"a": [float(row) for row in range(40)], "label": [row % 2 for row in range(40)]}
    with pytest.raises(DataError, match=r"data\.features: 'label' is the target"):
        opened(saved(tmp_path / "set", columns), features=["a", "label"])


def labelled(names, **columns):
    features = {name: datasets.Value("float64") for name in columns if name != "label"}
    features = datasets.Features({**features, "label": datasets.ClassLabel(names=names)})
    return datasets.Dataset.from_dict(columns, features=features)


def test_columns_and_classes_are_those_of_train_in_all_splits(tmp_path):
    """Another order of columns or of class names in a split swaps nothing."""
    rows = {"a": [float(row) for row in range(20)], "b": [100.0 + row for row in range(20)]}
    train = labelled(["cat", "dog"], **rows, label=[0, 1] * 10)
    test = labelled(["dog", "cat"], b=rows["b"], label=[0, 1] * 10, a=rows["a"])
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(str(tmp_path / "set"))
    data = opened(tmp_path / "set", standardize=False)
    assert data.classes == ["cat", "dog"] and data.test.targets.tolist() == [1, 0] * 10
    assert torch.equal(data.test.inputs, torch.tensor([rows["a"], rows["b"]]).T)
    other = labelled(["dog", "bird"], **rows, label=[0, 1] * 10)
    datasets.DatasetDict({"train": train, "test": other}).save_to_disk(str(tmp_path / "other"))
    with pytest.raises(DataError, match=r"\(test\): class 'bird' at row 1 does not occur in the training data"):
        opened(tmp_path / "other")
    less = labelled(["cat", "dog"], a=rows["a"], label=[0, 1] * 10)
    datasets.DatasetDict({"train": train, "test": less}).save_to_disk(str(tmp_path / "less"))
    with pytest.raises(DataError, match=r"\(test\) has no column 'b'"):
        opened(tmp_path / "less")


def test_other_data_for_validation_have_the_columns_of_train(tmp_path):
    rows = {"a": [float(row) for row in range(20)], "b": [100.0 + row for row in range(20)], "label": [0, 1] * 10}
    saved(tmp_path / "set", rows, test=rows)
    saved(tmp_path / "other", {name: rows[name] for name in ("b", "label", "a")})
    section = DataSection(name=f"hf:{tmp_path / 'set'}", validation=f"hf:{tmp_path / 'other'}", standardize=False)
    data = open_data(section, "classification")
    assert torch.equal(data.validation.inputs, torch.tensor([rows["a"], rows["b"]]).T)
    saved(tmp_path / "less", {"b": rows["b"], "c": rows["a"], "label": rows["label"]})
    with pytest.raises(DataError, match="has no column 'a'"):
        open_data(section.model_copy(update={"validation": f"hf:{tmp_path / 'less'}"}), "classification")


def test_columns_beside_text_or_images_may_be_absent_elsewhere(tmp_path, photos):
    made = datasets.load_from_disk(str(photos[0] / "set"))
    both = datasets.DatasetDict({"train": made.add_column("id", list(range(12))), "test": made})
    both.save_to_disk(str(tmp_path / "set"))
    assert len(opened(tmp_path / "set").test) == 12


@pytest.mark.parametrize("swap", [False, True])
def test_names_in_one_split_and_numbers_in_the_other_are_refused(tmp_path, swap):
    numbers = {"a": [float(row) for row in range(12)], "label": list(range(12))}
    names = numbers | {"label": [str(row) for row in range(12)]}  # sorted: 0, 1, 10, 11, 2
    train, test = (names, numbers) if swap else (numbers, names)
    with pytest.raises(DataError, match=r"\(test\): column 'label' holds .*0.*; make both names or both numbers"):
        opened(saved(tmp_path / "set", train, test=test))
    with pytest.raises(DataError, match="no column but 'label', which is the target"):
        opened(saved(tmp_path / "empty", {"label": [0, 1] * 6}))


def test_numbers_that_are_stored_as_text_are_targets_of_a_regression(tmp_path):
    columns = {"a": [0.1 * row for row in range(20)], "label": [f"{row + 0.5}" for row in range(20)]}
    data = opened(saved(tmp_path / "set", columns), "regression", target_scale="none")
    assert data.train.targets[:3].tolist() == [0.5, 1.5, 2.5]
    saved(tmp_path / "names", {**columns, "label": ["lo", "hi"] * 10})
    with pytest.raises(DataError, match="column 'label' is not an array of numbers"):
        opened(tmp_path / "names", "regression")


def test_columns_that_are_not_read_and_numbers_that_float32_loses_are_told(photos, tmp_path):
    folder, _ = photos
    pictures = datasets.load_from_disk(str(folder / "set")).add_column("age", list(range(12)))
    pictures.save_to_disk(str(tmp_path / "ages"))
    (line,) = opened(tmp_path / "ages").warnings
    assert "of the columns only picture is read, not age" in line
    seconds = [1.7e9 + row for row in range(20)]
    (line,) = opened(saved(tmp_path / "big", {"a": seconds, "label": [0, 1] * 10})).warnings
    assert "column 'a': of 20 different values 1 are left in float32" in line


def test_a_format_of_the_data_set_does_not_matter(photos, tmp_path):
    folder, _ = photos
    plain = opened(folder / "set")
    datasets.load_from_disk(str(folder / "set")).with_format("torch").save_to_disk(str(tmp_path / "torch"))
    assert torch.equal(opened(tmp_path / "torch").train.inputs, plain.train.inputs)
