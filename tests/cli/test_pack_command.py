"""`svdc pack` and `svdc unpack`: the round trip, the messages, and what is refused."""

import json

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from typer.testing import CliRunner

from svdcompress.cli._app import app


def svdc(*arguments, code=0):
    """The output of a command, joined into one line."""
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def test_there_and_back(tiny_run, tmp_path):
    folder, _ = tiny_run
    archive, back = tmp_path / "a.svdc", tmp_path / "back.onnx"
    text = svdc("pack", folder, "--out", archive)
    assert f"{archive.stat().st_size:,} bytes" in text and "100.00% of the answers as before" in text
    svdc("unpack", archive, "--out", back)
    ours, theirs = (onnx.load(str(path)).graph.initializer for path in (back, folder / "model.onnx"))
    for a, b in zip(ours, theirs, strict=True):
        assert a.name == b.name and np.array_equal(numpy_helper.to_array(a), numpy_helper.to_array(b))
    svdc("unpack", archive, "--out", tmp_path / "compact.onnx", "--compact")
    assert (tmp_path / "compact.onnx").stat().st_size <= back.stat().st_size
    assert "exists already" in svdc("pack", folder, "--out", archive, code=7)
    assert "exists already" in svdc("unpack", archive, "--out", back, code=7)
    assert "are allowed (--most)" in svdc("unpack", archive, "--out", tmp_path / "b.onnx", "--most", "0", code=5)


def test_fewer_bits_are_fewer_bytes(tiny_run, tmp_path):
    folder, _ = tiny_run
    sizes = {}
    for precision in ("float32", "float16", "int8", "int4", "posterior", "auto"):
        told = json.loads(svdc("pack", folder, "--out", tmp_path / precision, "--precision", precision, "--json"))
        sizes[precision] = told["bytes"]
        assert told["bytes"] == (tmp_path / precision).stat().st_size
        assert told["ratio"] == pytest.approx((folder / "dense.onnx").stat().st_size / told["bytes"])
        assert set(told["metrics"]) == {"error", "nll"} and 0 <= told["agreement"] <= 1
        assert (told["bits"] != {}) == (precision in ("posterior", "auto"))
    assert sizes["float32"] > sizes["float16"] > sizes["int8"] > sizes["int4"]
    assert sizes["auto"] <= sizes["int8"]


def test_bits_that_no_weight_of_the_file_gets_are_said(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr("svdcompress.pipeline.fewest_bits", lambda opened: {"nosuch": 3})
    text = svdc("pack", tiny_run[0], "--out", tmp_path / "a", "--precision", "auto")
    assert "in eight bits: nosuch.weight, for which model.onnx has no weight of that name" in text


def test_what_cannot_be_is_said(tiny_run, tmp_path):
    folder, _ = tiny_run
    text = svdc("pack", folder, "--out", tmp_path / "a", "--precision", "int3", code=2)
    assert "'int3' is unknown; one of float32, float16, int8, int4, posterior, auto" in text
    assert "no such file" in svdc("pack", tmp_path, "--out", tmp_path / "a", code=5)
    (tmp_path / "bad.svdc").write_bytes(b"no")
    assert "not an svdc archive" in svdc("unpack", tmp_path / "bad.svdc", "--out", tmp_path / "b.onnx", code=5)
    assert not (tmp_path / "b.onnx").exists() and not (tmp_path / "a").exists()
