"""Bars on a terminal, and lines without one."""

import io
import re
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from svdcompress.train import Bars, _progress
from svdcompress.train._progress import _short

ROW = {"epoch": 3, "loss": 1.25, "nll": 0.5, "kl": 12345.6, "beta": 0.5, "sparsity": 0.975, "val_error": 2.5}


def shown(width, terminal=True, row=ROW, stage="train", epochs=10):
    file = io.StringIO()
    with Bars(Console(file=file, width=width, force_terminal=terminal, color_system=None)) as bars:
        bars.start(stage, epochs)
        bars.step(2.5)
        bars.epoch({**row, "stage": stage})
        with bars.working("export"):
            pass
    return file.getvalue()


@pytest.mark.parametrize("width", [110, 140])
def test_all_figures_stand_beside_a_bar(width):
    text = shown(width)
    for figure in ("train", "3/10", "loss 1.250", "NLL 0.5000", "KL 12,346", "beta 0.50", "sparse 97.5%", "val 2.50%", "━"):
        assert figure in text
    assert "export" in text and "…" not in text


@pytest.mark.parametrize(("width", "gone"), [(80, ("KL", "beta")), (100, ())])
def test_a_bar_the_time_and_the_chief_figures_fit_eighty_columns(width, gone):
    text = shown(width)
    figures = {"loss": "1.25", "NLL": "0.500", "KL": "12.3k", "beta": "0.5", "sparse": "97.5%", "val": "2.50%"}
    for name, value in figures.items():
        assert (f" {name} " in text) == (name not in gone) and (name in gone or f"{name} {value}" in text)
    assert "train" in text and "3/10" in text and "━" in text and "0:00" in text and "…" not in text


def test_long_numbers_push_out_further_figures():
    row = {"epoch": 100, "loss": 12.34, "nll": 0.1234, "kl": 1234567.0, "beta": 0.0012, "sparsity": 1.0, "val_error": 89.9}
    text = shown(80, row=row, stage="recover", epochs=100)
    assert "100/100 loss 12.3 sparse 100.0% val 89.90%" in text and "NLL" not in text and "…" not in text


def test_what_is_done_has_a_check_mark_and_its_time_and_the_rest_what_is_left(monkeypatch):
    file, now = io.StringIO(), [50.0]
    with Bars(Console(file=file, width=80, force_terminal=True, color_system=None)) as bars:
        monkeypatch.setattr(bars._progress, "get_time", lambda: now[0])
        bars.start("dense", 2)
        for epoch in (1, 2):
            now[0] += 40
            bars.epoch({**ROW, "epoch": epoch, "stage": "dense"})
        bars.start("train", 10)
        for epoch in (1, 2):
            now[0] += 30
            bars.epoch({**ROW, "epoch": epoch, "stage": "train"})
        with bars.working("export"):
            now[0] += 7
            bars._progress.refresh()
            going_on = file.getvalue()[-400:]
    lines = re.sub(r"\x1b\[[?\d]*\w", "\n", file.getvalue()).splitlines()
    dense, train = (next(line for line in reversed(lines) if name in line) for name in ("dense", "train"))
    assert dense.startswith("✓ dense") and dense.rstrip().endswith(" 1:20")
    assert "✓ train" not in file.getvalue() and re.search(r" 1:0\d<4:00", train), train  # 8 epochs of 30 s are left
    assert re.search(r"export.* 0:07", going_on) and "✓ export" not in going_on


@pytest.mark.parametrize(("passed", "left", "said"), [(59.6, 5, "1:00<0:05"), (60, 7300, "0h01<2h01"), (3725, 30, "1h02<0h00")])
def test_hours_take_no_more_room_than_minutes(passed, left, said):
    task = SimpleNamespace(finished=False, finished_time=None, elapsed=passed, total=9, time_remaining=left)
    assert _progress.Passed().render(task).plain == said


def test_numbers_are_short():
    numbers = (0.0, 0.1234, 0.9996, 1.234, 9.996, 12.34, 99.95, 99.96, 123.4, 999.6, 12345.6, 2.5e8, 7e12)
    expected = ["0.000", "0.123", "1.00", "1.23", "10.0", "12.3", "100", "100", "123", "1.00k", "12.3k", "250M", "7000G"]
    assert [_short(number) for number in numbers] == expected


class Clock:
    """Time passes only when a test says so."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(_progress.time, "monotonic", lambda: self.now)


def lines(monkeypatch, epochs, steps, seconds, done=0):
    """What a stage prints without a terminal, given its number of steps per epoch and the seconds per step."""
    clock, file = Clock(monkeypatch), io.StringIO()
    with Bars(Console(file=file, width=80, force_terminal=False)) as bars:
        bars.start("train", epochs, done)
        for epoch in range(done, epochs):
            for step in range(steps):
                clock.now += seconds
                bars.step(epoch + step / steps, lambda: 2.345)
            bars.epoch({**ROW, "epoch": epoch + 1, "stage": "train"})
    return file.getvalue().splitlines()


def test_without_a_terminal_there_is_a_line_each_some_seconds(monkeypatch):
    found = lines(monkeypatch, epochs=4, steps=30, seconds=1.0)
    assert len(found) == 13  # every 120 seconds, and at the end
    assert found[0] == "train       1/4   loss 2.345 2:03 left"  # no epoch has ended: the loss of the last batch
    assert found[4] == "train       2/4   loss 1.250 NLL 0.5000 KL 12,346 beta 0.50 sparse 97.5% val 2.50% 1:12 left"
    assert found[-1] == "train       4/4   loss 1.250 NLL 0.5000 KL 12,346 beta 0.50 sparse 97.5% val 2.50% in 2:00"


def test_the_time_left_of_a_stage_that_goes_on(monkeypatch):
    found = lines(monkeypatch, epochs=4, steps=30, seconds=1.0, done=2)
    assert found[1].endswith(" 0:43 left") and found[-1].endswith(" in 1:00")


def test_a_quick_stage_has_one_line_and_a_quiet_one_none(monkeypatch):
    assert len(lines(monkeypatch, epochs=3, steps=5, seconds=0.1)) == 1
    file = io.StringIO()
    with Bars(Console(file=file), quiet=True) as bars:
        bars.start("train", 1)
        bars.epoch({**ROW, "epoch": 1})
    assert file.getvalue() == ""


def test_a_long_stage_without_epochs_says_that_it_goes_on(monkeypatch):
    monkeypatch.setattr(_progress, "LINE_EVERY", 0.05)
    file = io.StringIO()
    with Bars(Console(file=file, force_terminal=False)) as bars, bars.working("evaluate"):
        time.sleep(0.3)
    assert file.getvalue().startswith("evaluate  0:00 so far\n")


@pytest.mark.parametrize("stays", [True, False])
def test_what_is_done_within_a_stage_leaves_no_bar_where_it_is_not_to_stay(monkeypatch, stays):
    monkeypatch.setattr(_progress, "LINE_EVERY", 0.05)
    file = io.StringIO()
    with Bars(Console(file=file, width=80, force_terminal=True, color_system=None)) as bars:
        with bars.working("choosing", stays=stays):
            bars._progress.refresh()
            going_on = file.getvalue()
        assert [task.description for task in bars._progress.tasks] == ["choosing"] * stays
        bars.start("trial 3", 2)
    assert "choosing" in going_on and "…" not in going_on
    plain = io.StringIO()
    with Bars(Console(file=plain, force_terminal=False)) as bars, bars.working("measuring", stays=stays):
        time.sleep(0.3)
    assert "measuring 0:00 so far" in plain.getvalue()
