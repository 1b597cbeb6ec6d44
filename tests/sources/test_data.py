"""Data of every kind, split, checked and transformed; and the errors for bad data."""

import gzip
import struct
import tarfile

import numpy as np
import pytest
import torch

from svdcompress.errors import DataError, RecipeError
from svdcompress.recipe import DataSection
from svdcompress.sources import InMemory, example_inputs, open_data, preprocess


def opened(task="classification", **fields):
    return open_data(DataSection(**fields), task)


def write_idx(path, array, compress):
    head = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    content = head + array.astype(np.uint8).tobytes()
    if compress:
        with gzip.open(f"{path}.gz", "wb") as file:
            file.write(content)
    else:
        path.write_bytes(content)


@pytest.fixture
def mnist(tmp_path):
    def make(compress=True, sub="raw"):
        folder = tmp_path / sub
        folder.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(0)
        for kind, count in (("train", 40), ("t10k", 10)):
            write_idx(folder / f"{kind}-images-idx3-ubyte", rng.integers(0, 256, (count, 6, 6)), compress)
            write_idx(folder / f"{kind}-labels-idx1-ubyte", np.arange(count) % 10, compress)
        return tmp_path

    return make


@pytest.mark.parametrize(("compress", "sub"), [(True, "raw"), (False, "raw"), (True, "MNIST/raw"), (False, ".")])
def test_idx_gzipped_or_not_wherever_it_lies(mnist, compress, sub):
    data = opened(name=f"mnist:{mnist(compress, sub)}", validation=8)
    assert (len(data.train), len(data.validation), len(data.test), data.outputs) == (32, 8, 10, 10)
    x = example_inputs(data.test, 3)
    assert x.shape == (3, 1, 6, 6)
    assert 0 <= x.min() <= x.max() <= 1


def test_idx_folder_by_the_environment(mnist, monkeypatch):
    monkeypatch.setenv("SVDC_MNIST", str(mnist()))
    assert len(opened(name="mnist").test) == 10


def test_bad_idx_files_are_named(mnist):
    root = mnist(compress=False)
    images = root / "raw" / "train-images-idx3-ubyte"
    whole = images.read_bytes()
    for content, said in ((whole[:-5], "truncated"), (b"text", "not an IDX file"), (b"", "not an IDX file")):
        images.write_bytes(content)
        with pytest.raises(DataError, match=rf"train-images-idx3-ubyte.*{said}"):
            opened(name=f"mnist:{root}")
    images.write_bytes(whole)
    (root / "raw" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="lacks t10k-labels"):
        opened(name=f"mnist:{root}")
    with pytest.raises(DataError, match=r"data\.name: no IDX files .* SVDC_MNIST"):
        opened(name="mnist:nowhere")


def test_a_cut_gzip_is_named(mnist):
    root = mnist()
    file = root / "raw" / "train-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz: cannot be read, or truncated"):
        opened(name=f"mnist:{root}")


def test_splits_do_not_overlap_and_do_not_move():
    first, again = opened(name="digits"), opened(name="digits")
    rows = [{tuple(row.tolist()) for row in getattr(first, part).inputs.flatten(1)} for part in ("train", "validation", "test")]
    assert len(first.train) + len(first.validation) + len(first.test) == 1797
    assert not (rows[0] & rows[1]) and not (rows[0] & rows[2]) and not (rows[1] & rows[2])
    assert torch.equal(first.test.inputs, again.test.inputs)


def npz(path, x, y, **more):
    np.savez(path, x=x, y=y, **more)
    return f"npz:{path}"


def test_npz_with_its_own_test_set(tmp_path):
    x, y = np.random.rand(20, 3).astype(np.float32), np.arange(20) % 2
    data = opened(name=npz(tmp_path / "a.npz", x, y, x_test=x[:4], y_test=y[:4]), split="tail", validation=5)
    assert torch.equal(data.test.inputs, torch.from_numpy(x[:4]))
    assert torch.equal(data.validation.inputs, torch.from_numpy(x[15:]))


