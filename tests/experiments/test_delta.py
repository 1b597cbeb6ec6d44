"""The delta method against the inverse of the whole GGN, and how the experiments use it."""

import math

import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.experiments import Context
from svdcompress.experiments import _co2 as co2
from svdcompress.experiments import _curve as curve
from svdcompress.experiments import _rotated_digit as rotated
from svdcompress.experiments._delta import Delta, ard_variance, jacobian, weights, weights_of
from svdcompress.uncertainty import Prediction


def sparse_net():
    torch.manual_seed(0)
    model = svdc.convert(nn.Sequential(nn.Linear(2, 7), nn.Tanh(), nn.Linear(7, 1)), log_sigma2=-6.0)
    with torch.no_grad():
        model[0].log_sigma2[2:5] = 6.0  # irrelevant
    return model.eval()


def test_derivatives_are_differences():
    model, x = sparse_net().double(), torch.randn(4, 2, dtype=torch.float64)
    which = weights_of(model)
    assert set(which) == {"0.weight", "0.bias", "2.weight", "2.bias"} and which["0.weight"].sum() < 10
    assert set(weights_of(model, biases=False)) == {"0.weight", "2.weight"}
    got = jacobian(model, x, which)
    columns, step = [], 1e-6
    for name, p in model.named_parameters():
        for place in which.get(name, torch.zeros(1, dtype=torch.bool)).nonzero():
            at = tuple(place.tolist())
            with torch.no_grad():
                value = float(p[at])
                p[at] = value + step
                above = model(x)[:, 0].clone()
                p[at] = value - step
                columns.append((above - model(x)[:, 0]) / (2 * step))
                p[at] = value
    torch.testing.assert_close(got, torch.stack(columns, 1).detach(), atol=1e-7, rtol=1e-5)


def test_variances_and_evidence_are_those_of_the_whole_matrix():
    generator = torch.Generator().manual_seed(0)
    slopes, at = torch.randn(9, 14, generator=generator).double(), torch.randn(5, 14, generator=generator).double()
    prior, own = torch.rand(14, generator=generator).double() + 0.1, torch.randn(14, generator=generator).double()
    delta, tau = Delta(slopes, prior, own), 7.0
    for scale in (0.01, 1.0, 30.0):
        precision = tau * slopes.T @ slopes + torch.diag(1 / (scale * prior))
        want = (at @ torch.linalg.inv(precision) * at).sum(1)
        torch.testing.assert_close(delta.variance(at, scale, tau), want)
    laplace = lambda scale: (  # noqa: E731 (log prior at the weights, less half the log determinant of the Hessian)
        torch.distributions.Normal(0, (scale * prior).sqrt()).log_prob(own).sum()
        - 0.5 * torch.logdet(tau * slopes.T @ slopes + torch.diag(1 / (scale * prior)))
    )
    assert delta.evidence(3.0, tau) - delta.evidence(0.2, tau) == pytest.approx(float(laplace(3.0) - laplace(0.2)))
    best = delta.best_scale(tau)
    assert all(delta.evidence(best, tau) >= delta.evidence(best * factor, tau) for factor in (0.7, 0.9, 1.1, 1.4))


def test_variances_by_group_have_the_most_evidence():
    """A step up or down of any group's variance lowers the evidence; the weights differ in scale between groups."""
    generator = torch.Generator().manual_seed(0)
    slopes = torch.randn(30, 14, generator=generator).double()
    groups = torch.arange(14) // 5  # groups of 5, 5 and 4
    own = torch.tensor([0.1, 1.0, 5.0]).double()[groups] * torch.randn(14, generator=generator).double()
    tau = 4.0
    found = Delta(slopes, torch.ones(14).double(), own).by_group(groups, tau)
    variances = torch.stack([found.prior[groups == group].unique() for group in range(3)])
    assert variances.shape == (3, 1) and variances[0] < variances[1] < variances[2]
    best = found.evidence(1.0, tau)
    for group in range(3):
        for step in (0.7, 0.97, 1.03, 1.4):
            other = torch.where(groups == group, step * found.prior, found.prior)
            assert Delta(slopes, other, own).evidence(1.0, tau) < best
    together = Delta(slopes, torch.ones(14).double(), own)
    assert together.evidence(together.best_scale(tau), tau) < best


