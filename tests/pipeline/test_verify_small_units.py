"""The rounding that `svdc verify` allows: a regression's unit may be small, and its metrics are compared relative to it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from svdcompress.pipeline import _checks, _small_checks


class Rows:
    targets = torch.linspace(-3e-8, 3e-8, 100)

    def __len__(self) -> int:
        return 100


def material(scale, **results):
    data = SimpleNamespace(test=Rows(), task="regression", target_scale=scale, dim=1)
    recipe = SimpleNamespace(task="regression")
    opened = SimpleNamespace(data=data, tau=None, dim=1, recipe=recipe, model=None)
    units = SimpleNamespace(tau=lambda tau: tau, model=lambda model: model)
    given = {"opened": opened, "examples": None, "reference": None, "results": results, "units": units, "samples": 400}
    return SimpleNamespace(**given, path=lambda name: name, inputs=lambda path: None, loose=1)


@pytest.mark.parametrize("scale", [None, (1e-9, 2e-8)])
@pytest.mark.parametrize(("found", "right"), [(1e-8, True), (1.0005e-8, True), (2e-8, False), (1e-12, False)])
def test_an_rmse_is_compared_in_its_own_unit(monkeypatch, scale, found, right):
    stored = {"rmse": 1e-8, "nll": -0.01, "r2": 0.5}
    monkeypatch.setattr(_checks, "evaluate", lambda model, test, **what: {**stored, "rmse": found, "nll": -0.0105})
    monkeypatch.setattr(_checks, "OnnxModel", lambda path, units: None)
    checks = list(_checks.errors(material(scale, sparse={"metrics": stored})))
    assert [check.passed for check in checks] == [right, True, True]  # nats are still compared with 1

    for name in ("evaluate", "OnnxModel"):
        monkeypatch.setattr(_small_checks, name, getattr(_checks, name))
    checks = list(_small_checks.small_errors(material(scale, int8={"metrics": stored})))
    assert [check.passed for check in checks] == [right, True, True]


def test_a_fit_without_error_may_be_off_by_the_rounding_of_its_targets(monkeypatch):
    monkeypatch.setattr(_checks, "evaluate", lambda model, test, **what: {"rmse": 2e-5})
    monkeypatch.setattr(_checks, "OnnxModel", lambda path, units: None)
    (check,) = _checks.errors(material((100.0, 3.0), sparse={"metrics": {"rmse": 1e-6}}))
    assert check.passed


@pytest.mark.parametrize(("off", "right"), [(0.0, True), (1e-5, True), (0.5, False)])
def test_monte_carlo_means_are_compared_in_their_own_unit(monkeypatch, off, right):
    mean = torch.tensor([[2e-8], [-1e-8], [0.0]])
    outputs = [SimpleNamespace(name="mean")]
    session = SimpleNamespace(get_outputs=lambda: outputs, get_overridable_initializers=lambda: [SimpleNamespace(name="seed")])
    monkeypatch.setattr(_checks, "open_session", lambda path: session)
    monkeypatch.setattr(_checks, "run", lambda *args, **more: [(mean * (1 + off)).numpy().astype(np.float32)])
    known = SimpleNamespace(mean=mean, epistemic=torch.full_like(mean, 1e-24))
    monkeypatch.setattr(_checks, "mc_predict", lambda *args, **more: known)
    monkeypatch.setattr(_checks, "own_likelihood", lambda *args: SimpleNamespace(probabilities=False))
    (check,) = _checks.monte_carlo(material(None))
    assert check.passed is right
