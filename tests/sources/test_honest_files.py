"""Valid user files that used to cause internal errors or were misread."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from svdcompress.errors import CheckpointError, DataError
from svdcompress.predict import read_inputs
from svdcompress.recipe import DataSection
from svdcompress.sources import decode, load_npy, load_weights, open_data


def opened(path, task="regression", **fields):
    return open_data(DataSection(name=f"npz:{path}", validation=2, test_share=0.2, **fields), task)


# Arrays


@pytest.mark.parametrize("kind", [">f4", ">f8", ">i2", ">u2", np.longdouble, np.float16, "bool"])
def test_numbers_of_any_byte_order_and_width_are_read_as_what_they_are(tmp_path, kind):
    x = (np.arange(60).reshape(20, 3) % 7).astype(kind)
    np.savez(tmp_path / "d.npz", x=x, y=np.arange(20.0).astype(">f8"))
    data = opened(tmp_path / "d.npz", split="tail")
    assert data.train.inputs.float().tolist() == x[: len(data.train)].astype(np.float32).tolist()
    np.save(tmp_path / "x.npy", np.asfortranarray(x))
    assert read_inputs(tmp_path / "x.npy")[0].double().tolist() == x.astype(np.float64).tolist()


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.float32(3), np.zeros(20), "x: a single number"),
        (np.zeros((20, 2)), np.float64(3), "y: a single number"),
        (np.full((20, 2), 1e300), np.zeros(20), r"1e\+300, which overflows float32 in row 0"),
        (np.zeros((20, 2)), np.full(20, -1e300), r"data\.target: .*-1e\+300, which overflows float32 in row 0"),
        (np.full((20, 2), np.longdouble("1e4000")), np.zeros(20), "long doubles that float64 cannot hold"),
        (np.zeros((20, 2), complex), np.zeros(20), "complex128; numbers are needed"),
        (np.full((20, 2), 2**64 - 1, np.uint64), np.zeros(20), "18446744073709551615, which int64 cannot hold"),
        (np.zeros(20, "M8[s]"), np.zeros(20), "numbers are needed"),
    ],
)
def test_arrays_that_are_not_what_a_network_takes(tmp_path, x, y, message):
    np.savez(tmp_path / "d.npz", x=x, y=y)
    with pytest.raises(DataError, match=message):
        opened(tmp_path / "d.npz")


def lying(shape, kind="<f4"):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": shape})
    return file.getvalue() + bytes(64)


@pytest.mark.parametrize("shape", [(10**9, 1000), (2**40,), (2**62, 2**62), (10**30,), (17,), (15,), (0, 2**62)])
def test_a_header_that_lies_allocates_nothing(tmp_path, shape):
    (tmp_path / "x.npy").write_bytes(lying(shape))
    with zipfile.ZipFile(tmp_path / "d.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", lying(shape))
        archive.writestr("y.npy", lying((16,)))
    tracemalloc.start()
    for read in (lambda: load_npy(tmp_path / "x.npy"), lambda: opened(tmp_path / "d.npz")):
        with pytest.raises(DataError, match=r"header promises|an impossible shape|0 or|memory"):
            read()
    assert tracemalloc.get_traced_memory()[1] < 2**25
    tracemalloc.stop()


def idx(path, kind, shape, body=b""):
    path.write_bytes(bytes((0, 0, kind, len(shape))) + struct.pack(f">{len(shape)}I", *shape) + body)


def test_idx_files_that_promise_more_than_there_is(tmp_path):
    for split in ("train", "t10k"):
        idx(tmp_path / f"{split}-images-idx3-ubyte", 8, (4, 2, 2), bytes(16))
        idx(tmp_path / f"{split}-labels-idx1-ubyte", 12, (4,), struct.pack(">4i", 0, 1, 2, 2_000_000_000))
    section = DataSection(name=f"mnist:{tmp_path}")
    tracemalloc.start()
    with pytest.raises(DataError, match=r"train-labels.*label 2000000000; labels start at 0, with at most"):
        open_data(section, "classification")
    idx(tmp_path / "train-images-idx3-ubyte", 8, (2**32 - 1,) * 255)
    with pytest.raises(DataError, match="truncated: its header promises"):
        open_data(section, "classification")
    idx(tmp_path / "train-images-idx3-ubyte", 14, (0, 2**32 - 1, 2**32 - 1, 2**32 - 1))
    with pytest.raises(DataError, match=r"impossible dimensions|have the shapes"):
        open_data(section, "classification")
    (tmp_path / "train-images-idx3-ubyte").unlink()
    with gzip.open(tmp_path / "train-images-idx3-ubyte.gz", "wb") as file:
        file.write(b"\0\0\x08\x03" + struct.pack(">3I", 2**31, 28, 28) + bytes(4000))
    with pytest.raises(DataError, match="truncated: its header promises"):
        open_data(section, "classification")
    assert tracemalloc.get_traced_memory()[1] < 2**25
    tracemalloc.stop()


def test_a_class_that_is_infinite_is_named(tmp_path):
    path = tmp_path / "t.csv"
    for value in ("inf", "1e300"):
        path.write_text("a,b\n" + "1,0\n2,1\n" * 10 + f"3,{value}\n")
        with pytest.raises(DataError, match=r"column 'b' holds .* in row 20, which is not a class"):
            open_data(DataSection(name=f"csv:{path}", target="b"), "classification")
    path.write_text("a,b\n" + "1,0\n2,1\n" * 10 + "1e300,1\n")
    with pytest.raises(DataError, match=r"column 'a': 1e\+300 in row 20 overflows float32"):
        open_data(DataSection(name=f"csv:{path}", target="b"), "classification")


# Images


def test_images_that_are_bombs_or_programs(tmp_path):
    from PIL import Image

    file = io.BytesIO()
    Image.new("L", (8, 8)).save(file, "PNG")
    content = bytearray(file.getvalue())
    content[16:24] = struct.pack(">2I", 200_000, 200_000)
    import zlib

    content[29:33] = struct.pack(">I", zlib.crc32(bytes(content[12:29])))
    with pytest.raises(DataError, match=r"bomb\.png: .*(DecompressionBombError|at most .* pixels)"):
        decode(bytes(content), None, "bomb.png")
    content[16:24] = struct.pack(">2I", 9_000, 9_000)
    content[29:33] = struct.pack(">I", zlib.crc32(bytes(content[12:29])))
    with pytest.raises(DataError, match=r"9,000 x 9,000; images of at most"):
        decode(bytes(content), None, "large.png")
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"
    with pytest.raises(DataError, match="not a readable image"):  # Pillow would call ghostscript
        decode(eps, None, "program.png")


# Dense weights


def net():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model.register_buffer("mask", torch.full((2, 2), -float("inf")).triu(1))
    return model


def same(model, before):
    now = model.state_dict()
    return all(torch.equal(now[name], value) and now[name].dtype == value.dtype for name, value in before.items())


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.int(),
        lambda t: t.bool(),
        lambda t: t.to(torch.complex64),
        lambda t: t.to(torch.float8_e4m3fn),
        lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
        lambda t: t.to_sparse(),
        lambda t: t / 0,
    ],
    ids=["int", "bool", "complex", "float8", "quantised", "sparse", "not finite"],
)
def test_weights_of_other_types_are_refused_by_name(tmp_path, change, suffix):
    torch.manual_seed(0)
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = {**net().state_dict(), "2.weight": change(torch.randn(2, 4))}
    path = tmp_path / f"w.{suffix}"
    try:
        torch.save(state, path) if suffix == "pt" else save_file(state, str(path))
    except Exception:
        pytest.skip("this kind of file cannot hold it")
    with pytest.raises(CheckpointError, match=r"w\..*2\.weight|could run code"):
        load_weights(model, path)
    assert same(model, before)


def test_weights_of_half_precision_and_infinities_of_the_factory_are_taken(tmp_path):
    torch.save(net().half().state_dict(), tmp_path / "half.pt")
    model = load_weights(net(), tmp_path / "half.pt")
    assert model[0].weight.dtype == torch.float32 and torch.isinf(model.mask).sum() == 1
    state = net().state_dict()
    state["1.num_batches_tracked"] = state["1.num_batches_tracked"].float()
    torch.save(state, tmp_path / "counted.pt")
    with pytest.raises(CheckpointError, match=r"num_batches_tracked is torch\.float32"):
        load_weights(net(), tmp_path / "counted.pt")


@pytest.mark.parametrize(
    "index",
    [
        [],
        {},
        {"weight_map": []},
        {"weight_map": {"0.weight": 3}},
        {"weight_map": {"0.weight": None}},
        {"weight_map": {"0.weight": "/etc/hostname"}},
        {"weight_map": {"0.weight": "."}},
        {"weight_map": {"0.weight": "a.safetensors", "ghost": "a.safetensors"}},
        None,
    ],
    ids=str,
)
def test_indexes_of_shards_that_say_something_else(tmp_path, index):
    save_file(net().state_dict(), str(tmp_path / "a.safetensors"))
    text = json.dumps(index) if index is not None else "[" * 100_000 + "]" * 100_000
    (tmp_path / "m.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        load_weights(net(), tmp_path / "m.safetensors.index.json")
