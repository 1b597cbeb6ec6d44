"""More formats: archives, Monte-Carlo files, a run's stored validation data, CIFAR, Parquet."""

from __future__ import annotations

import io
import json
import lzma
import random
import struct
import tarfile
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Format, Wrong
from safetensors.numpy import load as arrays_of
from safetensors.numpy import save as save_arrays
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of
from torch import nn

import svdcompress as svdc
from svdcompress import checkpoint
from svdcompress.calibrate import Promises, save_promises
from svdcompress.export import export_onnx, pack, unpack
from svdcompress.predict import predict_run
from svdcompress.recipe import DataSection, dump_recipe, load_recipe
from svdcompress.sources import open_data

NAMES = ("archive", "onnx", "validation", "cifar", "tar", "parquet")


def header(content: bytes) -> Any:
    """The JSON at the beginning of a safetensors file."""
    return json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])


def checked(data: Any) -> None:
    """Check that everything is finite, inputs match targets in number, and labels are valid classes."""
    for part in (data.train, data.validation, data.test):
        for x, y in part.batches(64):
            x = next(iter(x.values())) if isinstance(x, dict) else x
            if len(x) != len(y) or not bool(torch.isfinite(x.float()).all()) or not bool(torch.isfinite(y.float()).all()):
                raise Wrong("inputs or targets that are not finite, or not as many")
            if data.classes and (int(y.min()) < 0 or int(y.max()) >= len(data.classes)):
                raise Wrong("a label that is no class")


# A run's folder with its ONNX file and promises


def make_small_run(folder: Path) -> None:
    """Make a run's folder as `predict` needs it."""
    torch.manual_seed(0)
    model = svdc.convert(nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))).eval()
    preprocessing = {"transform": [{"normalize": {"mean": [0.5], "std": [0.25]}}], "input_shape": [6], "target_scale": None}
    extra = {"preprocessing": preprocessing, "classes": ["a", "b", "c"], "tau": None, "inputs": None}
    checkpoint.save(model, folder / "model.safetensors", extra=extra)
    (folder / "recipe.yaml").write_text(dump_recipe(load_recipe("digits", ["model.args={sizes: [6, 5, 3]}"])))
    np.save(folder / "x.npy", np.zeros((3, 6), np.float32))
    right = torch.arange(300) >= 60
    confidence = torch.linspace(0.3, 1, 300, dtype=torch.float64)
    promises = Promises("classification", 3, confidence, right, 1 - confidence, torch.arange(300) % 3)
    save_promises(folder / "validation.safetensors", {"samples": promises})


def make_onnx(folder: Path) -> None:
    make_small_run(folder)
    model = checkpoint.load(
        folder / "model.safetensors", nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    )
    extra = {"preprocessing": {"transform": [{"normalize": {"mean": [0.5], "std": [0.25]}}], "input_shape": [6]}}
    example = torch.zeros(2, 6)
    export_onnx(model.eval(), folder / "model_mc.onnx", example, monte_carlo=True, metadata=extra)


def read_onnx(folder: Path, rng: random.Random) -> None:
    predict_run(folder, folder / "x.npy", folder / "p.csv", samples=2, onnx=True)
    lines = (folder / "p.csv").read_text().splitlines()
    if len(lines) != 4 or not {"name", "label", "confidence"} <= set(lines[0].split(",")):
        raise Wrong("a table of other rows or columns")


def onnx_metadata(content: bytes) -> Any:
    import onnx

    return {entry.key: entry.value for entry in onnx.load_model_from_string(content).metadata_props} | {
        "preprocessing": json.loads(
            next(e.value for e in onnx.load_model_from_string(content).metadata_props if e.key == "preprocessing")
        )
    }


def with_metadata(good: bytes) -> Any:
    """Returns a function that writes a value into the valid file as its metadata."""
    import onnx

    def write(value: Any) -> bytes:
        model = onnx.load_model_from_string(good)
        del model.metadata_props[:]
        for key, each in (value if isinstance(value, dict) else {"preprocessing": value}).items():
            text = each if isinstance(each, str) and key != "preprocessing" else json.dumps(each)
            model.metadata_props.add(key=key, value=text.encode("utf-8", "replace").decode())
        return model.SerializeToString()

    return write


def read_validation(folder: Path, rng: random.Random) -> None:
    told: dict[str, Any] = {}
    inputs, out = folder / "x.npy", folder / "p.npz"
    predict_run(folder, inputs, out, samples=2, answer_above=0.85, coverage=0.9, told=told)
    with np.load(out) as stored:
        if stored["set"].shape != (3, 3) or stored["answered"].shape != (3,):
            raise Wrong("promises of another shape")
    if not np.isfinite(told["answer_above"]["threshold"]):
        raise Wrong("a threshold that is not finite")


def about(content: bytes) -> Any:
    return json.loads(header(content)["__metadata__"]["svdcompress-validation"])


def with_about(good: bytes) -> Any:
    """Returns a function that writes a value into the valid file as its metadata."""
    tensors = tensors_of(good)
    return lambda value: bytes_of(tensors, {"svdcompress-validation": json.dumps(value)})


