"""Bars on a terminal, and silence without one."""

import io

import pytest
from rich.console import Console

from svdcompress.train import Bars
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


@pytest.mark.parametrize("width", [100, 140])
def test_all_figures_stand_beside_a_bar(width):
    text = shown(width)
    for figure in ("train", "3/10", "loss 1.250", "NLL 0.5000", "KL 12,346", "beta 0.50", "sparse 97.5%", "val 2.50%", "━"):
        assert figure in text
    assert "export" in text and "…" not in text


@pytest.mark.parametrize("width", [80, 99])
def test_all_figures_fit_eighty_columns(width):
    text = shown(width)
    for figure in ("train 3/10", "loss 1.25", "NLL 0.500", "KL 12.3k", "beta 0.5", "sparse 97.5%", "val 2.50%"):
        assert figure in text
    assert "export" in text and "…" not in text


def test_long_numbers_push_out_the_validation_figure_alone():
    row = {"epoch": 100, "loss": 12.34, "nll": 0.1234, "kl": 1234567.0, "beta": 0.0012, "sparsity": 1.0, "val_error": 89.9}
    text = shown(80, row=row, stage="recover", epochs=100)
    assert "recover 100/100 loss 12.3 NLL 0.123 KL 1.23M beta 0.0012 sparse 100.0%" in text
    assert "val" not in text and "…" not in text


def test_numbers_are_short():
    numbers = (0.0, 0.1234, 0.9996, 1.234, 9.996, 12.34, 99.96, 123.4, 999.6, 12345.6, 2.5e8, 7e12)
    expected = ["0.000", "0.123", "1.00", "1.23", "10.0", "12.3", "100", "123", "1.00k", "12.3k", "250M", "7000G"]
    assert [_short(number) for number in numbers] == expected


def test_nothing_is_written_without_a_terminal():
    assert shown(100, terminal=False).strip() == ""
