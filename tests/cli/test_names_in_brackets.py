"""Names of folders and files are shown as they are: rich's markup would take what stands in brackets for a style."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from svdcompress import report
from svdcompress.cli import app


def svdc(*arguments):
    """The output of a command without line ends, which may come within a name."""
    result = CliRunner().invoke(app, [str(each) for each in arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output.replace("\n", "")


@pytest.fixture
def runs(tiny_run, tmp_path, monkeypatch):
    """The names of two copies of a run, relative to the working folder."""
    monkeypatch.chdir(tmp_path)
    names = ["a[/b]/run[v1]", "a[/b]/run[v2]"]
    for name in names:
        shutil.copytree(tiny_run[0], name)
    return names


def test_every_command_names_what_it_used_and_wrote(runs):
    assert all(name in svdc("compare", *runs) for name in runs)
    assert "a[/b]/c[1].png" in svdc("compare", *runs, "--picture", "a[/b]/c[1].png")
    shown = svdc("report", runs[0])
    assert "a[/b]/run[v1]" in shown and shown.lstrip().startswith(json.loads(Path(runs[0], "report.json").read_text())["name"])
    assert "as stored" in svdc("verify", runs[0])
    assert "p[x].svdc: " in svdc("pack", runs[0], "--out", "p[x].svdc")
    assert "back[x].onnx: " in svdc("unpack", "p[x].svdc", "--out", "back[x].onnx")
    assert "m[x].onnx: " in svdc("export", runs[0], "--out", "m[x].onnx")
    assert "r[x].yaml: " in svdc("recipes", "copy", "digits", "r[x].yaml")


def test_predictions_are_named(runs):
    from svdcompress.pipeline import open_run

    x = next(iter(open_run(runs[0]).data_as_read.test.batches(3)))[0]
    np.save("x[1].npy", np.asarray(x))
    assert "p[x].csv: 3 predictions" in svdc("predict", runs[0], "--input", "x[1].npy", "--out", "p[x].csv")


def test_a_summary_is_headed_by_the_name_of_its_run(tiny_run):
    for results in ({**tiny_run[1], "name": "run[/v1]"}, {"name": "run[/v1]"}):
        shown = io.StringIO()
        report.table(results, Console(file=shown, width=200))
        assert shown.getvalue().lstrip().startswith("run[/v1]")
