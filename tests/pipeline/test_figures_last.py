"""Files come before figures: a failing figure costs no file, and figures of many examples keep to a budget."""

import json
import warnings

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from svdcompress import convert, cost, report
from svdcompress.cli import app
from svdcompress.errors import DataError, ExportError, OutputError
from svdcompress.pipeline import _finish, _onnx, _uncertainty, run
from svdcompress.pipeline._passes import Passes
from svdcompress.pipeline._uncertainty import _plan, _text, seconds_for, uncertainty
from svdcompress.recipe import load_recipe
from svdcompress.report import _page
from svdcompress.sources import Data, InMemory

SHORT = ["dense.epochs=1", "train.epochs=1", "train.beta.final=1e-6", "recover.epochs=0", "data.limit=60"]


def failing(error, look=lambda: None):
    def work(*args, **kwargs):
        look()
        raise error

    return work


def test_figures_that_fail_cost_no_files(tiny_recipe, tmp_path, monkeypatch):
    folder, there = tmp_path / "run", []

    def look():
        there.append({path.name for path in folder.iterdir()})

    monkeypatch.setattr(Passes, "test_metrics", failing(DataError("data: test.csv: 3.5 in row 7 (test)")))
    monkeypatch.setattr(cost, "measure", failing(TypeError("an operation that nobody counts")))
    monkeypatch.setattr(_finish, "uncertainty", failing(RuntimeError("out of memory\nand more"), look))
    monkeypatch.setattr(cost, "latencies", failing(ExportError("no such runtime"), look))
    monkeypatch.setattr(report, "log_alpha_histograms", failing(ValueError("torch.histc")))
    monkeypatch.setattr(report, "write", failing(RuntimeError("no fonts"), look))
    results = run(load_recipe(tiny_recipe_file(tiny_recipe, tmp_path), SHORT), folder)
    assert (
        all(files >= {"model.safetensors", "model.onnx", "model_mc.onnx", "dense.onnx"} for files in there) and len(there) == 3
    )
    stored = json.loads((folder / "report.json").read_text())
    assert stored["failed"]["uncertainty"] == "RuntimeError: out of memory"
    assert set(stored["failed"]) >= {"uncertainty", "log alpha", "report.html", "latency and ratios"}
    assert stored["failed"]["the dense model on the test data"] == "DataError: data: test.csv: 3.5 in row 7 (test)"
    assert any("no figures for uncertainty (RuntimeError: out of memory)" in line for line in stored["warnings"])
    assert stored["failed"] == results["failed"] and not (folder / "state").exists()
    assert stored["sparse"]["bytes"] == (folder / "model.onnx").stat().st_size
    report.table(results)  # shows what is available


def test_a_page_that_cannot_be_written_leaves_a_run_that_can_be_resumed(tiny_recipe, tmp_path, monkeypatch):
    recipe, folder = load_recipe(tiny_recipe_file(tiny_recipe, tmp_path), SHORT), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(report, "write", failing(OutputError("report.html: cannot be written: No space left on device")))
        with pytest.raises(OutputError, match=r"No space left on device.*--resume --out"):
            run(recipe, folder)
    assert (folder / "state" / "run.json").is_file() and not (folder / "report.html").exists()
    run(recipe, folder, resume=True)
    assert (folder / "report.html").is_file() and not (folder / "state").exists()


