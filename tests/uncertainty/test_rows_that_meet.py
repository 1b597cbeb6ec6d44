"""Models in which rows of a batch interact: noise for each row would average out, so their weights are drawn."""

import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.errors import UsageError
from svdcompress.uncertainty import _predict, mc_predict, mean_predict


class Mixed(nn.Module):
    """Each row plus three times the mean of all, through linear maps, so the variance has a closed form."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 1)
        nn.init.ones_(self.linear.weight)  # so that no weight is irrelevant

    def forward(self, x):
        h = self.linear(x)
        return h + 3 * h.mean(0, keepdim=True)


class Sequence(nn.Module):
    """A sequence without a batch dimension: the answer for the whole, at each position."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        y = self.encoder(x)
        return y.mean(0, keepdim=True).expand_as(y)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def mixed():
    torch.manual_seed(0)
    return svdc.convert(Mixed(), log_sigma2=-2.0).eval(), 1 + 0.1 * torch.randn(32, 8)


def test_the_variance_of_a_mean_over_rows():
    model, x = mixed()
    want = torch.exp(torch.tensor(-2.0)) * (x + 3 * x.mean(0)).square().sum(1, keepdim=True)
    got = mc_predict(model, x, 4000, task="regression", generator=seeded(1)).epistemic
    torch.testing.assert_close(got, want.double(), rtol=0.1, atol=0)
    with torch.no_grad(), svdc.sampling(model, generator=seeded(1)):
        draws = torch.stack([model(x) for _ in range(3000)])
    torch.testing.assert_close(draws.var(0), want, rtol=0.12, atol=0)


class Pooled(nn.Module):
    """One answer for all rows: a bag of instances, with or without a dimension of length 1 in place of the rows."""

    def __init__(self, keep):
        super().__init__()
        self.encoder, self.head, self.keep = nn.Linear(8, 6), nn.Linear(6, 2), keep

    def forward(self, x):
        return self.head(torch.tanh(self.encoder(x)).mean(0, keepdim=self.keep))


