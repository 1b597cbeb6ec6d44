"""A table that cannot be made at the end of a run is a figure that failed: all files are there, so the command succeeds."""

import pytest
from typer.testing import CliRunner

from svdcompress import pipeline, train
from svdcompress.cli import app

TRIAL = {"number": 1, "costs": {"macs": 3}, "error": 2.0, "drop": None, "upper": 1.0, "met": True}
SEARCH = {"objective": "macs", "dense": {"error": 2.0, "costs": {"macs": 9}}, "trials": [TRIAL], "chosen": 1}


@pytest.mark.parametrize("more", [[], ["--debug"]])
def test_a_table_that_fails_is_a_warning(tmp_path, monkeypatch, more):
    monkeypatch.setattr(pipeline, "run", lambda *args, **more: {"task": "classification", "search": SEARCH})
    monkeypatch.setattr(train, "leave", lambda: None)
    words = ["sparsify", "digits", "--goal", "macs=0.3", "--out", str(tmp_path / "run"), *more]
    found = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    text = " ".join(found.output.split())
    assert found.exit_code == 0, text
    assert "warning: no table (TypeError: unsupported operand" in text and "next: open" in text
    assert f"; the files in {tmp_path / 'run'} are not affected" in text
    assert ("Traceback" in text) is bool(more)