def test_a_section_that_fails_is_told_and_shown_by_debug(tiny_recipe, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    monkeypatch.setitem(_page.SECTIONS, "layers", ("Layers", failing(ValueError("odd shapes"))))
    results = run(load_recipe(tiny_recipe_file(tiny_recipe, tmp_path), SHORT), folder)
    assert results["failed"] == {"report.html: Layers": "ValueError: odd shapes"}
    (line,) = [line for line in results["warnings"] if line.startswith("report.html")]
    assert "Layers could not be drawn (ValueError: odd shapes)" in line and f"svdc report {folder} --debug" in line
    text = (folder / "report.html").read_text()
    assert 'id="layers"' in text and 'id="summary"' in text and "Training" in text
    assert json.loads((folder / "report.json").read_text())["failed"] == results["failed"]
    for more in ([], ["--debug"]):
        with warnings.catch_warnings():
            warnings.simplefilter("default", report.SectionWarning)  # as outside of these tests
            told = CliRunner().invoke(app, ["report", str(folder), *more], catch_exceptions=False)
        assert told.exit_code == 0
        assert "warning: report.html: Layers could not be drawn" in told.output and ("Traceback" in told.output) == bool(more)


def tiny_recipe_file(recipe, folder):
    from svdcompress.recipe import dump_recipe

    (folder / "tiny.yaml").write_text(dump_recipe(recipe))
    return str(folder / "tiny.yaml")


def test_a_model_that_onnx_does_not_hold_has_its_figures_all_the_same(tiny_recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(_onnx, "export_model", failing(ExportError("it branches on its batch size")))
    monkeypatch.setattr(_onnx, "export_onnx", failing(ExportError("it branches on its batch size")))
    settings = [*SHORT, "report.html=false", "uncertainty.samples=2"]
    with pytest.raises(ExportError, match="branches"):
        run(load_recipe(tiny_recipe_file(tiny_recipe, tmp_path), settings), tmp_path / "run")
    stored = json.loads((tmp_path / "run" / "report.json").read_text())
    assert stored["sparse"]["metrics"]["error"] >= 0 and stored["uncertainty"]
    assert any(line.startswith("model.onnx was not written: it branches") for line in stored["warnings"])


@pytest.mark.parametrize(
    ("examples", "samples", "budget", "each", "expected"),
    [
        (6000, 100, 1000.0, 0.001, (6000, 100)),  # all of it fits: 600 s
        (6000, 100, 108.0, 0.001, (1000, 100)),  # fewer examples
        (6000, 100, 400.0, 0.001, (4000, 100)),
        (6000, 100, 50.0, 0.001, (1000, 50)),  # then fewer samples
        (6000, 100, 108.0, 0.01, (300, 30)),  # then fewer examples still
        (6000, 100, 1.0, 1.0, (50, 30)),  # never fewer than that
        (20, 5, 1.0, 1.0, (20, 5)),
    ],
)
def test_examples_and_samples_of_a_budget(examples, samples, budget, each, expected):
    found = _plan(examples, samples, budget, each)
    assert found == expected
    assert found[0] * found[1] * each <= budget or found in ((50, 30), (20, 5))


def test_the_budget_is_a_part_of_the_training():
    assert seconds_for("auto", 540) == 108 and seconds_for("auto", 3) == 30
    assert seconds_for(12.5, 540) == 12.5 and seconds_for("none", 540) is None


def test_fewer_samples_of_all_examples_are_not_called_fewer_examples():
    text = _text({"examples": 200, "test": 200, "samples": 50, "asked": 100})
    assert "are from all 200 test examples, with 50 samples instead of 100, to take less time than training. For" in text
    assert "from all examples" in _text({"examples": 100, "test": 200, "samples": 50, "asked": 50})


def many(count=1500):
    torch.manual_seed(0)
    x = torch.randn(count, 4)
    examples = InMemory(x, (x[:, 0] > 0).long())
    return Data(examples, examples.subset(torch.arange(50)), examples, "classification", 2)


def test_costly_figures_are_of_fewer_examples_and_say_so(monkeypatch):
    seen = []
    dense = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    small = convert(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))).eval()
    dense.register_forward_hook(lambda module, args, out: seen.append(len(args[0])))
    monkeypatch.setattr(_uncertainty, "_seconds", lambda *args: 0.001)
    figures, diagrams, of, unsure = uncertainty(dense, small, many(), 60, 0, 30.0)
    assert (of["examples"], of["test"], of["samples"], of["asked"]) == (1000, 1500, 30, 60)
    assert "1,000 of the 1,500 test examples with 30 samples" in of["text"] and "uncertainty.budget=none" in of["text"]
    assert list(figures) == ["dense", "sparse, mean", "sparse, 30 samples"]
    assert unsure and all(0 <= one["example"] < 1500 for one in unsure)
    assert sum(diagrams["dense"]["count"]) == sum(diagrams["sparse, mean"]["count"]) == 1000
    _, diagrams, of, _ = uncertainty(dense, small, many(), 60, 0, None)
    assert of["text"] == "" and sum(diagrams["sparse, 60 samples"]["count"]) == 1500


def test_the_time_of_a_sample_is_measured(monkeypatch):
    small = convert(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))).eval()
    what = {"task": "classification", "dim": 1}
    assert 0 < _uncertainty._seconds(small, many(600), 20, what) < 0.01
    clock = [0.0]

    def draw(model, inputs, draws, **more):  # 2 ms for each sample of each example
        clock[0] += 0.002 * draws * len(inputs)

    monkeypatch.setattr(_uncertainty, "mc_predict", draw)
    monkeypatch.setattr(_uncertainty.time, "perf_counter", lambda: clock[0])
    assert _uncertainty._seconds(small, many(600), 20, what) == pytest.approx(0.002)


def test_pixels_of_many_images_are_not_all_kept(monkeypatch):
    monkeypatch.setattr(_uncertainty, "MOST_NUMBERS", 2000)
    _, _, of, _ = uncertainty(nn.Linear(4, 2), convert(nn.Linear(4, 2)).eval(), many(), 3, 0, None)
    assert of["examples"] == 1000
