"""Bars on a terminal, and silence without one."""

import io

import pytest
from rich.console import Console

from svdcompress.train import Bars

ROW = {"epoch": 3, "loss": 1.25, "nll": 0.5, "kl": 12345.6, "beta": 0.5, "sparsity": 0.975, "val_error": 2.5}


def shown(width, terminal=True):
    file = io.StringIO()
    with Bars(Console(file=file, width=width, force_terminal=terminal, color_system=None)) as bars:
        bars.start("train", 10)
        bars.step(2.5)
        bars.epoch(ROW)
        with bars.working("export"):
            pass
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 100, 140])
def test_all_figures_fit_the_terminal(width):
    text = shown(width)
    for figure in ("train", "3/10", "NLL 0.5000", "KL 12,346", "beta 0.50", "sparse 97.5%", "val 2.50%"):
        assert figure in text
    assert ("loss 1.250" in text) == (width > 80)
    assert "export" in text and "…" not in text


def test_nothing_is_written_without_a_terminal():
    assert shown(100, terminal=False).strip() == ""
