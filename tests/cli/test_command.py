"""Options as users type them: -h, recipe fields as options, misspelled recipes, wrong shapes, and the hints after a run."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from svdcompress.cli import app
from svdcompress.cli._command import fields_named
from svdcompress.cli._sparsify import next_steps
from svdcompress.errors import cause
from svdcompress.recipe import parse_recipe


def output(*args, code=0, columns="200"):
    result = CliRunner().invoke(app, list(args), env={"COLUMNS": columns})
    assert result.exit_code == code, result.output
    return " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("command", [[], ["sparsify"], ["inspect"], ["recipes"], ["recipes", "copy"], ["predict"]], ids=str)
def test_h_is_help_and_flags_have_no_type(command):
    text = output(*command, "-h")
    assert text == output(*command, "--help")
    assert "Usage: svdc" in text and "<bool>" not in text


def test_exit_codes_are_a_table_that_fits_a_screen():
    lines = CliRunner().invoke(app, ["-h"], env={"COLUMNS": "80"}).output.splitlines()
    start = next(number for number, line in enumerate(lines) if "Exit codes" in line)
    codes = [line.split()[0] for line in lines[start + 1 :] if line.strip()]
    assert codes == [*map(str, range(14)), "130"]  # one line each, none wrapped


def test_a_field_of_the_recipe_typed_as_an_option_leads_to_set():
    text = output("sparsify", "digits", "--lr", "0.1", code=2)
    assert "--set train.lr=VALUE or --set dense.lr=VALUE" in text
    assert "--set convert.share=VALUE" in output("inspect", "digits", "--share", "input", code=2)
    assert "--set" not in output("sparsify", "digits", "--nonsense", code=2).partition("Error")[2]
    assert "--set" not in output("predict", "runs/x", "--lr", "1", code=2).partition("Error")[2]  # predict has no recipe fields
    assert fields_named("--log-sigma2") == ["convert.log_sigma2"] and fields_named("--nonsense") == []


def test_a_misspelled_recipe_is_guessed():
    assert "did you mean digits?" in output("sparsify", "digts", code=3)
    assert "there are: bayes-linear, co2, digits" in output("sparsify", "qqqqqq", code=3)


def test_shapes_that_do_not_match_are_said_in_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text("from torch import nn\n\n\ndef make():\n    return nn.Linear(8, 3)\n")
    np.savez("data.npz", x=np.zeros((600, 4), np.float32), y=np.arange(600) % 3)
    text = output("inspect", "--model", "./model.py:make", "--data", "npz:data.npz", code=4)
    assert "a Linear layer takes 8 features and got 4" in text and "mat1" not in text
    assert cause(ValueError("one line\nand another")) == "one line"


def test_the_next_steps_work_as_they_stand():
    own = parse_recipe({"model": "./model.py:make", "data": "digits"})
    steps = next_steps(own, Path("runs/a b"))
    assert "svdc predict 'runs/a b' --trust-code --input FILE" in steps and "open 'runs/a b/report.html'\n" in steps
    plain = parse_recipe({"model": "lenet-5", "data": "digits"})
    assert "--trust-code" not in next_steps(plain, Path("runs/a"))
    assert next_steps(plain, Path("runs/a")).startswith(f"\nnext: open {Path('runs/a/report.html')}\n      svdc evaluate")
    plain.report.html = False
    assert next_steps(plain, Path("runs/a")).startswith("\nnext: svdc evaluate runs/a ")
