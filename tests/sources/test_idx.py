"""IDX files with other names than MNIST's, and several sets in one folder."""

import gzip
import struct

import numpy as np
import pytest

from svdcompress.errors import DataError
from svdcompress.recipe import DataSection
from svdcompress.sources import open_data


def write(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    head = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    content = head + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_set(folder, stem="", test="test", suffix="", count=20):
    for split, size in (("train", count), (test, count // 2)):
        write(folder / f"{stem}{split}-images-idx3-ubyte{suffix}", np.full((size, 4, 5), count))
        write(folder / f"{stem}{split}-labels-idx1-ubyte{suffix}", np.arange(size) % 3)


def opened(place):
    return open_data(DataSection(name=f"mnist:{place}"), "classification")


@pytest.mark.parametrize(("stem", "test", "suffix"), [("emnist-letters-", "test", ".gz"), ("", "test", ""), ("my", "t10k", "")])
def test_one_set_by_any_name(tmp_path, stem, test, suffix):
    write_set(tmp_path, stem, test, suffix)
    data = opened(tmp_path)
    assert (len(data.train), len(data.validation), len(data.test), data.outputs) == (18, 2, 10, 3)
    assert data.test.inputs.shape == (10, 1, 4, 5)


def test_of_several_sets_one_is_named_by_its_beginning(tmp_path):
    write_set(tmp_path / "raw", "emnist-letters-", suffix=".gz", count=20)
    write_set(tmp_path / "raw", "emnist-digits-", suffix=".gz", count=30)
    with pytest.raises(DataError, match=r"data\.name: .* holds 2 data sets \(.*raw/emnist-digits-, .*; name .* --data mnist:"):
        opened(tmp_path)
    assert len(opened(tmp_path / "raw" / "emnist-digits").test) == 15
    with pytest.raises(DataError, match="holds 2 data sets"):
        opened(tmp_path / "raw" / "emnist")


def test_of_several_folders_mnist_comes_first_and_others_are_asked_for(tmp_path):
    write_set(tmp_path / "FashionMNIST" / "raw", test="t10k", count=20)
    assert len(opened(tmp_path).test) == 10
    write_set(tmp_path / "KMNIST" / "raw", test="t10k", count=30)
    with pytest.raises(DataError, match=r"holds 2 data sets \(.*FashionMNIST/raw, .*KMNIST/raw\)"):
        opened(tmp_path)
    assert len(opened(tmp_path / "KMNIST").test) == 15
    write_set(tmp_path / "MNIST" / "raw", test="t10k", count=40)
    assert len(opened(tmp_path).test) == 20


def test_what_is_missing_is_named_and_where_it_comes_from(tmp_path):
    write_set(tmp_path, "emnist-letters-")
    (tmp_path / "emnist-letters-test-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match=r"lacks emnist-letters-test-labels-idx1-ubyte\[\.gz\]"):
        opened(tmp_path)
    with pytest.raises(DataError, match=r"data\.name: no IDX files .*torchvision\.datasets\.MNIST\('DIR', download=True\)"):
        opened(tmp_path / "nowhere")


def test_labels_of_another_shape(tmp_path):
    write_set(tmp_path)
    write(tmp_path / "train-labels-idx1-ubyte", np.zeros((20, 8)))
    with pytest.raises(DataError, match=r"have the shapes \(20, 4, 5\) and \(20, 8\)"):
        opened(tmp_path)
