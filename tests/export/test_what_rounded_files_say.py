"""Metadata of rounded files: anything taken from the float32 file is marked as such."""

import pytest
import torch
from torch import nn

from svdcompress.export import Int8, export_onnx, pack, read_metadata, unpack, write_compact, write_few_bits, write_half

PROMISES = {"coverage": {"coverage": 0.9, "limit": 0.5}, "answer_above": {"accuracy": 0.99, "threshold": 0.7}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    torch.manual_seed(0)
    metadata = {"task": "classification", "classes": ["a", "b"], "metrics": {"error": 2.2}, **PROMISES}
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)).eval()
    return export_onnx(model, tmp_path_factory.mktemp("whole") / "model.onnx", torch.randn(2, 16), metadata=metadata).path


def packed(precision, **more):
    def write(src, dst):
        pack(src, dst.with_suffix(".svdc"), precision, **more)
        return unpack(dst.with_suffix(".svdc"), dst)

    return write


def eight(src, dst):
    return Int8(src, [{"input": torch.randn(32, 16).numpy()}]).write(dst)


@pytest.mark.parametrize(
    ("write", "precision"),
    [
        (eight, "int8"),
        (write_few_bits, "int4"),
        (write_half, "float16"),
        (packed("int8"), "int8"),
        (packed("float16"), "float16"),
        (packed("int8", bits={"0.weight": 5}), "int5"),
    ],
)
def test_rounded_numbers_have_no_figures_of_the_others(whole, tmp_path, write, precision):
    written = write(whole, tmp_path / "small.onnx")
    found = read_metadata(written.path)
    assert written.metadata == found and found["precision"] == precision and "metrics" not in found
    assert {name: found[name] for name in PROMISES} == {name: {**value, "of": "float32"} for name, value in PROMISES.items()}
    rest = {name: value for name, value in found.items() if name not in ("precision", *PROMISES)}
    assert rest == {name: value for name, value in read_metadata(whole).items() if name not in ("metrics", *PROMISES)}


@pytest.mark.parametrize("write", [write_compact, packed("float32")])
def test_the_same_numbers_keep_what_is_said_of_them(whole, tmp_path, write):
    assert read_metadata(write(whole, tmp_path / "same.onnx").path) == read_metadata(whole)
