"""The inputs for checks of a run's files: noise if the data are missing, and a seed."""

from types import SimpleNamespace

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from svdcompress import convert, export_onnx
from svdcompress.pipeline._checks import Material, Skip, monte_carlo


class Gone:
    """A run whose data are missing."""

    preprocessing, recipe, dim = {}, SimpleNamespace(task="regression"), 1

    @property
    def data(self):
        raise FileNotFoundError("digits.npz")


@pytest.fixture
def file(tmp_path):
    def made(*shape):
        ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *shape]) for name in ("x", "y")]
        graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", ends[:1], ends[1:])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        onnx.save(model, tmp_path / "model.onnx")
        return tmp_path / "model.onnx"

    return made


def test_noise_of_the_files_shape(file):
    found = Material(Gone(), {}, rows=3).inputs(file(4, 5))
    assert found.shape == (3, 4, 5) and float(found.std()) > 0.5
    assert torch.equal(found, Material(Gone(), {}, rows=3).inputs(file(4, 5)))


def test_a_shape_that_is_open_leaves_nothing_to_try(file):
    with pytest.raises(Skip, match=r"no inputs to try it with: digits\.npz"):
        Material(Gone(), {}).inputs(file(4, "length"))


def test_a_run_that_has_its_model_needs_its_data(file):
    with pytest.raises(FileNotFoundError):
        Material(Gone(), {}, reference=torch.nn.ReLU()).inputs(file(4, 5))


def test_the_monte_carlo_file_is_asked_with_its_seed(tmp_path):
    torch.manual_seed(0)
    run = Gone()
    run.folder, run.tau, run.model = tmp_path, None, convert(torch.nn.Linear(4, 2), log_sigma2=-1.0).eval()
    export_onnx(run.model, tmp_path / "model_mc.onnx", torch.randn(2, 4), monte_carlo=True, task="regression")
    found = [[check.found for check in monte_carlo(Material(run, {}, rows=3, samples=20))] for _ in range(2)]
    assert found[0] == found[1] and len(found[0]) == 1
