"""A goal in bytes holds for the delivered file, including its metadata and promises."""

import csv

import pytest
import torch

from svdcompress.export import read_metadata
from svdcompress.pipeline import chosen_by_time, run
from svdcompress.pipeline._outcome import larger_file
from svdcompress.pipeline._results import RunResults, Side
from svdcompress.recipe import load_recipe

QUICK = [
    *[
        "model=mlp",
        "model.args={sizes: [40, 64, 3]}",
        "dense.epochs=3",
        "train.epochs=2",
        "recover.epochs=1",
        "search.levels=1",
    ],
    *["search.trials=1", "uncertainty.samples=0", "report.html=false", "export.monte_carlo=false", "export.compact=false"],
    *["convert.share=input", "device=cpu", "prune.remove_inputs=true"],
]
PROMISES = ["calibrate.coverage=0.9", "calibrate.answer_above=0.6", "export.sets=true"]


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Columns whose names take more than half of a small file."""
    x = torch.randn(900, 40, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] + x[:, 1] > 0).long() + (x[:, 2] > 0.5).long()
    kinds = ("low quality", "middle quality", "high quality")
    with (tmp_path / "table.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow([*(f"measurement_of_the_sensor_with_number_{column}" for column in range(40)), "kind"])
        rows.writerows([*(f"{value:.4f}" for value in row), kinds[kind]] for row, kind in zip(x.tolist(), y, strict=True))
    monkeypatch.chdir(tmp_path)
    return ["data=csv:table.csv", "data.target=kind"]


@pytest.mark.parametrize("more", [[], PROMISES])
def test_a_goal_in_bytes_holds_for_the_file_that_is_delivered(table, tmp_path, monkeypatch, more):
    def latencies(files, *given, **options):  # the form that reads all inputs is faster, but larger
        return {name: dict.fromkeys(("batch_1", "batch_128"), 1.0 if name == "all" else 2.0) for name in files}

    monkeypatch.setattr("svdcompress.cost.latencies", latencies)
    results = run(load_recipe(None, [*table, *QUICK, *more, "search.goal='bytes=9kB'"]), tmp_path / "run")
    found, file = results["search"], tmp_path / "run" / "model.onnx"
    size = file.stat().st_size
    assert found["dense"]["costs"]["bytes"] == (tmp_path / "run" / "dense.onnx").stat().st_size  # the base for goals such as 2x
    assert results["pruning"]["inputs_gathered"] is True
    assert results["sparse"]["bytes"] == size <= 1.02 * 9000 and found["reached"] is True
    trial = next(trial for trial in found["trials"] if trial["number"] == found["chosen"])
    assert trial["costs"]["bytes"] == pytest.approx(size, abs=250)  # differs by an unused temperature and by digits
    assert len(str(read_metadata(file)["preprocessing"])) > 1500
    assert ("coverage" in read_metadata(file)) is bool(more)


def test_where_bytes_are_asked_for_the_smaller_of_two_files_is_taken():
    assert not chosen_by_time(load_recipe(None, ["search.goal='bytes=9kB'"]))
    assert not chosen_by_time(load_recipe(None, ["search.max_drop=1", "search.objective=bytes"]))
    assert chosen_by_time(load_recipe(None, ["search.objective=bytes"]))  # without a search there is no goal
    assert chosen_by_time(load_recipe(None, ["search.goal='macs=2x'"]))
    assert not chosen_by_time(load_recipe(None, ["report.latency=false"]))


def test_a_file_that_became_larger_than_the_goal_is_told():
    trials = [{"number": 1, "costs": {"bytes": 7900.0}}]
    dense = {"costs": {"bytes": 18_000.0}}
    found = {"objective": "bytes", "goal": "bytes=8kB", "reached": True, "chosen": 1, "trials": trials, "dense": dense}
    results = RunResults(search={**found, "notes": ["before"]}, sparse=Side(bytes=9300))
    (line,) = larger_file(results)
    assert "9,300 bytes against 8,000" in line and "trial 1 (7,900)" in line and "Ask for 1,300 bytes less" in line
    assert results.search["reached"] is False and results.search["notes"] == ["before", line]
    assert larger_file(results) == []  # reported once
    assert larger_file(RunResults(search=found, sparse=Side(bytes=8100))) == []  # within the tolerance for a reached goal
    assert larger_file(RunResults(search={**found, "goal": "bytes=2x"}, sparse=Side(bytes=9100))) == []
    assert larger_file(RunResults(search={**found, "objective": "macs"}, sparse=Side(bytes=9300))) == []
    assert larger_file(RunResults(sparse=Side(bytes=9300))) == []
