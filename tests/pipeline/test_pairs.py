"""Means and log variances as a pair or in one tensor beside other outputs: what is trained is what files and promises read."""

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.errors import ModelError
from svdcompress.export import as_given, export_onnx
from svdcompress.likelihoods import Gaussian, HeadsError, gaussian_heads
from svdcompress.pipeline import sets_of
from svdcompress.pipeline._baked import Baked
from svdcompress.pipeline._loss import check_loss
from svdcompress.pipeline._onnx_model import OnnxModel
from svdcompress.recipe import load_recipe
from svdcompress.sources import Data, InMemory

RESULTS = {"promises": {"coverage": {"mean": {"kind": "intervals", "coverage": 0.9, "width": 2.0, "examples": 99}}}}
FORMS = {
    "one": lambda both, other: both,
    "pair": lambda both, other: both.chunk(2, 1),
    "three": lambda both, other: (both, other, other + 1),
    "list": lambda both, other: [both, other, other[:, :1], other + 1],
    "nested": lambda both, other: (both, [other]),
    "dict": lambda both, other: {"logits": both, "other": other},
    "numbered": lambda both, other: {"output": both, "output_1": other},
}


class Several(nn.Module):
    """Means and log variances of two targets, and an output of the same shape that says nothing about them."""

    def __init__(self, form):
        super().__init__()
        torch.manual_seed(0)
        self.both, self.other, self.form = nn.Linear(3, 4), nn.Linear(3, 4), form

    def forward(self, x):
        return self.form(self.both(x), self.other(x))


@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize("target", [None, (50.0, 20.0)])
@pytest.mark.parametrize("form", FORMS)
def test_files_read_the_heads_that_the_loss_reads(tmp_path, form, target, temperature):
    model, x = Several(FORMS[form]).eval(), torch.randn(7, 3)
    mean, log_variance = Gaussian().heads(model(x))
    own = Gaussian(temperature=temperature)
    svdc.set_likelihood(model, own)
    units = Baked(target=target, likelihood=Gaussian())
    held = units.model(model)
    path = export_onnx(held, tmp_path / "model.onnx", x, further=sets_of(RESULTS, "mean", own)).path
    shift, scale = target or (0.0, 1.0)
    deviation = scale * (0.5 * log_variance).exp() * temperature**0.5
    session = onnxruntime.InferenceSession(str(path))
    lower, upper = map(torch.from_numpy, session.run(["lower", "upper"], {"input": x.numpy()}))
    assert torch.allclose(lower, mean * scale + shift - 2 * deviation, rtol=1e-4, atol=1e-4)
    assert torch.allclose(upper, mean * scale + shift + 2 * deviation, rtol=1e-4, atol=1e-4)
    found = Gaussian().heads(OnnxModel(path, units)(x))
    assert torch.allclose(found[0], mean, atol=1e-4)
    assert torch.allclose(found[1], log_variance + np.log(temperature), atol=1e-4)


def test_a_tuple_of_a_file_is_the_models():
    a, b, c = torch.zeros(3, 2, 2).unbind()
    assert as_given({"output": a}) is a and as_given({"output": a, "other": b}) is a
    assert as_given({"output": a, "output_1_0": b}) is a and as_given({"output": b, "output_0": a}) is b
    assert as_given({"output": a, "output_1": b, "output_2": c}) == (a, b, c)


def test_two_tensors_and_nothing_are_refused():
    """A file leaves None out, so it would hold a pair where the loss reads the first tensor."""
    values = torch.zeros(5, 4)
    with pytest.raises(HeadsError, match="cannot tell what two tensors and None are; return mean and log variance as a pair"):
        gaussian_heads((values, values, None))
    mean, _ = gaussian_heads((values, None))
    assert mean.shape == (5, 2)


@pytest.mark.parametrize("targets", [1, 2])
def test_a_pair_beside_others_is_told_what_to_do_before_training(targets):
    examples = InMemory(torch.randn(6, 3), torch.randn(6, targets))
    recipe = load_recipe(None, ["model=./mine.py:make", "loss=gaussian-nll"])
    data = Data(examples, examples, examples, recipe.task, targets)
    model = Several(lambda both, other: (both[:, :targets], both[:, 2 : 2 + targets], other)).eval()
    with pytest.raises(ModelError, match="return mean and log variance as a pair and nothing else, or both in one tensor"):
        check_loss(model, recipe, data, examples.targets, model(examples.inputs))
