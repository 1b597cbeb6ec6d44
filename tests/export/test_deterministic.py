"""`export_onnx` without sampling: parity, the file's contents, refusals, and what a failure leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import export_zoo as zoo
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.errors import ExportError, OutputError, UsageError
from svdcompress.export import _deterministic, _write, check_parity, export_onnx, read_metadata
from svdcompress.export._noise import freeze
from svdcompress.export._outputs import named_outputs


def chain() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, padding_mode="reflect"),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(),
        nn.Flatten(),
        nn.Linear(144, 5),
    )
    model[1].running_mean.normal_()
    return svdc.convert(model)


def run(path: Path, *arrays, names=("input",)) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip(names, arrays, strict=True)))


def test_agrees_with_eval_at_batches_that_were_not_traced(tmp_path):
    model = chain().train()
    with torch.no_grad():
        model[5].log_sigma2[:, ::2] = 10.0  # irrelevant: 0 in eval()
        model[0].log_sigma2[1] = 10.0
    state = {name: value.clone() for name, value in model.state_dict().items()}
    exported = export_onnx(model, tmp_path / "m.onnx", torch.zeros(2, 1, 6, 6))

    assert model.training and all(module.training for module in model.modules())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert set(exported.parities) == {1, 3, 7} and exported.parity == max(exported.parities.values()) < 1e-5
    model.eval()
    for batch in (1, 2, 13):
        x = torch.randn(batch, 1, 6, 6)
        (y,) = run(exported.path, x.numpy())
        assert np.abs(y - model(x).detach().numpy()).max() < 1e-5
    assert check_parity(exported.path, model, torch.zeros(1, 1, 6, 6)) < 1e-5


def test_what_the_file_holds(tmp_path):
    metadata = {"compression": {"nonzero": 68.5}, "note": "12", "dense": "no"}
    exported = export_onnx(chain(), tmp_path / "m.onnx", torch.zeros(2, 1, 6, 6), metadata=metadata)
    model = onnx.load(exported.path)
    assert [value.name for value in model.graph.input] == ["input"]
    assert [value.name for value in model.graph.output] == ["output"]
    for value in (*model.graph.input, *model.graph.output):
        assert value.type.tensor_type.shape.dim[0].dim_param == "batch"
    assert model.opset_import[0].version == 20
    # BatchNorm folded, no dropout
    assert [node.op_type for node in model.graph.node] == ["Pad", "Conv", "Relu", "Reshape", "Gemm"]
    assert not model.graph.value_info and not any(node.metadata_props or node.doc_string for node in model.graph.node)
    text = exported.path.read_bytes()
    assert b".py" not in text and str(Path(__file__).parents[2]).encode() not in text and b"/home" not in text
    assert exported.bytes == exported.path.stat().st_size < 4 * 820 + 1500  # 769 numbers
    assert [file.name for file in tmp_path.iterdir()] == ["m.onnx"]

    stored = read_metadata(exported.path)
    assert stored == exported.metadata and metadata.items() <= stored.items()
    assert stored["kind"] == "deterministic" and stored["torch_version"] == str(torch.__version__)
    assert {entry.key: entry.value for entry in model.metadata_props}["compression"] == '{"nonzero": 68.5}'
    assert json.loads(json.dumps(exported.to_dict()))["path"] == "m.onnx"


@pytest.mark.slow
def test_keyword_inputs_and_several_outputs(tmp_path):
    model = svdc.convert(zoo.Attention())
    inputs = {"tokens": torch.randint(0, 11, (4, 6)), "scale": torch.ones(4, 1, 1), "double": True}
    exported = export_onnx(model, tmp_path / "m.onnx", inputs)
    assert exported.inputs == ["tokens", "scale"] and exported.outputs == ["output", "hidden"]
    logits, hidden = run(exported.path, inputs["tokens"].numpy(), inputs["scale"].numpy(), names=exported.inputs)
    expected = model.eval()(**inputs)
    assert np.abs(logits - expected["logits"].detach().numpy()).max() < 1e-5
    assert np.abs(hidden - expected["hidden"].detach().numpy()).max() < 1e-5


@pytest.mark.slow
def test_layers_that_share_a_weight_and_keep_different_parts_of_it(tmp_path):
    model = nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 20))
    model[2].weight = model[0].weight
    svdc.convert(model)
    model[0].mask = torch.rand(20, 20) < 0.5
    size = export_onnx(model, tmp_path / "m.onnx", torch.zeros(2, 20)).bytes
    model[2].mask = model[0].mask
    assert export_onnx(model, tmp_path / "m.onnx", torch.zeros(2, 20)).bytes < size - 1500  # the same 1,600 bytes, stored once


def test_names_of_outputs():
    one, two, three = torch.zeros(1), torch.ones(1), torch.ones(1)
    assert named_outputs(one) == {"output": one}
    assert list(named_outputs((one, {"a": two, "b": [three]}))) == ["output", "output_1_a", "output_1_b_0"]
    assert named_outputs({"output": one, "logits": two, "none": None}) == {"output": two, "output_": one}


@pytest.mark.slow
def test_positional_inputs_are_named_after_the_arguments(tmp_path):
    exported = export_onnx(zoo.Attention(), tmp_path / "m.onnx", (torch.zeros(1, 6, dtype=torch.long), torch.ones(1, 1, 1)))
    assert exported.inputs == ["tokens", "scale"]


def test_an_active_sampling_context_does_not_reach_the_file(tmp_path):
    model = chain()
    with svdc.sampling(model, generator=torch.Generator()):
        assert export_onnx(model, tmp_path / "m.onnx", torch.zeros(2, 1, 6, 6)).parity < 1e-5


@pytest.mark.slow
def test_half_and_double_models_are_written_in_float32(tmp_path):
    for dtype in (torch.float64, torch.bfloat16):
        model = svdc.convert(nn.Sequential(nn.Linear(4, 3))).to(dtype)
        exported = export_onnx(model, tmp_path / "m.onnx", torch.zeros(2, 4, dtype=dtype))
        assert run(exported.path, np.zeros((1, 4), np.float32))[0].dtype == np.float32
        assert next(model.parameters()).dtype == dtype


def test_quiet(tmp_path, capfd, caplog, recwarn):
    export_onnx(chain(), tmp_path / "m.onnx", torch.zeros(2, 1, 6, 6))
    assert capfd.readouterr() == ("", "") and not caplog.records and not recwarn.list


class Awkward(nn.Module):
    def __init__(self, how) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.how = how

    def forward(self, x):
        return self.how(self.linear(x), x)


REFUSED = {
    "batch size": lambda y, x: y * 2 if x.shape[0] > 4 else y * 3,
    "large batch": lambda y, x: y * 2 if len(x) > 1000 else y * 3,
    "batch of one": lambda y, x: y * 2 if len(x) == 1 else y * 3,
    "fixed batch": lambda y, x: y.reshape(3, 3),
    "baked size": lambda y, x: y + torch.zeros(int(x.shape[0]), 3),
    "values": lambda y, x: y * 2 if x.sum() > 0 else y,
    "dropout": lambda y, x: nn.functional.dropout(y, 0.5, True),
    "noise": lambda y, x: y + torch.randn_like(y),
    "text": lambda y, x: "text",
    "nested text": lambda y, x: (y, "text"),
    "nothing": lambda y, x: (),
    "crash": lambda y, x: y + torch.zeros(5),
}


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("case", REFUSED)
def test_refused_and_nothing_lost(tmp_path, case, verify):
    path = tmp_path / "m.onnx"
    path.write_bytes(b"precious")
    texts = {"values": "values of tensors", "dropout": "random", "noise": "random", "crash": "example inputs"}
    texts |= {"text": "str", "nested text": "str", "nothing": "no floating-point tensor"}
    with pytest.raises(ExportError, match=texts.get(case, "batch")):
        export_onnx(Awkward(REFUSED[case]), path, torch.zeros(2, 4), verify=verify)
    assert path.read_bytes() == b"precious" and [file.name for file in tmp_path.iterdir()] == ["m.onnx"]


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ("x", "example_inputs"),
        ((), "no tensor"),
        ({"x": 3}, "no tensor"),
        (torch.tensor(1.0), "scalar"),
        (torch.zeros(0, 4), "0 rows"),
        (torch.full((2, 4), torch.nan), "NaN"),
        ((torch.zeros(2, 4), torch.zeros(3, 4)), "first dimension"),
        (torch.zeros(2, 5), "fails on the example inputs"),
    ],
)
def test_bad_example_inputs(tmp_path, inputs, text):
    with pytest.raises(ExportError, match=text):
        export_onnx(nn.Linear(4, 3), tmp_path / "m.onnx", inputs)
    assert not list(tmp_path.iterdir())


def test_bad_options(tmp_path):
    with pytest.raises(UsageError, match="opset"):
        export_onnx(nn.Linear(4, 3), tmp_path / "m.onnx", torch.zeros(2, 4), opset=7)
    with pytest.raises(ExportError, match="'when'"):
        export_onnx(nn.Linear(4, 3), tmp_path / "m.onnx", torch.zeros(2, 4), metadata={"when": object()})
    with pytest.raises(OutputError, match="does not exist"):
        export_onnx(nn.Linear(4, 3), tmp_path / "none" / "m.onnx", torch.zeros(2, 4))
    with pytest.raises(OutputError, match="folder"):
        export_onnx(nn.Linear(4, 3), tmp_path, torch.zeros(2, 4))


def test_a_file_that_disagrees_is_not_written(tmp_path, monkeypatch):
    def wrong(model):
        freeze(model)
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.data[0, 0] += 0.01

    monkeypatch.setattr(_deterministic, "freeze", wrong)
    with pytest.raises(ExportError, match="'output' differs from PyTorch by"):
        export_onnx(chain(), tmp_path / "m.onnx", torch.zeros(2, 1, 6, 6))
    assert not list(tmp_path.iterdir())


def test_check_parity_finds_another_model(tmp_path):
    exported = export_onnx(nn.Linear(4, 3), tmp_path / "m.onnx", torch.zeros(2, 4))
    with pytest.raises(ExportError, match="differs"):
        check_parity(exported.path, nn.Linear(4, 3), torch.zeros(2, 4))
    with pytest.raises(ExportError, match="inputs are input"):
        check_parity(exported.path, zoo.Attention(), (torch.zeros(1, 6, dtype=torch.long), torch.ones(1, 1, 1)))


def test_large_weights_go_beside_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(_write, "SINGLE_FILE_LIMIT", 1000)
    exported = export_onnx(nn.Linear(40, 30), tmp_path / "m.onnx", torch.zeros(2, 40))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    assert exported.bytes == sum(file.stat().st_size for file in tmp_path.iterdir())
    assert exported.parity < 1e-5 and run(exported.path, np.zeros((1, 40), np.float32))[0].shape == (1, 30)


def test_metadata_of_something_else(tmp_path):
    with pytest.raises(ExportError, match="no such file"):
        read_metadata(tmp_path / "none.onnx")
    for name, content in (("empty.onnx", b""), ("text.onnx", b"hello world")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ExportError, match="not an ONNX file"):
            read_metadata(tmp_path / name)


def test_input_features_that_pruning_has_left_are_in_the_metadata(tmp_path):
    torch.manual_seed(0)
    model = svdc.convert(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)))
    masks = {name: torch.ones_like(mask) for name, mask in svdc.relevance(model).items()}
    masks["0"][:, [1, 4]] = False
    small = svdc.prune(model, torch.randn(2, 6), masks=masks, remove_inputs=True)
    for made in (small, nn.Sequential(small)):  # bare and inside a wrapper
        path = svdc.export_onnx(made, tmp_path / "small.onnx", torch.randn(2, 4)).path
        assert read_metadata(path)["inputs"] == {"kept": [0, 2, 3, 5], "dim": 1}
    path = svdc.export_onnx(model, tmp_path / "whole.onnx", torch.randn(2, 6)).path
    assert "inputs" not in read_metadata(path)
