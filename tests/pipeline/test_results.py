"""What stages find becomes keys of the report."""

from __future__ import annotations

import copy
from dataclasses import fields

import torch
from torch import nn

import svdcompress as svdc
from svdcompress import report
from svdcompress.cost import Cost
from svdcompress.layers import variational_layers
from svdcompress.pipeline._figures import layer_rows
from svdcompress.pipeline._results import RunResults, Side
from svdcompress.train import Reach


def test_what_no_stage_found_is_left_out():
    found = RunResults(seconds={"data": 1.5})
    assert found.to_dict() == {"seconds": {"data": 1.5}, "dense": {}, "sparse": {}, "warnings": []}
    found.notes.append("a note")
    found.changes, found.threads, found.failed["filters"] = {}, 0, "ValueError: x"  # computed, even if empty
    assert {"notes": ["a note"], "changes": {}, "threads": 0, "failed": {"filters": "ValueError: x"}}.items() <= (
        found.to_dict().items()
    )


def test_the_parts_are_plain_and_the_report_reads_them():
    side = Side({"error": 2.0}, {"error": 3.0}, Cost(50, 40, 30, 20, 10), 1000, None, {"batch_1": 0.5})
    found = RunResults(dense=side, reach=Reach({"weight": [1.0, 2.0, 3.0]}, 9, 1e-3, 1.0, 1.0, 0.0, 0.5, None)).to_dict()
    assert list(found["dense"].items()) == [
        ("validation", {"error": 2.0}),
        ("metrics", {"error": 3.0}),
        ("parameters", 50),
        ("nonzero", 40),
        ("weights", 30),
        ("weights_nonzero", 20),
        ("macs", 10),
        ("bytes", 1000),
        ("latency_ms", {"batch_1": 0.5}),
    ]
    assert found["reach"]["within"] == 0.5
    assert report.Results.model_validate(found).dense.parameters == 50


def test_a_whole_run_reports_its_keys_in_order(tiny_run):
    own = [one.name for one in fields(RunResults)]
    found = [name for name in tiny_run[1] if name in own]
    assert found == sorted(found, key=own.index)
    assert {"seconds", "reach", "pruning", "dense", "sparse", "layers", "parity", "uncertainty", "verified"} <= set(found)


def test_the_report_has_the_sides_of_transposed_and_depthwise_convolutions_as_they_were():
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2))
    x = torch.randn(2, 3, 6, 6)
    model = svdc.convert(copy.deepcopy(dense))
    shapes = {name: tuple(layer.weight.shape) for name, layer in variational_layers(model)}
    with torch.no_grad():
        model[0].weight[:3], model[0].bias[:3] = 0, 0
        model[2].weight[:3], model[2].bias[:3] = 0, 0
        model[4].weight[:3] = 0
    masks = svdc.relevance(model)
    small = svdc.prune(model, x, masks=masks)
    sides = {row["name"]: (row["inputs_before"], row["outputs_before"]) for row in layer_rows(shapes, masks, dense, small, x)}
    assert sides == {"0": (3, 8), "2": (8, 8), "4": (8, 4)} and small[4].weight.shape[0] == 5
