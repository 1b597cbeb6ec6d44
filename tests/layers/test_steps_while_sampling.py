"""Weights that change within a `sampling` context are the ones that the next call draws with, whatever changed them."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

import svdcompress as svdc


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("options", [{}, {"members": True}, {"local": True}], ids=["calls", "members", "local"])
def test_a_step_between_two_evaluations_is_seen(options, fused):
    torch.manual_seed(0)
    model = svdc.convert(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)), log_sigma2=-30.0).eval()
    optimizer = torch.optim.Adam(model.parameters(), 0.1, fused=fused)
    x = torch.randn(6, 8)
    hooks = len(_global_optimizer_post_hooks)
    with svdc.sampling(model, **options):
        model(x).square().sum().backward()
        with torch.no_grad():
            before = model(x)
            optimizer.step()
            after = model(x)
    assert len(_global_optimizer_post_hooks) == hooks
    with torch.no_grad():
        torch.testing.assert_close(after, model(x), atol=1e-4, rtol=0)
    assert (after - before).abs().max() > 0.1
