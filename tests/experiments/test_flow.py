"""The simulated wakes, and their reconstruction from a few sensors."""

import pytest
import torch

from svdcompress.experiments import _flow as flow
from svdcompress.experiments import run
from svdcompress.experiments._common import Context


def test_wakes_lose_no_mass_and_turn():
    x = flow.wakes(200, torch.Generator().manual_seed(0)).double()
    assert x.shape == (200, 2, 32, 32) and x.isfinite().all()
    along, across = x[:, 0, 1:-1, 2:] - x[:, 0, 1:-1, :-2], x[:, 1, 2:, 1:-1] - x[:, 1, :-2, 1:-1]
    assert (along + across).abs().mean() < 0.06 * along.abs().mean()  # the error of the second-order grid
    assert 0.7 < float(x[:, 0].mean()) < 1.1 and abs(float(x[:, 1].mean())) < 0.1
    again = flow.wakes(200, torch.Generator().manual_seed(0)).double()
    assert torch.equal(x, again)


def test_sensors_read_the_field_where_they_are():
    x = flow.wakes(300, torch.Generator().manual_seed(1))
    at = flow.places(4)
    assert at.shape == (4, 2) and len({tuple(place) for place in at.tolist()}) == 4 and int(at.max()) < 32
    seen = flow.measured(x, at, torch.Generator().manual_seed(0))
    for sensor, (row, column) in enumerate(at.tolist()):
        for velocity in (0, 1):
            noise = seen[:, 4 * velocity + sensor] - x[:, velocity, row, column]
            assert float(noise.std()) == pytest.approx(flow.SENSOR_NOISE, rel=0.2)


def test_the_bound_is_torchs():
    torch.manual_seed(0)
    model, rows = flow.FlowVae(3, 2).eval(), torch.randn(5, 2 * 32 * 32 + 4)
    mean, q, p, log_noise = model(rows)
    normal = lambda both: torch.distributions.Normal(both[:, :3], (0.5 * both[:, 3:]).exp())  # noqa: E731
    nll = -torch.distributions.Normal(mean, (0.5 * log_noise).exp()).log_prob(rows[:, :-4].view(5, 2, 32, 32)).flatten(1).sum(1)
    want = (nll + torch.distributions.kl_divergence(normal(q), normal(p)).sum(1)).mean()
    torch.testing.assert_close(flow.bound((mean, q, p, log_noise), rows), want, rtol=1e-5, atol=1e-2)


def test_least_squares_is_exact_where_the_field_is_linear_in_the_sensors():
    generator = torch.Generator().manual_seed(0)
    seen = torch.randn(200, 6, generator=generator)
    x = (seen @ torch.randn(6, 2 * 32 * 32, generator=generator) + 3).view(200, 2, 32, 32)
    mean, std = flow.least_squares(x[:150], seen[:150], seen[150:])
    figures = flow.judge(mean, std.clamp_min(1e-3), x[150:])
    assert figures["relative_error"] < 1e-4 and figures["covered"] == 1
    blind = flow.judge(x.mean(0).double().expand_as(x), torch.ones_like(x).double(), x)
    assert blind["relative_error"] == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_fields_come_back_from_five_sensors(tmp_path):
    results = run("flow", {"fields": 2400, "epochs": 16, "sparse_epochs": 12}, Context(tmp_path / "flow"))
    for name in ("dense", "sparse"):
        figures = results["models"][name]
        assert figures["relative_error"] < 0.6 and 0.85 < figures["covered"] <= 1, name
    assert results["sparsity"]["compression"] > 1.2 and (tmp_path / "flow" / "flow.png").is_file()