def nan_at(row, column):
    x = np.zeros((20, 3), np.float32)
    x[row, column] = np.nan
    return x


ZEROS = np.zeros((20, 3), np.float32)


@pytest.mark.parametrize(
    ("x", "y", "task", "said"),
    [
        (ZEROS[:0], np.zeros(0, np.int64), "classification", "no examples"),
        (nan_at(7, 1), np.zeros(20, np.int64), "classification", "nan in row 7, position [1]"),
        (ZEROS, np.where(np.arange(20) == 5, -1, 0), "classification", "label -1 in row 5 (train) is out of range"),
        (ZEROS, np.where(np.arange(20) == 5, 0.5, 0), "classification", "0.5 in row 5 (train) is not a class"),
        (ZEROS, np.where(np.arange(20) == 5, np.nan, 0), "regression", "nan in row 5"),
        (ZEROS, np.where(np.arange(20) == 5, 2, 0), "binary", "2.0 in row 5 (train) is neither 0 nor 1"),
        (ZEROS, np.zeros(19, np.int64), "classification", "20 inputs, but 19 targets"),
        (np.array([["a"]] * 20), np.zeros(20), "classification", "numbers are needed"),
    ],
)
def test_bad_arrays_are_named_with_their_row(tmp_path, x, y, task, said):
    with pytest.raises(DataError) as error:
        opened(task, name=npz(tmp_path / "bad.npz", x, y))
    assert said in str(error.value)
    assert "bad.npz" in str(error.value)


def test_a_label_that_only_the_test_set_has_is_out_of_range_of_known_classes(mnist):
    root = mnist(compress=False)
    write_idx(root / "raw" / "t10k-labels-idx1-ubyte", np.full(10, 12), False)
    with pytest.raises(DataError, match=r"label 12 in row 0 \(test\) is out of range 0 to 9"):
        opened(name=f"mnist:{root}")


def table(path, text):
    path.write_text(text)
    return f"csv:{path}"


ROWS = "".join(f"{i},{i % 7},{'red' if i % 2 else 'blue'},{'yes' if i % 3 else 'no'}\n" for i in range(40))


def test_csv_with_text_columns_and_classes_by_name(tmp_path):
    data = opened(name=table(tmp_path / "t.csv", "a,b,colour,label\n" + ROWS), target="label", transform=["standardize"])
    assert data.classes == ["no", "yes"]
    assert data.train.inputs.shape[1] == 4  # a, b, blue, red
    assert data.train.inputs.mean(0).abs().max() < 1e-5
    assert data.preprocessing["categories"] == {"colour": ["blue", "red"]}
    assert data.preprocessing["transform"][0]["normalize"]["mean"][2:] != [0, 0]


def test_parquet_is_read_as_csv_is(tmp_path):
    pandas = pytest.importorskip("pandas")
    csv = table(tmp_path / "t.csv", "a,b,colour,label\n" + ROWS)
    pandas.read_csv(tmp_path / "t.csv").to_parquet(tmp_path / "t.parquet")
    left, right = (opened(name=name, target="label") for name in (csv, f"parquet:{tmp_path / 't.parquet'}"))
    assert torch.equal(left.train.inputs, right.train.inputs)
    assert torch.equal(left.train.targets, right.train.targets)