class Running(nn.Module):
    """Each row depends on those before it alone, as in a filter or a recurrent network on (time, features)."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(8, 6), nn.Linear(6, 2)

    def forward(self, x):
        h = torch.tanh(self.encoder(x))
        return self.head(h.cumsum(0) / torch.arange(1, len(h) + 1)[:, None])


def by_explicit_weights(model, x, count):
    """(count, ...) outputs of a dense copy that is given drawn weights of its layer `encoder`, the only variational one."""
    layer = model.encoder
    mean, std = layer.weight * layer.relevant(), (layer.log_sigma2 / 2).exp() * layer.relevant()
    dense = type(model)(*([model.keep] if hasattr(model, "keep") else []))
    dense.load_state_dict({name: value for name, value in model.state_dict().items() if "log_sigma2" not in name})
    draws = []
    with torch.no_grad():
        for _ in range(count):
            dense.encoder.weight.copy_(mean + std * torch.randn(std.shape))
            draws.append(dense(x))
    return torch.stack(draws)


@pytest.mark.parametrize("make", [lambda: Pooled(True), lambda: Pooled(False), Running], ids=["row", "no row", "running"])
def test_rows_meet_where_the_output_has_none_or_follows_earlier_ones(make):
    torch.manual_seed(0)
    model, x = svdc.convert(make(), include=["encoder"], log_sigma2=-2.0).eval(), 1 + torch.randn(40, 8)
    want = by_explicit_weights(model, x, 1000).std(0)
    with torch.no_grad(), svdc.sampling(model, generator=seeded(1)) as sampler:
        found = torch.stack([model(x) for _ in range(1000)]).std(0)
        assert len(sampler.shared) == 1
    torch.testing.assert_close(found, want, rtol=0.12, atol=0)


def test_rows_that_follow_earlier_ones_go_through_together(monkeypatch):
    monkeypatch.setitem(_predict.BUDGET, "cpu", 20)
    torch.manual_seed(0)
    model, x = svdc.convert(Running(), include=["encoder"], log_sigma2=-2.0).eval(), 1 + torch.randn(12, 8)
    torch.testing.assert_close(mean_predict(model, x, task="regression").mean, model(x).detach().double())
    want = by_explicit_weights(model, x, 1000)
    found = mc_predict(model, x, 1000, task="regression", generator=seeded(1))
    torch.testing.assert_close(found.std, want.std(0).double(), rtol=0.12, atol=0)
    with pytest.raises(UsageError, match=r"chunk: 11; the rows of a batch interact.*at least 12"):
        mc_predict(model, x, 1000, task="regression", chunk=11)


def test_a_model_that_refuses_another_order_of_rows():
    class Ordered(Mixed):
        def forward(self, x):
            if len(x) > 1 and x[0, 0] > x[-1, 0]:
                raise ValueError("rows must ascend")
            return super().forward(x)

    model, x = svdc.convert(Ordered(), log_sigma2=-2.0).eval(), torch.arange(40.0).reshape(5, 8)
    with torch.no_grad(), svdc.sampling(model), pytest.raises(ValueError, match="ascend"):
        model(x.flip(0))
    with pytest.raises(UsageError, match="chunk: 4; the rows of a batch interact"):
        mc_predict(model, x, 5, task="regression", chunk=4)


@pytest.mark.parametrize("dim", [1, 0])
def test_rows_along_another_dimension_or_several_for_each_do_not_meet(dim):
    """A second output (layers, rows, numbers), as a recurrent network has it, or two rows in the place of each."""

    class Other(Apart):
        def forward(self, x):
            y = super().forward(x)
            return y, torch.stack([y, -y, 2 * y]) if dim else (torch.cat([y, -y]), y.repeat_interleave(2, 0))

    model, x = svdc.convert(Other(), log_sigma2=-2.0).eval(), torch.randn(4, 8)
    with torch.no_grad(), svdc.sampling(model):
        y, _ = model(torch.cat([x, x]))
    assert not torch.equal(*y.chunk(2))


@pytest.mark.parametrize("form", ["one of each", "boxes", "loss"])
def test_outputs_by_row_and_a_loss_beside_them_do_not_meet(form):
    """As detectors return them, and language models that are given labels."""

    class Other(Apart):
        def forward(self, x):
            y = super().forward(x)
            if form == "loss":
                return {"loss": y.mean(), "logits": y}
            return list(y) if form == "one of each" else [{"boxes": row} for row in y]

    model, x = svdc.convert(Other(), log_sigma2=-2.0).eval(), torch.randn(4, 8)
    with torch.no_grad(), svdc.sampling(model) as sampler:
        model(torch.cat([x, x]))
        assert not sampler.shared


def batch_statistics():
    layers = nn.Linear(8, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 1)
    return svdc.convert(nn.Sequential(*layers), include=["0"], log_sigma2=-2.0).eval()


@pytest.mark.parametrize("make", [lambda: svdc.convert(Sequence(), log_sigma2=-4.0).eval(), batch_statistics])
def test_spreads_are_those_of_members(make):
    torch.manual_seed(0)
    model, x = make(), 2 + 0.3 * torch.randn(12, 8)
    one = mc_predict(model, x, 1500, task="regression", generator=seeded(1)).epistemic
    other = mc_predict(model, x, 1500, task="regression", generator=seeded(2), members=True).epistemic
    assert float(one.mean() / other.mean()) == pytest.approx(1, rel=0.1)


class Apart(nn.Module):
    """Independent rows, in a forward that is not a chain."""

    def __init__(self, noisy=False):
        super().__init__()
        self.noisy, self.one, self.two = noisy, nn.Linear(8, 6), nn.Linear(6, 2)

    def forward(self, x):
        h = torch.relu(self.one(x))
        return self.two(h * torch.rand_like(h) if self.noisy else h)


@pytest.mark.parametrize("noisy", [False, True])
def test_rows_by_themselves_keep_noise_of_their_own(noisy):
    """Also if the model itself draws random numbers, so that its outputs change from call to call."""
    model, x = svdc.convert(Apart(noisy), log_sigma2=-2.0).eval(), torch.randn(4, 8)
    twice = torch.cat([x, x])
    with torch.no_grad(), svdc.sampling(model, generator=seeded()) as sampler:
        torch.manual_seed(0)
        one, other = model(twice).chunk(2)
        assert not torch.equal(one, other) and not sampler.shared


def test_rows_that_meet_in_half_precision_and_by_infinite_outputs():
    class Ruled(Mixed):
        def forward(self, x):
            y = super().forward(x)
            return torch.cat([y, torch.full_like(y, -torch.inf)], 1)

    half, given = mixed()
    ruled = svdc.convert(Ruled(), log_sigma2=-2.0).eval()
    for model, x in ((half.bfloat16(), given.bfloat16()), (ruled, given)):
        x += torch.arange(len(x))[:, None].to(x)  # far apart, because bfloat16 is coarse
        with torch.no_grad(), svdc.sampling(model) as sampler:
            model(x)
            assert len(sampler.shared) == 1


@pytest.mark.parametrize("way", [{}, {"members": True}, {"local": True}, {"antithetic": True}], ids=str)
def test_a_batch_whose_rows_meet_goes_through_whole(way, monkeypatch):
    """However wide the model is; only the draws are split."""
    monkeypatch.setitem(_predict.BUDGET, "cpu", 20)
    torch.manual_seed(0)
    model, x = svdc.convert(Mixed(), log_sigma2=-30.0).eval(), torch.randn(8, 8)
    want = model(x).detach().double()
    for found in (mean_predict(model, x, task="regression"), mc_predict(model, x, 6, task="regression", **way)):
        torch.testing.assert_close(found.mean, want, rtol=0, atol=1e-4)
    torch.testing.assert_close(mc_predict(model, x, 6, task="regression", chunk=9, **way).mean, want, rtol=0, atol=1e-4)
    with pytest.raises(UsageError, match=r"chunk: 7; the rows of a batch interact.*at least 8"):
        mc_predict(model, x, 6, task="regression", chunk=7, **way)
