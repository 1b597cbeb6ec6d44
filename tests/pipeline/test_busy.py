"""Timings taken while other work runs are reported if the goal is in milliseconds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from svdcompress.pipeline import _busy, _search_trials
from svdcompress.pipeline._busy import Load, watched
from svdcompress.pipeline._search_kept import Kept
from svdcompress.pipeline._search_trials import Trials
from svdcompress.recipe import parse_goal

linux = pytest.mark.skipif(not _busy.STAT.is_file(), reason="no /proc/stat")


@linux
def test_what_other_programs_use_is_seen_and_what_this_one_uses_is_not() -> None:
    cores = os.cpu_count() or 1
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * cores)]
    try:
        time.sleep(0.5)
        with watched() as load:
            time.sleep(1.0)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert load.cores == cores and load.others is not None
    assert load.others > 0.7 * cores and load.crowded(1)
    with watched() as mine:
        before = time.process_time()
        while time.process_time() - before < 0.5:
            pass
    with watched() as idle:
        time.sleep(0.5)
    assert mine.others is not None and idle.others is not None
    assert mine.others < idle.others + 0.6  # it would be one core more if its own work counted as another's


def test_columns_that_are_work_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns: user nice system idle iowait irq softirq steal guest guest_nice, in ticks; user already includes guest."""
    stat, ticks = tmp_path / "stat", os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(_busy, "STAT", stat)
    clock = iter([100.0, 104.0])
    monkeypatch.setattr(_busy.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(_busy, "_own", iter([7.0, 9.0]).__next__)
    columns = [10, 20, 30, 1000, 1000, 40, 50, 60, 1000, 1000]
    stat.write_text("cpu  " + " ".join(str(ticks * c) for c in columns) + "\ncpu0 1 2 3\n")
    with watched() as load:
        columns = [11, 22, 31, 9000, 9000, 42, 51, 61, 9000, 9000]  # 8 more, of which 2 are ours, in 4 seconds
        stat.write_text("cpu  " + " ".join(str(ticks * c) for c in columns) + "\ncpu0 1 2 3\n")
    assert load.others == pytest.approx(1.5)


@pytest.mark.parametrize("text", [None, "", "cpu 1 2\n", "intr 1 2 3 4 5 6 7 8 9\n", "cpu a b c d e f g h\n"])
def test_a_system_that_does_not_tell_is_not_crowded(text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_busy, "STAT", tmp_path / "stat")
    if text is not None:
        (tmp_path / "stat").write_text(text)
    with watched() as load:
        pass
    assert load.others is None and not load.crowded(1)


def test_work_is_crowded_where_too_few_cores_are_left() -> None:
    assert Load(2, 1.5).crowded(1) and not Load(2, 1.2).crowded(1) and Load(2, 1.2).crowded(2)
    assert not Load(64, 40.0).crowded(1) and Load(1, 0.5).crowded(1)


@pytest.mark.parametrize(
    ("goal", "how", "others", "told"),
    [
        ("latency=15ms", {"command": "./ask.sh"}, 1.9, True),
        ("latency=15ms", {"batches": [1]}, 1.9, True),
        ("latency=15ms", {"batches": [1]}, 0.4, False),
        ("latency=2x", {"batches": [1]}, 1.9, False),  # measured in turns with the dense model
        ("macs=1e6", {}, 1.9, False),
    ],
)
def test_a_search_for_milliseconds_tells_a_busy_machine(
    goal: str, how: dict[str, Any], others: float, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    trials: Any = object.__new__(Trials)
    parsed = parse_goal(goal)
    monkeypatch.setattr(Trials, "_working", lambda self, what: watched())

    class Busy:
        def __enter__(self) -> Load:
            return Load(2, others)

        def __exit__(self, *error: object) -> None:
            return None

    monkeypatch.setattr(_search_trials, "watched", Busy)
    monkeypatch.setattr(_search_trials, "replace", lambda measure, **more: measure)
    costs = {"dense": {"latency": 41.234, "macs": 9.0, "parameters": 3.0}}
    trials.measure = SimpleNamespace(name=parsed.measure, how=lambda: how, of=lambda dense: costs)
    trials.goal, trials.context, trials.dense = parsed, SimpleNamespace(warn=warned.append), SimpleNamespace(model=None)
    trials.kept = Kept(Path("nowhere"))
    trials._dense_costs()
    assert len(warned) == told
    if told:
        assert "41.23 ms" in warned[0] and "1.9 of 2 cores" in warned[0] and "--goal latency=2x" in warned[0]
        assert ("unless ./ask.sh measures elsewhere" in warned[0]) == ("command" in how)
    trials._dense_costs()  # known from here on
    assert len(warned) == told
    assert trials.kept.doubted == warned  # stored for the report of a later run