@pytest.mark.parametrize(
    ("text", "fields", "said"),
    [
        ("a,b\n1,2\n3,4\n", {}, "data.target: name the column to predict with --target"),
        ("a,b\n1,2\n3,4\n", {"target": "c"}, "data.target: PATH has no column 'c'; it has a, b"),
        ("a,b\n1,0\n,1\n", {"target": "b"}, "data.features: PATH: column 'a': no value (NaN) in row 1"),
        ("a,b\n1,0\n2,\n", {"target": "b"}, "data.target: PATH: column 'b': no value (NaN) in row 1"),
        ("a,b\n1,0\n2,1.5\n", {"target": "b"}, "holds 1.5 in row 1, which is not a class; for a regression, use --loss mse"),
        ("a,b\n1,0\ninf,1\n", {"target": "b"}, "column 'a': infinite in row 1"),
        ("a,b\n", {"target": "b"}, "no rows"),
        ("", {"target": "b"}, "not a readable csv file"),
    ],
)
def test_bad_tables_name_column_and_row(tmp_path, text, fields, said):
    pytest.importorskip("pandas")
    name = table(tmp_path / "t.csv", text)
    with pytest.raises(DataError) as error:
        opened(name=name, **fields)
    assert said.replace("PATH", str(tmp_path / "t.csv")) in str(error.value)


def test_a_regression_on_standardised_targets_knows_their_scale(tmp_path):
    rng = np.random.default_rng(0)
    y = rng.normal(50, 9, 60)
    data = opened("regression", name=npz(tmp_path / "r.npz", rng.random((60, 2)), y), target_scale="standardize")
    mean, std = data.target_scale
    assert abs(mean - 50) < 5 and abs(std - 9) < 3
    assert abs(float(data.train.targets.std()) - 1) < 1e-3


def pictures(folder, size=(8, 8), count=6):
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / name / f"{index}.png")
    return folder


def test_folders_of_images_with_and_without_splits(tmp_path):
    pictures(tmp_path / "plain")
    data = opened(name=f"imagefolder:{tmp_path / 'plain'}", test_share=0.5, validation=2)
    assert (len(data.train), len(data.validation), len(data.test), data.classes) == (4, 2, 6, ["cat", "dog"])
    pictures(tmp_path / "split" / "train")
    pictures(tmp_path / "split" / "val", count=2)
    data = opened(name=f"imagefolder:{tmp_path / 'split'}", test_share=0.25)
    assert (len(data.train), len(data.validation), len(data.test)) == (9, 4, 3)


def test_image_files_that_do_not_fit_in_memory_are_read_as_needed(tmp_path, monkeypatch):
    from svdcompress.sources import _image_folder

    folder = pictures(tmp_path / "plain")
    whole = opened(name=f"imagefolder:{folder}", image_size=(6, 6), workers=0)
    monkeypatch.setattr(_image_folder, "IN_MEMORY_BYTES", 10)
    lazy = opened(name=f"imagefolder:{folder}", image_size=(6, 6), workers=0)
    for (x, y), (x2, y2) in zip(whole.train.batches(4, shuffle=3), lazy.train.batches(4, shuffle=3), strict=True):
        assert torch.equal(x, x2) and torch.equal(y, y2)


def test_bad_images_are_named(tmp_path):
    folder = pictures(tmp_path / "plain")
    (folder / "cat" / "0.png").write_text("no image")
    with pytest.raises(DataError, match=r"0\.png: not a readable image"):
        opened(name=f"imagefolder:{folder}")
    (folder / "cat" / "0.png").unlink()
    pictures(tmp_path / "other", size=(4, 4))
    (tmp_path / "other" / "cat" / "0.png").rename(folder / "cat" / "z.png")
    with pytest.raises(DataError, match=r"data\.image_size: images differ in size"):
        opened(name=f"imagefolder:{folder}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no images in class folders"):
        opened(name=f"imagefolder:{tmp_path / 'empty'}")


