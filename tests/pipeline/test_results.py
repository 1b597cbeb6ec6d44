"""What stages find becomes the report's keys."""

from __future__ import annotations

from dataclasses import fields

from svdcompress import report
from svdcompress.cost import Cost
from svdcompress.pipeline._results import RunResults, Side
from svdcompress.train import Reach


def test_what_no_stage_found_is_left_out():
    found = RunResults(seconds={"data": 1.5})
    assert found.to_dict() == {"seconds": {"data": 1.5}, "dense": {}, "sparse": {}, "warnings": []}
    found.notes.append("a note")
    found.changes, found.threads, found.failed["filters"] = {}, 0, "ValueError: x"  # found, if empty
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
