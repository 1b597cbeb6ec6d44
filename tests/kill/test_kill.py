"""The harness of `make test-kill`: that it detects differences, and a few kills in every run of the slow tests."""

from __future__ import annotations

import copy
import json
import random
import shutil

import pytest
from killing import COMPARED, VARIANTS, Whole, difference, differing, moments, one, recipe_of, undisturbed, warm


def test_differences_of_reports_are_told_but_for_times():
    left = {"seconds": {"train": 1.0}, "sparse": {"nll": 0.5, "latency_ms": 3.0}, "history": [{"loss": 1.0, "epoch": 1}]}
    right = copy.deepcopy(left)
    right["seconds"]["train"], right["sparse"]["latency_ms"] = 2.0, 4.0
    assert differing(left, right) == []
    right["history"][0]["loss"] = 1.0000001
    assert differing(left, right) == ["report.json.history[0].loss: 1.0 and 1.0000001"]
    del right["sparse"]["nll"]
    assert differing(left, right)[0] == "report.json.sparse: other keys ['nll']"
    assert differing([1], [1, 2]) and differing(1, 1.0) and differing(True, 1) and not differing(None, None)


def test_differences_of_folders_are_told(tmp_path):
    left, right = tmp_path / "left", tmp_path / "right"
    left.mkdir()
    for name in COMPARED:
        (left / name).write_text(name)
    (left / "report.json").write_text(json.dumps({"a": 1}))
    shutil.copytree(left, right)
    assert difference(left, right) == ""
    for name in COMPARED:
        (right / name).write_text("other")
        assert difference(left, right) == f"{name} holds other bytes"
        (right / name).write_text(name)
    (right / ".left.svdc-tmp").write_text("")
    assert difference(left, right) == "other files: ['.left.svdc-tmp']"


def test_moments_are_of_every_kind_and_follow_from_the_seed():
    whole = Whole(recipe_of("plain"), None, {"start": 0.1, "dense": 1.0, "train": 2.0}, 90, 10.0)
    found = [moment for seed in range(300) for moment in moments(whole, random.Random(seed), command=False)]
    assert {moment.signal for moment in found} == {"KILL", "TERM", "INT"} and any(moment.twice for moment in found)
    assert sum(moment.signal == "KILL" for moment in found) > len(found) / 2
    assert {moment.stage for moment in found} == {"", "start", "dense", "train"}
    assert all(1 <= moment.change <= 90 if not moment.stage else 0 <= moment.later <= 2 for moment in found)
    counts = {len(moments(whole, random.Random(seed), False)) for seed in range(300)}
    assert counts == {1, 2, 3}
    assert moments(whole, random.Random(5), False) == moments(whole, random.Random(5), False)
    assert all(moment.stage == "start" and moment.later <= 15 for moment in moments(whole, random.Random(1), command=True))


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    """Makes this process import and prepare what runs need, so that its forks are quick."""
    warm(tmp_path_factory.mktemp("warm"))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_killed_runs_end_as_the_undisturbed_one(variant, warmed, tmp_path):
    whole = undisturbed(variant, tmp_path)
    for number in range(2):
        record = one(10 * list(VARIANTS).index(variant) + number, variant, whole, tmp_path, seed=1)
        assert record.fault == "" and record.kills
        print(variant, number, [(kill["signal"], kill["stage"] or kill["change"], kill["resuming"]) for kill in record.kills])
    (tmp_path / "killed" / "run" / "model.onnx").write_bytes(b"other")
    assert difference(whole.folder, tmp_path / "killed" / "run") == "model.onnx holds other bytes"