def test_cifar_as_binary_records_and_as_archives_of_images(tmp_path):
    rng = np.random.default_rng(0)
    records = rng.integers(0, 256, (20, 3073), dtype=np.uint8)
    records[:, 0] %= 10
    records[0, 0] = 9
    for name in [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]:
        records.tofile(tmp_path / name)
    data = opened(name=f"cifar10:{tmp_path}")
    assert data.test.inputs.shape == (20, 3, 32, 32)
    assert torch.equal(data.test.inputs[3, 1, 0, :4], torch.from_numpy(records[3, 1 + 1024 : 1 + 1028]) / 255)
    for names, message in ((b"cat \xff", "batches.meta.txt: cannot be read"), (b"cat dog", "label 9, but .* names 2 classes")):
        (tmp_path / "batches.meta.txt").write_bytes(names)
        with pytest.raises(DataError, match=message):
            opened(name=f"cifar10:{tmp_path}")
    (tmp_path / "batches.meta.txt").unlink()
    (tmp_path / "test_batch.bin").write_bytes(b"1234")
    with pytest.raises(DataError, match=r"test_batch\.bin: 4 bytes are not whole CIFAR-10 records"):
        opened(name=f"cifar10:{tmp_path}")
    archived = tmp_path / "tar"
    archived.mkdir()
    pictures(tmp_path / "train")
    with tarfile.open(archived / "train.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "train", "train")
    assert opened(name=f"cifar10:{archived}").classes == ["cat", "dog"]
    (archived / "train.tar.gz").write_bytes((archived / "train.tar.gz").read_bytes()[:-300])
    with pytest.raises(DataError, match=r"train\.tar\.gz: cannot be read, or truncated"):
        opened(name=f"cifar10:{archived}")


def test_cifar_100_has_its_fine_labels(tmp_path):
    rng = np.random.default_rng(0)
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    for name, count in (("train.bin", 12), ("test.bin", 5)):
        records = rng.integers(0, 256, (count, 3074), dtype=np.uint8)
        records[:, 0], records[:, 1] = 200, np.arange(count) + 88
        records.tofile(folder / name)
    (folder / "fine_label_names.txt").write_text("".join(f"kind_{k}\n" for k in range(100)))
    data = opened(name=f"cifar100:{tmp_path}")
    assert (data.outputs, data.classes[99], data.test.targets.tolist()) == (100, "kind_99", list(range(88, 93)))
    assert torch.equal(data.test.inputs[4, 2, 31, 30:], torch.from_numpy(records[4, -2:]) / 255)
    with pytest.raises(DataError, match=r"data\.image_size: the images of .* are 32x32; resize them with a transform"):
        opened(name=f"cifar100:{tmp_path}", image_size=(64, 64))
    (folder / "test.bin").write_bytes(bytes(3073))
    with pytest.raises(DataError, match=r"test\.bin: 3073 bytes are not whole CIFAR-100 records of 3074"):
        opened(name=f"cifar100:{tmp_path}")


FACTORY = """
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

x, y = torch.arange(40.0).view(20, 2), torch.arange(20) % 3

class Rows(Dataset):
    def __len__(self): return 20
    def __getitem__(self, i): return {"x": x[i], "labels": y[i]}

def tensors(): return TensorDataset(x, y), TensorDataset(x[:6], y[:6])
def pair(): return (x, y), (x[:6], y[:6])
def loaders(): return {"train": DataLoader(Rows(), batch_size=3), "val": Rows(), "test": Rows()}
def wrong(): return 7
def fails(): raise OSError("no disk")
"""


@pytest.mark.parametrize("factory", ["tensors", "pair", "loaders"])
def test_factories_of_the_users(tmp_path, factory):
    path = tmp_path / "mine.py"
    path.write_text(FACTORY)
    data = opened(name=f"{path}:{factory}", validation=4)
    inputs, targets = next(data.test.batches(6))
    inputs = inputs["x"] if isinstance(inputs, dict) else inputs
    assert torch.equal(inputs, torch.arange(12.0).view(6, 2))
    assert targets.tolist() == [0, 1, 2, 0, 1, 2]


def test_what_is_wrong_with_a_factory_is_said(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FACTORY)
    for factory, said in (("wrong", "returned a int"), ("fails", "OSError: no disk"), ("absent", "has no 'absent'")):
        with pytest.raises(DataError, match=said):
            opened(name=f"{path}:{factory}")
    with pytest.raises(DataError, match="no such file"):
        opened(name=f"{tmp_path / 'other.py'}:make")
    with pytest.raises(DataError, match="unknown source 'mmist'"):
        opened(name="mmist")


def test_shuffling_depends_on_the_seed_alone_and_covers_everything():
    data = opened(name="digits")
    orders = [torch.cat([y for _, y in data.train.batches(100, shuffle=seed)]) for seed in (1, 1, 2)]
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])
    assert torch.equal(orders[0].sort().values, data.train.targets.sort().values)


