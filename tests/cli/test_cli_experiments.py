"""`svdc sparsify` on a recipe that names an experiment, and how the other commands handle its folder."""

import json
import re

from typer.testing import CliRunner

from svdcompress.cli import app


def svdc(*args, code=0):
    result = CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "300"})
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    return result


def test_an_experiment_runs_and_says_what_it_wrote(tmp_path):
    out = tmp_path / "run"
    result = svdc("sparsify", "bayes-linear", "--set", "experiment.settings.epochs=3", "--seed", 4, "--out", out, "--json")
    printed = json.loads(result.stdout)
    assert printed["experiment"] == "bayes-linear" and printed["seed"] == 4 and printed["out"] == str(out)
    assert {path.name for path in out.iterdir()} == {
        "recipe.yaml",
        "report.json",
        "report.html",
        *(f"{name}{page}.png" for name in ("bayes-linear", "curve") for page in ("", "-dark")),
    }
    assert "holds another run" in svdc("sparsify", "bayes-linear", "--out", out, code=7).stderr
    # The report can be rebuilt, and a folder without a model is not mistaken for a run.
    (out / "report.html").unlink()
    text = svdc("report", out).stdout
    assert "bayes-linear.png" in text and (out / "report.html").is_file()
    assert json.loads(svdc("report", out, "--json").stdout)["settings"]["epochs"] == 3
    for command in (("evaluate",), ("bench",), ("export", "--out", tmp_path / "a.onnx")):
        assert "but no model" in svdc(command[0], out, *command[1:], code=2).stderr


def test_a_dry_run_of_an_experiment_says_what_it_would_do(tmp_path):
    out = tmp_path / "run"
    text = svdc("sparsify", "co2", "--set", "experiment.settings.width=32", "--dry-run", "--out", out).stdout
    assert re.search(r"width = 32\n +layers = 4", text) and "data of its own" in text
    found = json.loads(svdc("sparsify", "co2", "--dry-run", "--json", "--out", out).stdout)
    assert found["settings"]["width"] == 256 and found["out"] == str(out)
    assert not out.exists()


def test_what_an_experiment_does_not_take(tmp_path):
    text = svdc("sparsify", "co2", "--epochs", 20, "--threshold", 3, "--weights", "a.pt", code=3).stderr
    assert text.startswith("error: weights, train.epochs, convert.threshold: without effect on the experiment co2")
    assert "--set experiment.settings.width=" in text and "sparse_epochs" in text
    assert "starts over" in svdc("sparsify", "co2", "--resume", "--out", tmp_path, code=2).stderr
    text = svdc("sparsify", "co2", "--set", "experiment.settings.epoch=3", "--out", tmp_path / "run", code=3).stderr
    assert "did you mean epochs" in text
    assert "experiment.name" in svdc("sparsify", "co2", "--set", "experiment.name=co3", code=3).stderr
    assert "device: unknown 'gpu'" in svdc("sparsify", "co2", "--device", "gpu", code=2).stderr
