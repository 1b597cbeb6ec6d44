"""The commands through Typer's runner: their output, their exit codes, and errors of one line without a traceback."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

import svdcompress
from svdcompress import errors
from svdcompress.cli import app
from svdcompress.cli._app import EXIT_CODES
from svdcompress.recipe import shipped_recipes

MODEL = """
import torch
from torch import nn

def make(hidden=8, classes=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, classes))
"""


def svdc(*args, code=0):
    result = CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "200"})
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    assert "Traceback" not in result.output
    return result


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with a model file and matching data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 4)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=x[:, :3].argmax(1))
    return tmp_path


def test_help_teaches_and_lists_commands_and_exit_codes():
    text = svdc("--help").stdout
    for command in ("sparsify", "inspect", "evaluate", "predict", "export", "bench", "report", "recipes"):
        assert command in text
    assert "svdc sparsify digits" in text
    for code, _ in EXIT_CODES:
        assert re.search(rf"\b{code}\b", text), code
    for command in ("sparsify", "inspect", "evaluate", "predict", "export", "bench", "report"):
        assert "Usage" in svdc(command, "--help").stdout


def test_each_kind_of_error_has_its_own_exit_code():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.SvdcError)]
    codes = [kind.exit_code for kind in kinds]
    assert len(set(codes)) == len(codes)
    # The help lists the errors that can occur: those that the package raises.
    text = "".join(path.read_text() for path in Path(svdcompress.__file__).parent.rglob("*.py"))
    raised = {kind for kind in kinds if re.search(rf"\b{kind.__name__}\(", text.replace(f"class {kind.__name__}(", ""))}
    assert {str(kind.exit_code) for kind in raised} - {"1"} == {code for code, _ in EXIT_CODES} - {"0", "1"}


def test_the_version():
    from svdcompress import __version__

    assert svdc("--version").stdout.strip() == __version__


def test_recipes_are_listed_shown_and_copied_but_never_over_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    listed = json.loads(svdc("recipes", "list", "--json").stdout)
    assert list(listed) == list(shipped_recipes())
    assert "digits" in svdc("recipes", "list").stdout
    assert svdc("recipes").stdout == svdc("recipes", "list").stdout
    shown = svdc("recipes", "show", "digits").stdout
    svdc("recipes", "copy", "digits")
    assert (tmp_path / "digits.yaml").read_text() == shown
    assert yaml.safe_load(shown)["model"]["name"] == "mlp"
    (tmp_path / "digits.yaml").write_text("mine")
    assert "exists already" in svdc("recipes", "copy", "digits", code=7).stderr
    assert (tmp_path / "digits.yaml").read_text() == "mine"
    assert "no shipped recipe of that name" in svdc("recipes", "show", "digit", code=3).stderr


def test_a_dry_run_prints_the_plan_and_writes_nothing(place):
    before = sorted(path.name for path in place.iterdir() if path.name != "__pycache__")
    result = svdc("sparsify", "--model", "./model.py:make", "--data", "npz:data.npz", "--dry-run")
    assert "converted" in result.stdout and "memory" in result.stdout and "time on" in result.stdout
    found = json.loads(svdc("sparsify", "--model", "./model.py:make", "--data", "npz:data.npz", "--dry-run", "--json").stdout)
    assert found["converted"] == 4 * 8 + 8 * 3
    assert sorted(path.name for path in place.iterdir() if path.name != "__pycache__") == before


def test_inspect_says_what_is_converted_and_why_the_rest_is_not(place):
    args = (
        "inspect",
        "--model",
        "./model.py:make",
        "--model-arg",
        "hidden=12",
        "--data",
        "npz:data.npz",
        "--set",
        "convert.exclude=['2']",
    )
    text = svdc(*args).stdout
    assert "converted" in text and "left: excluded" in text
    found = json.loads(svdc(*args, "--json").stdout)
    assert [entry["converted"] for entry in found["plan"]] == [True, False]
    assert found["plan"][0]["parameters"] == 4 * 12
    assert [(entry["all_parameters"], entry["macs"], entry["ran"]) for entry in found["plan"]] == [
        (60, 48, True),
        (39, 36, True),
    ]
    groups = [
        {key: group[key] for key in ("name", "units", "unit_parameters", "unit_macs")} for group in found["pruning"]["groups"]
    ]
    assert groups == [
        {"name": "0", "units": 12, "unit_parameters": 4 + 1 + 3, "unit_macs": 4 + 3},
        {"name": "2", "units": 3, "unit_parameters": 12 + 1, "unit_macs": 12},
    ]
    assert "can go" in text and "stays: output of the model" in text and "MACs each" in text


def test_inspect_finds_weights_read_past_their_layer_and_names_the_option_for_derived_ones(place):
    (place / "odd.py").write_text(
        "import torch\nfrom torch import nn\nfrom torch.nn.utils.parametrizations import weight_norm\n\n\n"
        "class Odd(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.a, self.b, self.c = weight_norm(nn.Linear(4, 5)), nn.Linear(5, 5), nn.Linear(5, 3)\n\n"
        "    def forward(self, x):\n        return self.c(torch.relu(self.a(x)) @ self.b.weight)\n"
    )
    args = ("inspect", "--model", "./odd.py:Odd", "--data", "npz:data.npz")
    plan = {entry["name"]: entry for entry in json.loads(svdc(*args, "--json").stdout)["plan"]}
    assert (
        "its weight is read directly by the model itself" in plan["b"]["reason"]
        and "convert.derived: fold" in plan["a"]["reason"]
    )
    assert plan["c"]["converted"]
    text = svdc(*args, "--set", "convert.derived=fold").stdout
    assert "converted, made plain first: its weight comes from WeightNorm" in text and "is read directly by" in text


@pytest.mark.parametrize("data", [(), ("--data", "npz:data.npz")])
def test_inspect_tells_what_of_the_weights_was_not_as_asked(place, data):
    spec: dict = {}
    exec(MODEL, spec)
    torch.save(spec["make"]().state_dict(), "weights.pt")
    asked = ("inspect", "--model", "./model.py:make", "--weights", "weights.pt", "--strip-prefix", "nonsense.", *data)
    found = json.loads(svdc(*asked, "--json").stdout)
    assert any("nonsense." in line for line in found["warnings"])


def test_inspect_takes_a_model_alone(place):
    text = svdc("inspect", "--model", "./model.py:make").stdout
    assert f"{4 * 8 + 8 + 8 * 3 + 3} parameters" in text
    assert "With --data also shown: " in text
    found = json.loads(svdc("inspect", "--model", "./model.py:make", "--json").stdout)
    assert list(found) == ["plan"] and [entry["name"] for entry in found["plan"]] == ["0", "2"]
    assert "--model is missing" in svdc("inspect", code=2).stderr
    assert "nothing to inspect" in svdc("inspect", "vae", code=2).stderr


def test_layers_with_long_names_are_named_in_full(place, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # a terminal of that width would truncate the names
    (place / "deep.py").write_text(
        "from torch import nn\ndef make():\n"
        "    inner = nn.Sequential()\n    inner.add_module('a_rather_long_name_of_a_layer_for_a_table', nn.Linear(4, 3))\n"
        "    outer = nn.Sequential()\n    outer.add_module('encoder_layers_of_a_transformer', inner)\n    return outer\n"
    )
    result = CliRunner().invoke(app, ["inspect", "--model", "./deep.py:make"])
    assert "encoder_layers_of_a_transformer.a_rather_long_name_of_a_layer_for_a_table" in result.output


def test_options_reach_the_recipe(place):
    from svdcompress.cli._settings import Settings

    made = Settings(
        model="a:b", model_arg=["width=3"], weights="w.pt", strip_prefix="m.", trained=True, data="csv:t.csv",
        data_arg=["max_length=5"], target="y", loss="mse", set_=["seed=4"],
    ).resolved(train__epochs=7, convert__threshold=None)  # fmt: skip
    assert (made.model.name, made.model.args) == ("a:b", {"width": 3})
    assert (made.weights.file, made.weights.strip_prefix, made.weights.trained) == ("w.pt", "m.", True)
    assert (made.data.name, made.data.args, made.data.target) == ("csv:t.csv", {"max_length": 5}, "y")
    assert (made.loss.name, made.seed, made.train.epochs, made.convert.threshold) == ("mse", 4, 7, 3.0)


def test_a_users_model_weights_and_data_to_an_onnx_file(place):
    from svdcompress.sources import import_name

    trained = import_name("./model.py:make", errors.ModelError, "model")()
    torch.save({"state_dict": {f"module.{k}": v for k, v in trained.state_dict().items()}}, place / "trained.pt")
    result = svdc(
        "sparsify", "--model", "./model.py:make", "--weights", "trained.pt", "--data", "npz:data.npz", "--epochs", 2,
        "--out", "small", "--seed", 3, "--threshold", 4, "--json", "--set", "train.beta.final=0.01",
        "--set", "recover.epochs=1", "--set", "convert.layers=[{match: '0', threshold: 1}]",
        "--set", "export.monte_carlo=false", "--set", "report.latency=false",
    )  # fmt: skip
    found = json.loads(result.stdout)
    assert found["seed"] == 3
    assert {row["stage"] for row in found["history"]} == {"train", "recover"}  # the dense model was not trained
    assert (place / "small" / "model.onnx").is_file()
    resolved = yaml.safe_load((place / "small" / "recipe.yaml").read_text())
    assert (resolved["train"]["epochs"], resolved["convert"]["threshold"]) == (2, 4.0)
    assert found["threshold"] == resolved["relevance"]["threshold"] == 4.0  # overrides the threshold of the layer's rule
    again = json.loads(svdc("sparsify", "small/recipe.yaml", "--json").stdout)  # in a new folder; the first run stays
    assert again["name"] == "small" and (place / "runs" / "small" / "model.onnx").is_file()
    assert again["sparse"]["metrics"] == found["sparse"]["metrics"]


def test_the_threshold_of_the_command_line_wins_and_may_come_late(place, monkeypatch):
    from svdcompress import pipeline

    runs = []
    monkeypatch.setattr(pipeline, "run", lambda made, *more, **options: runs.append(made) or {})
    recipe = "{model: ./model.py:make, data: 'npz:data.npz', relevance: {threshold: 2, candidates: [1, 2]}}"
    (place / "mine.yaml").write_text(recipe)
    svdc("sparsify", "mine.yaml", "--threshold", 5, "--out", "new")
    svdc("sparsify", "mine.yaml", "--threshold", 5, "--set", "relevance.candidates=[4, 6]", "--out", "new")
    (place / "old" / "state").mkdir(parents=True)
    (place / "old" / "recipe.yaml").write_text(recipe)
    svdc("sparsify", "--resume", "--out", "old", "--threshold", 5, "--trust-code")
    svdc("sparsify", "mine.yaml", "--out", "new")
    found = [(made.convert.threshold, made.relevance.threshold, made.relevance.candidates) for made in runs]
    assert found == [(5, 5, []), (5, 5, [4, 6]), (3, 5, []), (3, 2, [1, 2])]


GOOD = ("sparsify", "--model", "./model.py:make", "--data", "npz:data.npz", "--out", "out")

BAD = {
    "a wrong field": ((*GOOD, "--set", "train.epoch=3"), 3, "did you mean train.epochs?"),
    "a wrong value": ((*GOOD, "--set", "train.lr=fast"), 3, "train.lr"),
    "no such recipe": (("sparsify", "nothing.yaml"), 3, "nothing.yaml: no such file"),
    "neither recipe nor model": (("sparsify",), 2, "--model is missing"),
    "no data": (("sparsify", "--model", "lenet-5"), 2, "--data is missing"),
    "an unknown option": (("sparsify", "--epoch", "3"), 2, "No such option"),
    "an unknown model": ((*GOOD, "--model", "lenet"), 4, "model: unknown name 'lenet'"),
    "a missing factory": ((*GOOD, "--model", "./model.py:mak"), 4, "model.py has no 'mak'"),
    "a factory's wrong argument": ((*GOOD, "--model-arg", "width=3"), 4, "unexpected keyword argument 'width'"),
    "a model that does not fit the data": ((*GOOD, "--model", "lenet-5"), 4, "model: lenet-5 fails on inputs of shape (2, 4)"),
    "missing weights": ((*GOOD, "--weights", "absent.pt"), 5, "absent.pt: no such file"),
    "truncated weights": ((*GOOD, "--weights", "cut.pt"), 5, "cut.pt: truncated"),
    "unsafe weights": ((*GOOD, "--weights", "evil.pt"), 5, "evil.pt: its pickle holds more than weights and could run code"),
    "weights of another model": ((*GOOD, "--weights", "other.pt"), 5, "wrong shape (2): 0.weight (5, 4), the model has (8, 4)"),
    "missing data": ((*GOOD, "--data", "npz:absent.npz"), 6, "absent.npz: no such file"),
    "empty data": ((*GOOD, "--data", "npz:empty.npz"), 6, "empty.npz: no examples"),
    "NaN in the data": ((*GOOD, "--data", "npz:nan.npz"), 6, "nan.npz: nan in row 4, position [2]"),
    "labels out of range": ((*GOOD, "--model-arg", "classes=2"), 6, "data.target: label 2 in row"),
    "an unknown device": ((*GOOD, "--device", "gpu"), 2, "device: unknown 'gpu'"),
    "another run's folder": ((*GOOD, "--out", "taken"), 7, "taken holds another run"),
    "a place that is a file": ((*GOOD, "--out", "data.npz"), 7, "data.npz is a file"),
    "resuming nothing": (("sparsify", "--resume", "--out", "absent"), 7, "absent holds no run"),
    "a finished run resumed": (("sparsify", "--resume", "--out", "done"), 7, "the run in done is finished"),
    "a model of another kind of inputs": ((*GOOD, "--model", "hf:./absent"), 4, "model: hf: ./absent: no such folder"),
    "text without a tokenizer": ((*GOOD, "--data", "csv:texts.csv", "--target", "y"), 6, "name its tokenizer"),
    "a column that is not there": ((*GOOD, "--data", "csv:texts.csv", "--target", "z"), 6, "has no column 'z'; it has x, y"),
    "a table without a target": ((*GOOD, "--data", "csv:texts.csv"), 6, "data.target: name the column to predict"),
    "sharded weights that lack a file": (
        (*GOOD, "--weights", "shards.safetensors.index.json"),
        5,
        "names a.safetensors, which is",
    ),
    "resuming nowhere": (("sparsify", "digits", "--resume"), 2, "--resume needs --out"),
    "a pattern that matches nothing": ((*GOOD, "--set", "convert.exclude=[head]"), 4, "exclude: 'head' matches no module"),
    "a rule that matches nothing": (
        (*GOOD, "--set", "convert.layers=[{match: fc9}]"),
        4,
        "convert.layers.0.match: 'fc9' matches no module",
    ),
    "a unit to keep that is not there": (
        (*GOOD, "--set", "prune.protect=[head]"),
        4,
        "prune.protect: 'head' matches no module",
    ),
    "an unknown share": ((*GOOD, "--set", "convert.share=inpit"), 3, "convert.share: unknown name 'inpit'"),
    "a threshold of an unknown share": (
        (*GOOD, "--set", "relevance.threshold={rows: 3}"),
        3,
        "relevance.threshold: unknown share",
    ),
    "an opset that is not there": ((*GOOD, "--set", "export.opset=99"), 3, "export.opset: should be less than or equal to 23"),
    "an opset that cannot draw": ((*GOOD, "--set", "export.opset=22"), 3, "export.opset: model_mc.onnx draws random numbers"),
    "a number that is none": ((*GOOD, "--set", "train.lr=.inf"), 3, "train.lr: should be a finite number"),
    "a loss of one's own without its task": ((*GOOD, "--loss", "a.b:loss"), 3, "loss.task: a.b:loss is a loss of your own"),
    "a setting that the loss does not take": (
        (*GOOD, "--loss", "mse", "--set", "loss.label_smoothing=0.1"),
        3,
        "loss.label_smoothing: only cross-entropy takes it, not mse",
    ),
    "a loss that does not fit the model": (
        (*GOOD, "--loss", "mse"),
        4,
        "loss.name: mse does not fit the output of ./model.py:make",
    ),
    "weights of too few classes": (
        (*GOOD, "--set", "loss.class_weights=[1, 2]"),
        3,
        "loss.class_weights: 2 weights, but the model",
    ),
    "a precision that the device lacks": (
        (*GOOD, "--set", "train.precision=fp16", "--device", "cpu"),
        3,
        "train.precision: fp16 needs a CUDA device, but this is cpu",
    ),
    "a loss that explodes": ((*GOOD, "--set", "dense.lr=1e38"), 8, "dense: the loss is"),
    "no run to evaluate": (("evaluate", "absent"), 7, "absent: no such folder"),
    "predictions over their inputs": (
        ("predict", "absent", "--input", "texts.csv", "--out", "./texts.csv"),
        2,
        "would overwrite the inputs",
    ),
    "no run to report": (("report", "."), 7, "not a run's folder"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_error_with_a_code_of_its_own(place, name):
    class Evil:
        def __reduce__(self):
            return __import__("os").mkdir, ("hacked",)

    state = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3)).state_dict()
    torch.save({**state, "0.bias": torch.zeros(8), "2.bias": torch.zeros(3)}, place / "other.pt")
    (place / "cut.pt").write_bytes((place / "other.pt").read_bytes()[:900])
    torch.save({"state_dict": Evil()}, place / "evil.pt")
    zeros = np.zeros((600, 4), np.float32)
    np.savez(place / "empty.npz", x=zeros[:0], y=np.zeros(0, int))
    zeros[4, 2] = np.nan
    np.savez(place / "nan.npz", x=zeros, y=np.zeros(600, int))
    (place / "taken").mkdir()
    (place / "taken" / "recipe.yaml").write_text("description: another run")
    (place / "done").mkdir()
    (place / "done" / "recipe.yaml").write_text("{model: mlp, data: digits}")
    (place / "done" / "report.json").write_text("{}")
    (place / "texts.csv").write_text("x,y\n" + "\n".join(f"text {i},{i % 3}" for i in range(200)))
    (place / "shards.safetensors.index.json").write_text('{"weight_map": {"0.weight": "a.safetensors"}}')
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    args, code, said = BAD[name]
    result = svdc(*args, code=code)
    assert said in re.sub(r"\s+", " ", result.stderr)
    assert result.stdout == ""
    assert {path: path.read_bytes() for path in before} == before
    assert not (place / "hacked").exists()
    assert (place / "out").exists() == (code == 8)  # a failure before training leaves the name free


def test_debug_shows_the_traceback():
    result = CliRunner().invoke(app, ["report", "absent", "--debug"])
    assert result.exit_code == 7
    assert "Traceback" in result.stderr


def test_an_error_of_the_program_itself_is_one_line_too(monkeypatch):
    from svdcompress import pipeline

    def broken(folder):
        raise ZeroDivisionError("of our own")

    monkeypatch.setattr(pipeline, "open_run", broken)
    assert "ZeroDivisionError: of our own" in svdc("report", "x", code=1).stderr


def test_commands_on_a_finished_run(tiny_run, tmp_path):
    folder, results = tiny_run
    assert json.loads(svdc("report", folder, "--json").stdout)["sparse"] == results["sparse"]
    page = (folder / "report.html").read_bytes()
    text = svdc("report", folder).stdout
    assert "Parameters" in text and "model.onnx" in text
    assert len((folder / "report.html").read_bytes()) == pytest.approx(len(page), rel=0.1)
    timed = json.loads(svdc("bench", folder, "--seconds", 0.05, "--batch", 2, "--json").stdout)
    assert set(timed["dense"]["latency_ms"]) == {"batch_2"}
    assert timed["sparse"]["nonzero"] == results["sparse"]["nonzero"]
    assert "is not a batch size" in svdc("bench", folder, "--batch", 0, code=2).stderr
    for wrong in ("nan", "-1", "0"):
        assert f"--seconds: {wrong} is not a time" in svdc("bench", folder, f"--seconds={wrong}", code=2).stderr
    svdc("export", folder, "--out", tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").stat().st_size > 0
    assert "exists already" in svdc("export", folder, "--out", tmp_path / "again.onnx", code=7).stderr


@pytest.mark.slow
def test_evaluate_compares_dense_and_sparse(tiny_run, tmp_path):
    folder, results = tiny_run
    found = json.loads(svdc("evaluate", folder, "--samples", 3, "--out", tmp_path / "e", "--json").stdout)
    names = {row["name"]: row for row in found["contenders"]}
    assert names["sparse, mean"]["metrics"]["error"] == pytest.approx(results["sparse"]["metrics"]["error"])
    assert (tmp_path / "e" / "evaluation.json").is_file()
