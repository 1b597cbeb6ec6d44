"""Models whose outputs have a different number of rows: refused, so that zeros do not stand for inputs never predicted."""

import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.errors import ModelError
from svdcompress.uncertainty import ensemble_predict, mc_predict, mean_predict


class Bag(nn.Module):
    """One answer for all rows together."""

    def __init__(self, rows=1):
        super().__init__()
        self.rows, self.inner, self.head = rows, nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(torch.relu(self.inner(x)).mean(0, keepdim=True)).repeat(self.rows, 1)


def bag(rows=1):
    return svdc.convert(Bag(rows), log_sigma2=-3.0).eval()


@pytest.mark.parametrize(
    "predict",
    [
        lambda model, x: mc_predict(model, x, 4),
        lambda model, x: mc_predict(model, x, 4, members=True),
        lambda model, x: mc_predict(model, x, 4, task="regression"),
        lambda model, x: mean_predict(model, x),
        lambda model, x: ensemble_predict([model], x, task="classification"),
    ],
    ids=["draws", "members", "regression", "mean", "ensemble"],
)
@pytest.mark.parametrize("rows", [1, 2, 20])
def test_other_rows_than_inputs_are_refused(predict, rows):
    with pytest.raises(ModelError, match=rf"output has {rows} rows? for 5 inputs"):
        predict(bag(rows), torch.randn(5, 8))


def test_a_bag_that_is_too_large_for_one_pass_is_not_cut():
    """Each slice would be a separate bag."""
    for call in (mean_predict, lambda model, x: mc_predict(model, x, 2, chunk=1)):
        with pytest.raises(ModelError, match=r"output has 1 row for 8 inputs"):
            call(bag(), torch.randn(4000, 8))


class Short(nn.Module):
    """At most twenty answers, however many inputs there are."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 3)

    def forward(self, x):
        return self.inner(x)[:20]


@pytest.mark.parametrize("method", ["sampling", "moments", "mean"])
def test_rows_that_are_missing_in_large_passes_only_are_missed(method):
    model, x = svdc.convert(Short(), log_sigma2=-3.0).eval(), torch.randn(30, 8)
    with pytest.raises(ModelError, match=r"output has 20 rows for 30 inputs"):
        mean_predict(model, x) if method == "mean" else mc_predict(model, x, 4, method=method)


def test_a_single_number_is_no_row():
    class Total(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 2)

        def forward(self, x):
            return self.inner(x).sum()

    with pytest.raises(ModelError, match="a single number for 5 inputs"):
        mc_predict(svdc.convert(Total(), log_sigma2=-3.0), torch.randn(5, 8), 4, task="regression")


def test_one_bag_is_one_input():
    model, x = bag(), torch.randn(1, 8)
    want = torch.softmax(model(x).double(), 1)
    torch.testing.assert_close(mean_predict(model, x).mean, want, rtol=1e-5, atol=1e-7)
    assert mc_predict(model, x, 4).mean.shape == (1, 3)


@pytest.mark.parametrize("task", ["regression", "gaussian", "classification"])
@pytest.mark.parametrize("widths", [(1, 2000), (2000, 1), (700, 1300, 1)])
def test_an_ensemble_of_several_widths_counts_each_row_of_each_model(task, widths):
    """A wide model's passes have fewer rows, so that some begin within those that a narrow one has filled."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2)) for width in widths]
    x = torch.randn(2500, 2)
    found = ensemble_predict(models, x, task=task)
    with torch.no_grad():
        each = torch.stack([mean_predict(model, x, task=task).mean for model in models])
    torch.testing.assert_close(found.mean, each.mean(0))
    torch.testing.assert_close(found.epistemic, each.var(0, unbiased=False))
