"""`svdc sparsify` on a recipe that names an experiment."""

import json

from typer.testing import CliRunner

from svdcompress.cli import app


def svdc(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "200"})


def test_an_experiment_runs_and_says_what_it_wrote(tmp_path):
    out = tmp_path / "run"
    result = svdc("sparsify", "bayes-linear", "--set", "experiment.settings.epochs=3", "--seed", 4, "--out", out, "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["experiment"] == "bayes-linear" and printed["seed"] == 4 and printed["out"] == str(out)
    assert {path.name for path in out.iterdir()} == {"recipe.yaml", "report.json", "bayes-linear.png"}
    again = svdc("sparsify", "bayes-linear", "--out", out)
    assert again.exit_code == 7 and "holds something" in again.output


def test_what_an_experiment_does_not_take(tmp_path):
    result = svdc("sparsify", "co2", "--dry-run")
    assert result.exit_code == 2 and "neither --dry-run" in result.output
    result = svdc("sparsify", "co2", "--set", "experiment.settings.epoch=3", "--out", tmp_path / "run")
    assert result.exit_code == 3 and "did you mean epochs" in result.output
    result = svdc("sparsify", "co2", "--set", "experiment.name=co3")
    assert result.exit_code == 3 and "experiment.name" in result.output
