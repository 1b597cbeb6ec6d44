"""Draws as rows of one batch: equal to separate draws where this is valid, and not used anywhere else."""

import pytest
import torch
from small_models import convnet, mlp, widen
from torch import nn

import svdcompress as svdc
from svdcompress.errors import DataError
from svdcompress.layers import Rows, StochasticLayer, drawing, stochastic_layers
from svdcompress.layers._rows import NotRows
from svdcompress.uncertainty import _predict, mc_predict
from svdcompress.uncertainty._chain import width
from svdcompress.uncertainty._look import look


def dropout(gaussian=False):
    made = nn.Sequential(nn.Linear(4, 8), nn.Unflatten(1, (2, 2, 2)), nn.Dropout2d(0.4), nn.Flatten(), nn.Dropout(0.2))
    return svdc.convert_dropout(nn.Sequential(made, nn.Linear(8, 3)), gaussian=gaussian)


def norms():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, 3))


def by_vmap(model, x, samples=60, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_predict, "rowwise", lambda model, x: False)
        return mc_predict(model, x, samples, generator=torch.Generator().manual_seed(0), **options)


def flags():
    model = nn.Sequential(nn.Linear(4, 6), nn.Softplus(), nn.Linear(6, 6), nn.LogSoftmax(-1), nn.Linear(6, 3))
    return nn.Sequential(nn.Identity(), model)


ROWWISE = {
    "mlp": lambda: svdc.convert(mlp(4, 6, 6, 3)),
    "norms": lambda: svdc.convert(norms()),
    "nested": lambda: svdc.convert(flags()),
    "dropout": dropout,
    "gaussian dropout": lambda: dropout(True),
    "noise after a dense layer": lambda: svdc.convert(mlp(4, 6, 3), exclude=["0"]),
}


@pytest.mark.parametrize("options", [{}, {"chunk": 37}, {"full": True}], ids=str)
@pytest.mark.parametrize("inputs", [1, 2, 5, 40])
@pytest.mark.parametrize("name", ROWWISE)
def test_the_same_noise_gives_the_same_draws(name, inputs, options):
    torch.manual_seed(0)
    model = widen(ROWWISE[name]()).eval()
    x = torch.randn(inputs, 4)
    assert _predict.rowwise(model, x)
    got = mc_predict(model, x, 60, generator=torch.Generator().manual_seed(0), **options)
    want = by_vmap(model, x, **options)
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
    assert _predict.rowwise(model, x)
    rows = [mc_predict(model, x, 4000, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    want = by_vmap(model, x, 4000)
    for got in rows:
        assert (got.mean - want.mean).abs().max() < 4.5 * (2 * want.epistemic.max() / 4000).sqrt()
        torch.testing.assert_close(got.epistemic, want.epistemic, rtol=0.2, atol=1e-4)


class Own(nn.Sequential):
    """A chain, but with a custom `forward` whose effect is unknown."""


def hooked(kind):
    model = mlp(4, 6, 3)
    getattr(model[1], f"register_{kind}_hook")(lambda module, args, *output: None)
    return model


def patched():
    model = mlp(4, 6, 3)
    model[1].forward = lambda h: h - h.mean(0)
    return model


class MeanOff(nn.Module):
    def forward(self, h):
        return h - h.mean(0)


REFUSED = {
    "a module of one's own": lambda: nn.Sequential(nn.Linear(4, 6), MeanOff(), nn.Linear(6, 3)),
    "a chain of one's own": lambda: Own(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)),
    "statistics of the batch": lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False)),
    "a softmax over rows": lambda: nn.Sequential(nn.Linear(4, 6), nn.Softmax(0), nn.Linear(6, 3)),
    "rows flattened": lambda: nn.Sequential(nn.Linear(4, 6), nn.Flatten(0), nn.Unflatten(0, (-1, 6)), nn.Linear(6, 3)),
    "rows taken apart": lambda: nn.Sequential(nn.Linear(4, 6), nn.Unflatten(0, (-1, 1)), nn.Flatten(0, 1), nn.Linear(6, 3)),
    "a hook": lambda: hooked("forward"),
    "a hook ahead": lambda: hooked("forward_pre"),
    "a forward put in its place": patched,
    "a recurrence": lambda: nn.Sequential(nn.Linear(4, 6), nn.RNN(6, 6)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_rows_might_change_is_drawn_otherwise(name):
    torch.manual_seed(0)
    model = widen(svdc.convert(REFUSED[name]()), dead=0.0)
    assert not _predict.rowwise(model, torch.randn(5, 4))
    if "batch" in name or "own" in name or "place" in name:
        got = mc_predict(model, torch.randn(5, 4), 50)
        assert got.mean.isfinite().all() and got.epistemic.max() > 0


@pytest.mark.parametrize(("shape", "batches"), [((7, 3, 8, 8), True), ((3, 8, 8), False), ((3,), False)])
def test_one_input_without_a_batch_is_no_batch_of_its_channels(shape, batches):
    model = svdc.convert(nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU()))
    assert _predict.rowwise(model, torch.randn(shape)) is batches
    if not batches and len(shape) == 3:
        with torch.no_grad(), drawing(stochastic_layers(model.eval()), Rows(3, 2)), pytest.raises(NotRows):
            model(torch.randn(shape))


