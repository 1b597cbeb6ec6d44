"""Runs whose files leave sizes open: what they write, and what is refused before any training."""

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from svdcompress.cli._app import app
from svdcompress.errors import RecipeError
from svdcompress.export import read_metadata
from svdcompress.pipeline import check_model, open_run
from svdcompress.recipe import load_recipe
from svdcompress.sources import Data, InMemory

AXES = "export.dynamic_axes={input: {2: height, 3: width}}"

OWN = '''
import torch
from torch import nn


def make():
    """Which pixels are bright, from their surroundings."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 2, 1))


def data():
    torch.manual_seed(1)
    x = torch.randn(96, 1, 8, 8)
    y = (nn.functional.avg_pool2d(x, 3, 1, 1)[:, 0] > 0).long()
    return x, y
'''


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A short run with all kinds of files."""
    folder = tmp_path_factory.mktemp("open")
    (folder / "own.py").write_text(OWN)
    settings = ["model=./own.py:make", "data=./own.py:data", "dense.epochs=2", "train.epochs=1", "recover.epochs=1"]
    settings += [AXES, "export.precision=int8", "uncertainty.samples=0", "report.latency=false"]
    settings += ["calibrate.temperature=false"]
    given = [part for setting in settings for part in ("--set", setting)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        found = CliRunner().invoke(app, ["sparsify", "--out", "run", "--trust-code", *given])
        assert found.exit_code == 0, found.output
        yield folder / "run"


def test_every_file_of_a_run_takes_other_sizes(done):
    opened = open_run(done, trust_code=True)
    x = torch.randn(3, 1, 5, 19)
    with torch.no_grad():
        want = opened.model(x).numpy()
    for name in ("model.onnx", "model_compact.onnx", "model_int8.onnx", "model_mc.onnx", "dense.onnx"):
        session = onnxruntime.InferenceSession(str(done / name))
        more = {"samples": np.array(5)} if name == "model_mc.onnx" else {}
        got = session.run(None, {"input": x.numpy(), **more})[0]
        assert got.shape == (3, 2, 5, 19), name
        assert read_metadata(done / name)["dynamic_axes"] == {"input": {"2": "height", "3": "width"}}, name
        if name in ("model.onnx", "model_compact.onnx"):
            np.testing.assert_allclose(got, want, atol=1e-4)


def test_verify_compares_other_sizes_too(done):
    assert CliRunner().invoke(app, ["verify", str(done), "--trust-code"]).exit_code == 0


def test_an_export_after_the_run_opens_what_it_is_asked_to(done, tmp_path):
    def export(name, *more, code=0):
        found = CliRunner().invoke(app, ["export", str(done), "--out", str(tmp_path / name), "--trust-code", *more])
        assert found.exit_code == code, found.output
        return found.output

    export("as_before.onnx", "--monte-carlo")
    export("height.onnx", "--dynamic-axis", "input:2=height")
    shapes = {
        name: onnxruntime.InferenceSession(str(tmp_path / name)).get_inputs()[0].shape
        for name in ("as_before.onnx", "height.onnx")
    }
    assert shapes == {"as_before.onnx": ["batch", 1, "height", "width"], "height.onnx": ["batch", 1, "height", 8]}
    said = export("no.onnx", "--dynamic-axis", "height", code=2)
    assert "--dynamic-axis: 'height' is not INPUT:DIMENSION=NAME, as in input:2=height" in " ".join(said.split())


@pytest.mark.parametrize(
    "axes, said",
    [
        ("{pixels: {2: height}}", r"export\.dynamic_axes: the file has no input 'pixels'; its inputs are input"),
        ("{input: {2: height}}", r"export\.dynamic_axes: the model takes no other sizes .* with height 5 it fails"),
    ],
)
def test_what_the_model_cannot_take_is_refused_before_training(axes, said):
    examples = InMemory(torch.randn(6, 1, 8, 4), torch.arange(6) % 3)
    recipe = load_recipe(None, ["model=./mine.py:make", f"export.dynamic_axes={axes}"])
    data = Data(examples, examples, examples, recipe.task, 3)
    with pytest.raises(RecipeError, match=said):
        check_model(nn.Sequential(nn.Flatten(), nn.Linear(32, 3)), recipe, data, examples.inputs[:2])


def test_draws_that_depend_on_the_size_leave_the_monte_carlo_file_with_one(tmp_path, monkeypatch):
    """Dropout at each position: the other files are open, and the run says what that one is."""
    dropping = OWN.replace("nn.ReLU(), nn.Conv2d(6, 2, 1)", "nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(6, 2, 1)")
    assert dropping != OWN
    (tmp_path / "own.py").write_text(dropping)
    monkeypatch.chdir(tmp_path)
    settings = ["model=./own.py:make", "data=./own.py:data", "dense.epochs=1", "train.epochs=1", "recover.epochs=0", AXES]
    settings += ["convert.dropout=draw", "uncertainty.samples=0", "report.latency=false"]
    given = [part for setting in settings for part in ("--set", setting)]
    found = CliRunner().invoke(app, ["sparsify", "--out", "run", "--trust-code", *given])
    said = " ".join(found.output.split())
    assert found.exit_code == 0 and "model_mc.onnx takes inputs of the example's sizes only" in said, found.output
    shapes = [
        onnxruntime.InferenceSession(str(tmp_path / "run" / name)).get_inputs()[0].shape
        for name in ("model.onnx", "model_mc.onnx")
    ]
    assert shapes == [["batch", 1, "height", "width"], ["batch", 1, 8, 8]]
    again = ["export", "run", "--out", "mc.onnx", "--monte-carlo", "--trust-code"]
    found = CliRunner().invoke(app, again)
    assert found.exit_code == 0 and "mc.onnx takes inputs of the example's sizes only" in " ".join(found.output.split())
    found = CliRunner().invoke(app, [*again[:3], "other.onnx", *again[4:], "--dynamic-axis", "input:2=height"])
    assert found.exit_code == 10 and "how much noise '4' takes depends on the sizes" in " ".join(found.output.split())


TEXTS = '''
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.line, self.last = nn.Embedding(30, 16), nn.Linear(16, 32), nn.Linear(32, 3)

    def forward(self, ids, keep):
        return self.last((self.line(self.embed(ids)).relu() * keep[..., None]).sum(1) / keep.sum(1, keepdim=True))


def make():
    torch.manual_seed(0)
    return Bag()


def together(rows):
    ids = pad_sequence([ids for ids, _ in rows], batch_first=True)
    keep = pad_sequence([torch.ones(len(ids)) for ids, _ in rows], batch_first=True)
    return {"ids": ids, "keep": keep}, torch.tensor([label for _, label in rows])


def data():
    """Texts of 3 to 20 tokens, padded to the longest of each batch; most tokens of a text belong to its class."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for n in range(300):
        length = int(torch.randint(3, 21, (1,), generator=generator))
        own = 1 + 9 * (n % 3) + torch.randint(9, (length,), generator=generator)
        other = torch.randint(1, 30, (length,), generator=generator)
        rows.append((torch.where(torch.rand(length, generator=generator) < 0.7, own, other), n % 3))
    return DataLoader(rows, batch_size=16, collate_fn=together)
