"""Variances at or near 0: no visible noise at any scale, and finite gradients."""

import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.uncertainty import mc_predict


@pytest.mark.parametrize("members", [False, True])
def test_an_irrelevant_column_of_large_numbers_has_no_noise(members):
    """For example seconds since 1970, which a mask leaves out."""
    model = svdc.convert(nn.Sequential(nn.Linear(2, 1, bias=False)), log_sigma2=-4.0).eval()
    model[0].weight.data = torch.tensor([[0.0, 1.0]])
    got = mc_predict(model, torch.tensor([[1.7e9, 1.0]]), 2000, task="regression", members=members)
    assert float(got.std) == pytest.approx(torch.exp(torch.tensor(-2.0)).item(), rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("members", [False, True])
def test_outputs_next_to_0_have_noise_of_their_own_size(members, dtype):
    torch.manual_seed(0)
    model = svdc.convert(nn.Sequential(nn.Linear(10, 1, bias=False)).to(dtype), log_sigma2=-6.0).eval()
    svdc.hold(model, {"0": torch.ones(1, 10, dtype=torch.bool)})
    x = 1e-9 * torch.randn(4, 10, dtype=dtype)
    got = mc_predict(model, x, 3000, task="regression", members=members)
    want = (x.double().square().sum(1) * torch.exp(torch.tensor(-6.0).double())).sqrt()
    torch.testing.assert_close(got.std[:, 0], want, rtol=0.1, atol=0)


@pytest.mark.parametrize("posterior", ["independent", "rank-one"])
@pytest.mark.parametrize("mode", ["train", "sampling", "members"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_where_the_variance_is_0(posterior, mode, dtype):
    torch.manual_seed(0)
    layer = svdc.convert(nn.Linear(5, 3).to(torch.float32), log_sigma2=-4.0, posterior=posterior).to(dtype)
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[0] = False  # an output without any weights
    svdc.hold(layer, {"": mask})
    x = torch.randn(4, 5, dtype=dtype)
    x[1] = 0  # an all-zero example
    x[2] = 1e-25  # its square is 0 in float32
    x.requires_grad_()
    if mode == "train":
        y = layer.train()(x)
    else:
        with svdc.sampling(layer.eval(), members=mode == "members"):
            y = layer(x)
    (1e4 * y.square().sum() + 1e4 * y.sum()).backward()
    for value in (x, *layer.parameters()):
        assert value.grad is not None and bool(value.grad.isfinite().all())


def test_models_side_by_side_under_vmap():
    models = [svdc.convert(nn.Sequential(nn.Linear(4, 3)), share=["weight", "input"]).eval() for _ in range(3)]
    for index, model in enumerate(models):
        model[0].log_sigma2.data[:, index] = 9.0
    parameters, buffers = torch.func.stack_module_state(models)
    x = torch.randn(5, 4)
    got = torch.func.vmap(lambda p, b: torch.func.functional_call(models[0], (p, b), (x,)))(parameters, buffers)
    torch.testing.assert_close(got, torch.stack([model(x) for model in models]))