def test_of_a_linear_model_it_is_the_exact_posterior():
    torch.manual_seed(0)
    x, model = torch.randn(30, 4).double(), svdc.convert(nn.Linear(4, 1, bias=False), log_sigma2=-12.0).double().eval()
    which = weights_of(model)
    delta = Delta(jacobian(model, x, which), ard_variance(model, which), weights(model, which))
    lambda2 = model.weight[0].detach().square() + model.log_sigma2[0].detach().exp()
    exact = torch.linalg.inv(4.0 * x.T @ x + torch.diag(1 / lambda2))
    new = torch.randn(6, 4).double()
    want = torch.einsum("np,pq,nq->n", new, exact, new)
    torch.testing.assert_close(delta.variance(jacobian(model, new, which), 1.0, 4.0), want)


def test_the_gaussian_process_is_unsure_away_from_the_data():
    pytest.importorskip("sklearn")
    x = torch.linspace(-3, 3, 40)[:, None]
    y = (2 * x).sin() + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    found = co2.gaussian_process(x, y, torch.tensor([[0.0], [1.0], [6.0], [30.0]]))
    assert float((found.mean[:2, 0] - torch.tensor([0.0, math.sin(2.0)]).double()).abs().max()) < 0.15
    std = found.epistemic_std[:, 0].tolist()
    assert max(std[:2]) < 0.1 < std[2] < std[3] * 1.001


def test_coverage_of_the_curve_is_counted():
    found = curve.data(50, torch.Generator().manual_seed(0))
    assert found.x.abs().min() >= curve.GAP and found.x.abs().max() <= curve.END and (found.x < 0).any() and (found.x > 0).any()
    off = torch.where(found.at.abs() < 0.5, 0.5, 0.1)  # distance of the mean from the truth
    variance = torch.full_like(off, 0.04).double()
    prediction = Prediction(
        "regression", 1, (curve.truth(found.at) + off).double(), variance, torch.zeros_like(variance), variance
    )
    figures = curve.judge(prediction, found)
    assert figures["coverage, beyond"] == 1 and figures["band, in the gap"] == pytest.approx(0.2)
    assert figures["coverage, in the gap"] == pytest.approx(0.5, abs=0.03)


@pytest.mark.slow
def test_ensembles_and_the_delta_method_know_the_gap(tmp_path):
    torch.manual_seed(0)
    found = curve.run(150, 600, 50, Context(tmp_path))
    assert (tmp_path / "curve.png").is_file() and len(found["curve"]) == 5
    for name in ("deep ensemble of 5", "delta method, dense", "delta method, sparse"):
        figures = found["curve"][name]
        assert figures["band, in the gap"] > 2 * figures["band, where the data are"], name
        assert figures["band, beyond"] > 2 * figures["band, where the data are"], name
    assert found["curve"]["delta method, dense"]["coverage, in the gap"] > 0.9
    assert found["curve_sparsity"]["compression"] > 2


def test_variances_are_widened_until_held_out_digits_object():
    torch.manual_seed(0)
    y = torch.randint(0, 3, (400,))
    x = torch.randn(400, 2) + 4 * torch.tensor([[0.0, 1.0], [1.0, 0.0], [-1.0, -1.0]])[y]
    model = nn.Sequential(nn.Linear(2, 12), nn.ReLU(), nn.Linear(12, 3))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    sparse = svdc.convert(model, log_sigma2=-9.0).eval()
    wide, factor, curve_ = rotated.widened(sparse, x, y, 0)
    assert 1 < factor < max(curve_) and set(curve_) == set(rotated.FACTORS)
    assert curve_[max(curve_)] > 1.5 * min(curve_.values())  # far too wide
    torch.testing.assert_close(wide[0].log_sigma2, sparse[0].log_sigma2 + math.log(factor))
    torch.testing.assert_close(wide(x), sparse(x))  # the mean and the masks are unchanged
    few = svdc.mc_predict(sparse, x * 0.1, 200).mutual_information.mean()
    assert svdc.mc_predict(wide, x * 0.1, 200).mutual_information.mean() > 2 * few