# Archives


def make_archive(folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 300, bias=False), nn.ReLU(), nn.Linear(300, 3)).eval()
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight[torch.rand_like(layer.weight) < 0.7] = 0
    export_onnx(model, folder / "m.onnx", torch.zeros(2, 6))
    pack(folder / "m.onnx", folder / "m.svdc", "int8")
    content = lzma.decompress((folder / "m.svdc").read_bytes())
    tensors, metadata = dict(arrays_of(content)), header(content)["__metadata__"]
    if metadata["format"] == "1":  # for the case that deflated steps are shorter
        coder = zlib.compressobj(9, zlib.DEFLATED, -15)
        tensors["steps"] = np.frombuffer(coder.compress(tensors["steps"].tobytes()) + coder.flush(), np.uint8)
        content = save_arrays(tensors, {**metadata, "format": "2", "deflated": "steps"})
    (folder / "m.svdc").write_bytes(lzma.compress(content))
    (folder / "content").write_bytes(content)


def read_archive(folder: Path, rng: random.Random) -> None:
    """Read the archive itself and one with recompressed content, since changed bytes rarely pass xz's checksums."""
    written = unpack(folder / "m.svdc", folder / "back.onnx", most=2**24)
    (folder / "own.svdc").write_bytes(lzma.compress((folder / "content").read_bytes(), preset=0))
    other = unpack(folder / "own.svdc", folder / "own.onnx", most=2**24)
    if not 0 < written.bytes < 2**24 or not 0 < other.bytes < 2**24:
        raise Wrong("a file of another size than it may have")


def with_header(good: bytes) -> Any:
    """Returns a function that puts a header before the valid content."""
    rest = good[8 + struct.unpack("<Q", good[:8])[0] :]

    def write(value: Any) -> bytes:
        text = json.dumps(value).encode()
        return struct.pack("<Q", len(text)) + text + rest

    return write


# Data files


def make_cifar(folder: Path) -> None:
    for name, count in (("data_batch_1.bin", 9), ("test_batch.bin", 3)):
        records = np.random.default_rng(count).integers(0, 256, (count, 3073), dtype=np.uint8)
        records[:, 0] = np.arange(count) % 3
        (folder / name).write_bytes(records.tobytes())
    (folder / "batches.meta.txt").write_text("cat\ndog\nbird\n")


def read_cifar(folder: Path, rng: random.Random) -> None:
    checked(open_data(DataSection(name=f"cifar10:{folder}", validation=2), "classification"))


def make_tar(folder: Path) -> None:
    from PIL import Image

    for name in ("train.tar.gz", "test.tar.gz"):  # not compressed, so that changed bytes do not just fail a checksum
        with tarfile.open(folder / name, "w") as archive:
            for k in range(8):
                file = io.BytesIO()
                Image.fromarray(np.full((8, 8, 3), 20 * k, np.uint8)).save(file, "png")
                member = tarfile.TarInfo(f"set/{'ab'[k % 2]}/{k}.png")
                member.size = len(file.getvalue())
                archive.addfile(member, io.BytesIO(file.getvalue()))


def make_parquet(folder: Path) -> None:
    import pandas

    names = ["red" if i % 3 else "blue" for i in range(24)]
    frame = pandas.DataFrame({"a": np.arange(24) * 0.37, "colour": names, "label": np.arange(24) % 2})
    frame.to_parquet(folder / "t.parquet")


def read_parquet(folder: Path, rng: random.Random) -> None:
    place = f"parquet:{folder / 't.parquet'}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checked(open_data(DataSection(name=place, target="label", validation=2, test_share=0.2), "classification"))


def formats(folder: Path) -> dict[str, Format]:
    """All formats of this file, by name. folder: where valid files may be made."""
    run, archive = folder / "good-onnx", folder / "good-archive"
    for place, make in ((run, make_onnx), (archive, make_archive)):
        place.mkdir(parents=True)
        make(place)
    kept, content = (run / "validation.safetensors").read_bytes(), (archive / "content").read_bytes()
    metadata = (onnx_metadata, with_metadata((run / "model_mc.onnx").read_bytes()))
    return {
        form.name: form
        for form in (
            Format("archive", make_archive, read_archive, ("m.svdc", "content", "content", "content"),
                   {"content": (header, with_header(content))}),
            Format("onnx", make_onnx, read_onnx, ("model_mc.onnx",), {"model_mc.onnx": metadata}),
            Format("validation", make_small_run, read_validation, ("validation.safetensors",),
                   {"validation.safetensors": (about, with_about(kept))}),
            Format("cifar", make_cifar, read_cifar, ("data_batch_1.bin", "test_batch.bin", "batches.meta.txt")),
            Format("tar", make_tar, read_cifar, ("train.tar.gz", "test.tar.gz")),
            Format("parquet", make_parquet, read_parquet, ("t.parquet",)),
        )
    }  # fmt: skip