'''


def test_texts_need_not_be_padded_to_one_length(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(TEXTS)
    monkeypatch.chdir(tmp_path)
    settings = ["model=./own.py:make", "data=./own.py:data", "dense.epochs=10", "train.epochs=0", "recover.epochs=4"]
    settings += ["export.dynamic_axes={ids: {1: length}, keep: {1: length}}", "report.latency=false", "calibrate.coverage=0.8"]
    settings += ["recover.distill.weight=0.5", "recover.distill.layers=10", "uncertainty.samples=20", "export.precision=int8"]
    given = [part for setting in settings for part in ("--set", setting)]
    found = CliRunner().invoke(app, ["sparsify", "--out", "run", "--goal", "macs=2x", "--trust-code", *given])
    assert found.exit_code == 0, found.output
    assert CliRunner().invoke(app, ["verify", "run", "--trust-code"]).exit_code == 0
    opened = open_run("run", trust_code=True)
    ids = torch.randint(1, 30, (1, 13))
    session = onnxruntime.InferenceSession("run/model.onnx")
    alone = session.run(None, {"ids": ids.numpy(), "keep": np.ones((1, 13), np.float32)})[0]
    padded = np.pad(ids.numpy(), ((0, 0), (0, 40)))
    keep = np.pad(np.ones((1, 13), np.float32), ((0, 0), (0, 40)))
    np.testing.assert_allclose(session.run(None, {"ids": padded, "keep": keep})[0], alone, atol=1e-5)
    wrong = sum(
        int((session.run(None, {name: x.numpy() for name, x in inputs.items()})[0].argmax(1) != labels.numpy()).sum())
        for inputs, labels in opened.data.test.batches(1)
    )
    assert 100 * wrong / len(opened.data.test) == pytest.approx(opened.results["sparse"]["metrics"]["error"])