def test_several_inputs_are_drawn_otherwise():
    x = torch.randn(5, 4)
    model = svdc.convert(mlp(4, 3))
    assert not _predict.rowwise(model, (x,)) and not _predict.rowwise(model, {"input": x})


def test_layers_refuse_other_rows():
    model = svdc.convert(mlp(4, 6, 3)).eval()
    with torch.no_grad(), drawing(stochastic_layers(model), Rows(5, 3)):
        assert model(torch.randn(5, 4)).shape == (15, 3) and model(torch.randn(15, 4)).shape == (15, 3)
        with pytest.raises(Exception, match="7 rows, not 5 or 3 times that"):
            model(torch.randn(7, 4))


@pytest.mark.parametrize(
    "make", [lambda: svdc.convert(nn.Linear(4, 2)), lambda: svdc.convert_dropout(nn.Sequential(nn.Dropout(0.5)))]
)
def test_antithetic_pairs_are_opposite(make, monkeypatch):
    from svdcompress.likelihoods import _regression

    outputs = []
    original = _regression.RegressionSums.add
    monkeypatch.setattr(
        _regression.RegressionSums, "add", lambda self, output, start: (outputs.append(output), original(self, output, start))
    )
    torch.manual_seed(0)
    model, x = make(), torch.randn(5, 4)
    mc_predict(model, x, 80, task="regression", antithetic=True)
    (draws,) = outputs
    assert draws.shape[0] == 80
    if isinstance(model, StochasticLayer):
        centre = model.eval()(x)
        torch.testing.assert_close(draws[:40] - centre, centre - draws[40:])
    else:  # at a rate of one half, an antithetic draw keeps exactly the units that the other drops
        assert (((draws[:40] == 0) ^ (draws[40:] == 0)) | (x == 0)).all()
    assert len({tuple(draw.flatten().tolist()) for draw in draws}) == 80


def test_the_width_of_flat_chains_needs_no_pass():
    passes = []
    model = svdc.convert(mlp(4, 9, 3))
    model[0].register_forward_pre_hook(lambda module, args: passes.append(len(args[0])))
    x = torch.randn(5, 2, 4)
    assert width(model, x, 5) == 18
    assert width(svdc.convert(mlp(40, 9, 3)), torch.randn(5, 40), 5) == 9
    assert width(nn.Sequential(nn.Dropout(), nn.Linear(40, 9)), torch.randn(5, 40), 5) == 40
    assert width(nn.Sequential(nn.Flatten(), nn.Linear(8, 9)), torch.randn(5, 2, 4), 5) == 9
    assert width(svdc.convert(convnet()), torch.randn(5, 1, 8, 8), 5) is None
    mc_predict(model, x, 10, dim=-1)
    assert passes == [5, 5]  # with a hook it does not count as a chain: a pass for its width, and one for the draws
    with pytest.raises(DataError, match="x does not fit Sequential"):
        mc_predict(svdc.convert(mlp(4, 9, 3)), torch.randn(5, 7))


def test_earlier_calls_change_nothing():
    torch.manual_seed(0)
    make = lambda: widen(svdc.convert(convnet()))  # noqa: E731
    x = torch.randn(20, 1, 8, 8)
    fresh, used = make(), make()
    mc_predict(used, x[:1], 50)
    one, other = (mc_predict(model, x, 300, generator=torch.Generator().manual_seed(0)) for model in (fresh, used))
    assert torch.equal(one.mean, other.mean)


def test_rows_that_fail_are_drawn_otherwise_from_the_same_noise(monkeypatch):
    torch.manual_seed(0)
    model = widen(svdc.convert(nn.Sequential(nn.Linear(4, 6), Little(), nn.Linear(6, 3))))
    x = torch.randn(5, 4)
    monkeypatch.setattr(_predict, "rowwise", lambda model, x: True)
    got = mc_predict(model, x, 60, generator=torch.Generator().manual_seed(0))
    assert torch.equal(got.mean, by_vmap(model, x).mean)


class Little(nn.Module):
    def forward(self, h):
        if len(h) >= 20:
            raise RuntimeError("no room for as many rows")
        return h.relu()


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


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (mlp(4, 9, 3), (5, 2, 4)),
        (mlp(40, 9, 3), (5, 40)),
        (nn.Sequential(nn.Dropout(), nn.Linear(40, 9)), (5, 40)),
        (
            nn.Sequential(nn.Linear(4, 2), nn.Flatten(), nn.Sequential(nn.Linear(6, 50), nn.ReLU()), nn.Linear(50, 1)),
            (20, 3, 4),
        ),
    ],
)
def test_the_width_is_what_a_pass_sees(model, shape):
    x = torch.randn(shape)
    assert width(model.eval(), x, shape[0]) == look(model, model, x, shape[0]).widest
