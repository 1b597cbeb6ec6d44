"""The instruments of benchmarks/real_nets.py: fitted noise, differences with their intervals, results of several processes."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from sklearn.metrics import r2_score

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
NAMES = [file.stem for file in BENCHMARKS.iterdir()]


@pytest.fixture
def module(monkeypatch):
    """Imports a file of benchmarks/; what it takes along is forgotten again, as other tests have files of the same names."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    known = {name: sys.modules.pop(name, None) for name in NAMES}
    yield importlib.import_module
    for name, earlier in known.items():
        sys.modules.pop(name, None)
        if earlier is not None:
            sys.modules[name] = earlier


@pytest.fixture
def figures(module):
    return module("real_nets_figures")


def predictions(rng, targets, spread):
    """Means and deviations that know, by their size, how far off they are."""
    deviation = rng.uniform(0.2, 2.0, len(targets)) * spread
    return targets + deviation * rng.standard_normal(len(targets)), deviation


def each(means, deviation, targets):
    error = torch.from_numpy(np.abs(means - targets))
    spread = torch.tensor(targets.var())
    return {"square": error**2, "spread": spread, "error": error, "deviation": torch.from_numpy(deviation)}


def test_noise_is_what_makes_the_targets_likeliest(figures):
    rng = np.random.default_rng(0)
    target, variance = rng.standard_normal(400), rng.uniform(0.0, 0.2, 400)
    mean = target + np.sqrt(variance + 0.3) * rng.standard_normal(400)
    wanted = optimize.minimize_scalar(
        lambda extra: -stats.norm(mean, np.sqrt(variance + extra)).logpdf(target).mean(), bounds=(1e-3, 3), method="bounded"
    )
    found = figures.noise(*(torch.from_numpy(part) for part in (mean, variance, target)))
    assert found == pytest.approx(wanted.x, rel=0.02)


def test_differences_are_those_of_the_figures(figures):
    rng = np.random.default_rng(1)
    targets = rng.standard_normal(500)
    (ours, deviation), (other, doubt) = (predictions(rng, targets, spread) for spread in (0.4, 0.6))
    doubt = 0.7 * rng.permutation(doubt)  # no idea of its own error, and too sure
    found = figures.beside(each(ours, deviation, targets), each(other, doubt, targets))
    wanted = {
        "r2_ahead": r2_score(targets, ours) - r2_score(targets, other),
        "coverage_ahead": np.mean((targets >= ours - 1.6449 * deviation) & (targets <= ours + 1.6449 * deviation))
        - np.mean((targets >= other - 1.6449 * doubt) & (targets <= other + 1.6449 * doubt)),
        "spearman_ahead": stats.spearmanr(deviation, abs(ours - targets))[0] - stats.spearmanr(doubt, abs(other - targets))[0],
    }
    assert found.keys() == wanted.keys()
    for key, difference in wanted.items():
        middle, low, high = found[key]
        assert middle == pytest.approx(difference, abs=1e-12)
        assert 0 < low < middle < high < low + 0.3


def test_a_network_is_not_ahead_of_itself(figures):
    rng = np.random.default_rng(2)
    targets = rng.standard_normal(50)
    own = each(*predictions(rng, targets, 0.4), targets)
    assert figures.beside(own, own) == {key: [0.0] * 3 for key in ("r2_ahead", "coverage_ahead", "spearman_ahead")}


def test_what_was_not_measured_is_not_compared(figures):
    rng = np.random.default_rng(3)
    targets = rng.standard_normal(20)
    own = each(*predictions(rng, targets, 0.4), targets)
    means_alone = {key: own[key] for key in ("square", "spread")}
    fewer = own | {key: own[key][:10] for key in ("error", "deviation")}
    assert figures.beside({}, {}) == {}
    assert figures.beside(own, means_alone).keys() == figures.beside(own, fewer).keys() == {"r2_ahead"}


def test_processes_add_to_the_same_network(module, tmp_path, monkeypatch):
    real_nets = module("real_nets")
    monkeypatch.setattr(real_nets, "table", lambda results: ", ".join(results["crepe"]["nets"]))
    path = tmp_path / "real_nets.json"
    first, second = ({"nets": {"ours": {"macs": 1}}} for _ in range(2))
    real_nets.store(path, "crepe", first)
    second["nets"]["tiny"] = {"macs": 2}
    real_nets.store(path, "crepe", second)
    first["nets"]["ours"] = {"macs": 3}  # made anew: what a process holds is newer than what it read
    real_nets.store(path, "crepe", first)
    real_nets.store(path, "suzuki-0", {"nets": {"ours": {}}})
    assert json.loads(path.read_text()) == {
        "crepe": {"nets": {"ours": {"macs": 3}, "tiny": {"macs": 2}}},
        "suzuki-0": {"nets": {"ours": {}}},
    }
    assert path.with_suffix(".md").read_text() == "ours, tiny"
