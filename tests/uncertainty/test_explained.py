"""R2 against its definition, written by hand in numpy."""

import numpy as np
import pytest
import torch
from torch import nn

from svdcompress.sources._examples import InMemory
from svdcompress.train import evaluate
from svdcompress.uncertainty import Explained, compare, r2


def by_hand(mean, target):
    """The mean over columns of 1 - SS_res / SS_tot; constant columns are left out."""
    found = []
    for j in range(target.shape[1]):
        t, m = target[:, j].astype(np.float64), mean[:, j].astype(np.float64)
        if len(set(t.tolist())) > 1:
            found.append(1 - sum((t - m) ** 2) / sum((t - sum(t) / len(t)) ** 2))
    return sum(found) / len(found) if found else None


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("size", [1, 7, 50])
def test_of_batches_it_is_that_of_all(outputs, size):
    rng = np.random.default_rng(0)
    target = 1e4 + rng.normal(size=(50, outputs)) * [[0.1, 5, 100][:outputs]]  # far from 0 compared with its spread
    mean = target + rng.normal(size=target.shape)
    seen = Explained()
    for at in range(0, 50, size):
        seen.add(torch.from_numpy(mean[at : at + size]), torch.from_numpy(target[at : at + size]))
    assert seen.r2 == pytest.approx(by_hand(mean, target), rel=1e-9)
    assert r2(torch.from_numpy(mean), torch.from_numpy(target)) == pytest.approx(seen.r2, rel=1e-12)


def test_it_has_no_unit_and_the_blind_answer_has_0():
    target, noise = torch.randn(40, 2).double(), torch.randn(40, 2).double()
    plain = r2(target + 0.3 * noise, target)
    assert plain == pytest.approx(r2((target + 0.3 * noise) * 250 - 7, target * 250 - 7), rel=1e-12)
    assert r2(target.mean(0).expand_as(target), target) == pytest.approx(0, abs=1e-12)
    assert r2(target, target) == 1 and r2(-target, target) < 0


def test_where_nothing_varies_there_is_none():
    constant, varying = torch.full((9, 1), 0.1), torch.arange(9.0)[:, None]
    assert r2(torch.zeros(9, 1), constant) is None and Explained().r2 is None
    both = torch.cat([constant, varying], 1)
    assert r2(both + 1, both) == pytest.approx(by_hand((both + 1).numpy(), both.numpy()))
    seen = Explained().add(torch.zeros(2, 3), torch.rand(2, 3)).add(torch.zeros(2, 4), torch.rand(2, 4))
    assert seen.r2 is None
    counts = torch.tensor([1.0, 1, 1, 0])
    values = torch.tensor([1.0, 2, 4, 99])
    assert Explained().add(values + 1, values, counts).r2 == pytest.approx(
        by_hand(*[v[:3, None].numpy() for v in (values + 1, values)])
    )


@pytest.mark.parametrize(("task", "outputs"), [("regression", 1), ("regression", 3), ("gaussian", 4)])
def test_evaluate_has_it_and_standardised_targets_have_the_same(task, outputs):
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, outputs), torch.randn(60, 3), torch.randn(60, outputs // 2 if task == "gaussian" else outputs)
    with torch.no_grad():
        mean = model(x)[:, : y.shape[1]].numpy()
    own = evaluate(model, InMemory(x, y), task, batch_size=7, scale=(50.0, 20.0))
    expected = by_hand(50 + 20 * mean, 50 + 20 * y.numpy())  # in the target's own units
    assert own["r2"] == pytest.approx(expected, rel=1e-4) and set(own) == {"rmse", "nll", "r2"}
    assert own["r2"] == evaluate(model, InMemory(x, y), task, batch_size=7)["r2"]
    assert evaluate(model, InMemory(x, torch.ones_like(y)), task)["r2"] is None
    assert "r2" not in evaluate(nn.Linear(3, 1), InMemory(x, (y[:, :1] > 0).float()), "binary")


def test_each_contender_of_a_comparison_has_it():
    import svdcompress as svdc

    torch.manual_seed(0)
    dense = nn.Linear(3, 2).eval()
    sparse = svdc.convert(nn.Linear(3, 2)).eval()
    x, y = torch.randn(40, 3), torch.randn(40, 2)

    def batches():
        return [(x[at : at + 16], y[at : at + 16]) for at in range(0, 40, 16)]

    found = compare(dense, sparse, batches, batches, task="regression", samples=3, scale=12.0, replicates=40)
    with torch.no_grad():
        means = {"dense": dense(x), "sparse, mean": sparse(x)}
    rows = {row["name"]: row["metrics"] for row in found["contenders"]}
    for name, mean in means.items():
        assert rows[name]["r2"] == pytest.approx(by_hand(mean.numpy(), y.numpy()), rel=1e-5)
    assert rows["sparse, samples"]["r2"] < 1
