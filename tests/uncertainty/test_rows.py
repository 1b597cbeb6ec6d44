"""Draws as rows of one batch: the same as draws by themselves wherever they are made so, and not made so anywhere else."""

import pytest
import torch
from small_models import convnet, mlp, widen
from torch import nn

import svdcompress as svdc
from svdcompress.layers import Rows, StochasticLayer
from svdcompress.uncertainty import _look, _predict, mc_predict
from svdcompress.uncertainty._passes import drawing


class Net(nn.Module):
    """Two layers, and what a test does between them."""

    def __init__(self, between):
        super().__init__()
        self.first, self.second, self.between = nn.Linear(4, 6), nn.Linear(6, 3), between

    def forward(self, x):
        return self.second(self.between(self.first(x), x))


class Table(nn.Module):
    """Learned rows go through a layer, too: exactly as many as the inputs of a look."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.table = nn.Parameter(torch.randn(_look.INPUTS, 4))

    def forward(self, x):
        return self.second(self.first(x) + self.first(self.table).sum(0))


def encoder():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.1)
    return nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Linear(2, 4), layer, nn.Flatten(), nn.Linear(8, 3))


def dropout(gaussian=False):
    made = nn.Sequential(nn.Linear(4, 8), nn.Unflatten(1, (2, 2, 2)), nn.Dropout2d(0.4), nn.Flatten(), nn.Dropout(0.2))
    return svdc.convert_dropout(nn.Sequential(made, nn.Linear(8, 3)), gaussian=gaussian)


def norms():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, 3))


def looked(model, x, task="classification"):
    """What `mc_predict` finds out about a model."""
    seen = []
    original = _predict.look

    def look(*args, **kwargs):
        seen.append(original(*args, **kwargs))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_predict, "look", look)
        prediction = mc_predict(model, x, 400, task=task, generator=torch.Generator().manual_seed(0))
    return seen[0].rowwise, prediction


def by_vmap(model, x, samples=400):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_predict, "WORTH", 10**9)
        return mc_predict(model, x, samples, generator=torch.Generator().manual_seed(0))


ROWWISE = {
    "mlp": lambda: svdc.convert(mlp(4, 6, 6, 3)),
    "norms": lambda: svdc.convert(norms()),
    "transformer": lambda: svdc.convert(encoder()),
    "dropout": dropout,
    "gaussian dropout": lambda: dropout(True),
    "noise after a dense layer": lambda: svdc.convert(mlp(4, 6, 3), exclude=["0"]),
    "constant position": lambda: svdc.convert(Net(lambda h, x: (h + torch.arange(6.0)).tanh())),
}


@pytest.mark.parametrize("inputs", [1, 2, 5, 40])
@pytest.mark.parametrize("name", ROWWISE)
def test_the_same_noise_gives_the_same_draws(name, inputs):
    torch.manual_seed(0)
    model = widen(ROWWISE[name]()).eval()
    x = torch.randn(inputs, 4)
    rowwise, got = looked(model, x)
    assert rowwise
    want = by_vmap(model, x)
    torch.testing.assert_close(got.mean, want.mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.epistemic, want.epistemic, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(got.mutual_information, want.mutual_information, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("channels_last", [False, True])
def test_convolutions(channels_last):
    torch.manual_seed(0)
    model = widen(svdc.convert(convnet()))
    x = torch.randn(7, 1, 8, 8)
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    rows = [mc_predict(model, x, 4000, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    want = by_vmap(model, x, 4000)
    for got in rows:
        assert (got.mean - want.mean).abs().max() < 4.5 * (2 * want.epistemic.max() / 4000).sqrt()
        torch.testing.assert_close(got.epistemic, want.epistemic, rtol=0.2, atol=1e-4)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.cell, self.second = nn.Linear(4, 6), nn.RNN(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(self.cell(self.first(x.unsqueeze(1)))[0].squeeze(1))


REFUSED = {
    "a mean over the batch": lambda: Net(lambda h, x: h - h.mean(0)),
    "a branch on values": lambda: Net(lambda h, x: h * 0 if h.sum() > 1e9 else h),
    "the input's rows": lambda: Net(lambda h, x: h.reshape(len(x), -1)[:, :6]),
    "rows in another order": lambda: Net(lambda h, x: h.reshape(-1, len(x), 6).transpose(0, 1).reshape(-1, 6)),
    "the input joined again": lambda: Net(lambda h, x: torch.cat([h[:, :2], x], 1)),
    "a table of as many rows": Table,
    "a running sum over rows": lambda: Net(lambda h, x: h.cumsum(0)),
    "one number for the batch": lambda: Net(lambda h, x: h + h.mean()),
    "time first": Recurrent,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_rows_would_change_is_drawn_otherwise(name):
    torch.manual_seed(0)
    model = widen(svdc.convert(REFUSED[name]()), dead=0.0)
    rowwise, got = looked(model, torch.randn(5, 4))
    assert not rowwise and got.mean.isfinite().all() and got.epistemic.max() > 0


def test_layers_refuse_other_rows():
    model = svdc.convert(mlp(4, 6, 3)).eval()
    layers = [layer for layer in model.modules() if isinstance(layer, StochasticLayer)]
    with torch.no_grad(), drawing(layers, Rows(5, 3)):
        assert model(torch.randn(5, 4)).shape == (15, 3) and model(torch.randn(15, 4)).shape == (15, 3)
        with pytest.raises(Exception, match="7 rows, not 5 or 3 times that"):
            model(torch.randn(7, 4))


@pytest.mark.parametrize(
    "make", [lambda: svdc.convert(nn.Linear(4, 2)), lambda: svdc.convert_dropout(nn.Sequential(nn.Dropout(0.5)))]
)
def test_antithetic_pairs_are_opposite(make, monkeypatch):
    from svdcompress.uncertainty import _sums

    outputs = []
    original = _sums.RegressionSums.add
    monkeypatch.setattr(
        _sums.RegressionSums, "add", lambda self, output, start: (outputs.append(output), original(self, output, start))
    )
    torch.manual_seed(0)
    model, x = make(), torch.randn(5, 4)
    mc_predict(model, x, 80, task="regression", antithetic=True)
    (draws,) = outputs
    assert draws.shape[0] == 80
    if isinstance(model, StochasticLayer):
        centre = model.eval()(x)
        torch.testing.assert_close(draws[:40] - centre, centre - draws[40:])
    else:  # at a rate of one half, what stays in a draw goes in its opposite
        assert (((draws[:40] == 0) ^ (draws[40:] == 0)) | (x == 0)).all()
    assert len({tuple(draw.flatten().tolist()) for draw in draws}) == 80


class MeanOff(nn.Module):
    on = True

    def forward(self, x):
        return x - x.mean(0) if self.on else x


def test_a_changed_model_is_looked_at_again():
    torch.manual_seed(0)
    model = widen(svdc.convert(mlp(4, 6, 3)))
    x = torch.randn(5, 4)
    assert looked(model, x)[0]
    model[1] = MeanOff()
    assert not looked(model, x)[0]
    model[1].on = False
    assert looked(model, x)[0]
    model[1].on = True
    assert not looked(model, x)[0]


def test_few_draws_do_not_pay_for_a_look():
    calls = []
    model = svdc.convert(mlp(4, 6, 3))
    model.register_forward_pre_hook(lambda module, args: calls.append(1))
    mc_predict(model, torch.randn(5, 4), 10)
    assert len(calls) == 2  # how wide it is, and the draws
    mc_predict(model, torch.randn(5, 4), 10)
    assert len(calls) == 3


def test_answers_do_not_pile_up():
    model = svdc.convert(nn.Linear(4, 2))
    for length in range(_look.KEPT + 10):
        mc_predict(model, torch.randn(2, length + 1, 4), 2, dim=-1)
    assert len(_look._answers[model]) <= _look.KEPT + 1


def test_rows_that_fail_are_drawn_otherwise_from_the_same_noise():
    torch.manual_seed(0)
    model = widen(svdc.convert(Net(lambda h, x: h.relu() if len(h) < 20 else no_room())))
    x = torch.randn(5, 4)
    rowwise, got = looked(model, x)
    assert rowwise
    assert torch.equal(got.mean, by_vmap(model, x).mean)


def no_room():
    raise RuntimeError("no room for as many rows")


def test_members_are_the_same_weights_for_all_inputs_of_many_draws():
    torch.manual_seed(0)
    model, x = widen(svdc.convert(mlp(4, 6, 3))), torch.randn(4, 4)
    got = mc_predict(model, torch.cat([x, x]), 100, members=True, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(got.mean[:4], got.mean[4:])
    got = mc_predict(model, torch.cat([x, x]), 100, generator=torch.Generator().manual_seed(0))
    assert (got.mean[:4] - got.mean[4:]).abs().max() > 1e-4


@pytest.mark.parametrize("samples", [10, 100])
def test_classes_that_are_ruled_out(samples):
    torch.manual_seed(0)
    out = torch.tensor([0.0, 0.0, -torch.inf, 0.0])
    model = widen(svdc.convert(nn.Sequential(nn.Linear(4, 4), Plus(out))))
    got = mc_predict(model, torch.randn(5, 4), samples)
    assert (got.mean[:, 2] == 0).all() and torch.allclose(got.mean.sum(1), torch.ones(5).double())
    assert got.entropy.isfinite().all() and (got.expected_entropy <= got.entropy + 1e-12).all()
    assert (got.expected_entropy > 0).all() and (got.entropy < torch.tensor(3.0).log()).all()


class Plus(nn.Module):
    def __init__(self, constant):
        super().__init__()
        self.register_buffer("constant", constant)

    def forward(self, x):
        return x + self.constant