def test_ranks_share_each_batch_between_them():
    data = opened(name="digits", limit=100)
    alone = [y for _, y in data.train.batches(20, shuffle=5)]
    pairs = zip(*(data.train.batches(10, shuffle=5, rank=rank, world=2) for rank in (0, 1)), strict=True)
    for whole, parts in zip(alone, pairs, strict=False):
        assert torch.equal(whole, torch.cat([y for _, y in parts]))


def test_transforms_and_augmentation_keep_shapes_and_are_named_when_wrong():
    data = opened(
        name="digits", transform=["standardize"], augment=[{"crop": 1}, "flip", {"affine": {"degrees": 10}}, {"noise": 0.1}]
    )
    x, _ = next(data.train.batches(8, shuffle=1))
    plain, _ = next(data.train.batches(8))
    assert x.shape == plain.shape == (8, 1, 8, 8)
    assert torch.equal(plain, data.train.inputs[:8])
    for transform, said in (("nrmalize", "unknown transform 'nrmalize'"), ({"normalize": {"mean": 1}}, "normalize")):
        with pytest.raises(RecipeError, match=said):
            opened(name="digits", transform=[transform])


def test_a_crop_by_one_pixel_is_a_shift_with_zeros():
    from svdcompress.sources import _transforms

    torch.manual_seed(0)
    x = torch.rand(64, 2, 5, 5)
    padded = torch.nn.functional.pad(x, [1] * 4)
    windows = [[padded[i, :, r : r + 5, c : c + 5] for r in range(3) for c in range(3)] for i in range(64)]
    out = _transforms.build([{"crop": 1}], "data.augment")(x)
    assert all(any(torch.equal(out[i], window) for window in windows[i]) for i in range(64))
    assert not torch.equal(out, x)


def test_preprocessing_read_back_prepares_in_the_same_way():
    import json

    data = opened(name="digits", transform=["standardize", "flatten"])
    plain = opened(name="digits")
    settings = json.loads(json.dumps(data.preprocessing))
    assert torch.equal(preprocess(plain.test.inputs, settings), data.test.inputs)


@pytest.mark.parametrize(("count", "size", "sizes"), [(9, 4, [4, 4]), (10, 4, [4, 4, 2]), (5, 1, [1] * 5), (1, 4, [1])])
def test_a_last_training_batch_of_one_is_left_out_where_others_have_more(count, size, sizes):
    examples = InMemory(torch.zeros(count, 2), torch.arange(count))
    assert [len(y) for _, y in examples.batches(size, shuffle=0)] == sizes
    assert sum(len(y) for _, y in examples.batches(size)) == count


def test_a_column_of_tiny_numbers_is_standardised_and_a_constant_one_is_left(tmp_path):
    values = 5e-13 + 2e-13 * np.random.default_rng(0).normal(size=60)
    rows = [f"{value!r},7.0,{k % 2}" for k, value in enumerate(values.tolist())]
    (tmp_path / "small.csv").write_text("farads,same,y\n" + "\n".join(rows))
    data = opened(name=f"csv:{tmp_path}/small.csv", target="y")
    farads, same = data.train.inputs.T
    assert float(farads.std(correction=0)) == pytest.approx(1, rel=1e-3) and abs(float(farads.mean())) < 1e-3
    assert data.preprocessing["transform"][0]["normalize"]["std"][1] == 1.0 and float(same.abs().max()) == 0
