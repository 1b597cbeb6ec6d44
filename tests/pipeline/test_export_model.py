"""The deterministic file of a run, including that of a model that reads only some of its inputs."""

import onnx
import pytest
import torch
from torch import nn

from svdcompress import convert
from svdcompress.export import read_metadata
from svdcompress.pipeline import export_model, file_metadata
from svdcompress.pipeline._select import Select


@pytest.mark.parametrize(("timed", "all_inputs", "gathers"), [(True, 1.0, False), (True, 9.0, True), (False, 1.0, True)])
def test_the_file_of_a_model_that_reads_some_inputs(tmp_path, monkeypatch, timed, all_inputs, gathers):
    small = convert(nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))).eval()
    times = {"gather": {"batch_1": 2.0}, "all": {"batch_1": all_inputs}}
    monkeypatch.setattr("svdcompress.cost.latencies", lambda paths, feed: times)
    path, x = tmp_path / "model.onnx", torch.randn(2, 8)
    file, gathered = export_model(
        Select(small, [6, 0, 3], 1), path, x, lambda file: None, opset=20, metadata={"task": "regression"}, timed=timed
    )
    assert gathered is gathers and file.path == path
    assert any(node.op_type == "Gather" for node in onnx.load(path).graph.node) is gathers
    assert read_metadata(path)["task"] == "regression"


def test_the_file_of_a_model_that_reads_all(tmp_path):
    file, gathered = export_model(nn.Linear(3, 2), tmp_path / "a.onnx", torch.randn(2, 3), None, opset=20, metadata={})
    assert gathered is None and file.path.is_file()


def test_metadata_has_the_compression_where_the_figures_are_known():
    results = {"dense": {"parameters": 10}, "sparse": {"parameters": 5, "metrics": {"error": 1.0}}}
    found = file_metadata(results, {"input_shape": [3]}, ["a", "b"], "classification")
    assert found["compression"] == {"parameters": 2.0} and found["metrics"] == {"error": 1.0}
    figures = {"bytes": 9, "latency_ms": {"batch_1": 2.0}}  # of one file: not of any other that has this metadata
    results = {name: {**one, **figures} for name, one in results.items()} | {
        "compression": {"bytes": 1.0, "latency": {"batch_1": 1.0}}
    }
    assert file_metadata(results, {}, None, "classification")["compression"] == {"parameters": 2.0}
    assert file_metadata({}, {}, None, "regression") == {"preprocessing": {}, "classes": None, "task": "regression"}
