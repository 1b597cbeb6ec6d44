"""Curvatures of models that vmap refuses (recurrences, packed sequences, branches on values), against loops in float64."""

import copy
import warnings

import pytest
import torch
from calibration_data import examples_of, sparse
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from svdcompress.batch import for_gradients
from svdcompress.calibrate import _curvature, calibrate, gauss_newton, held, kept_of, kronecker
from svdcompress.calibrate._jacobians import Jacobians
from svdcompress.errors import ModelError
from svdcompress.likelihoods import likelihood_for

CLASSES = likelihood_for("classification")


class Recurrent(nn.Module):
    """Variational layers around a recurrence that is not variational."""

    def __init__(self, kind, *, given=False, width=4, **options):
        super().__init__()
        self.first, self.rnn = nn.Linear(5, 4), kind(4, width, **options)
        self.given, self.last = given, nn.Linear(options.get("proj_size", width) * (1 + self.rnn.bidirectional), 3)

    def forward(self, x):
        h = self.first(x)
        if not self.rnn.batch_first:
            h = h.transpose(0, 1)
        state = torch.full((self.rnn.num_layers, len(x), self.rnn.hidden_size), 0.3, dtype=x.dtype) if self.given else None
        out = self.rnn(h, state)[0] if self.given else self.rnn(h)[0]
        return self.last(out[:, -1] if self.rnn.batch_first else out[-1])


class Packed(Recurrent):
    """Packed sequences: the length of each is its number of nonzero rows."""

    def forward(self, x):
        lengths = x.abs().sum(2).gt(0).sum(1).cpu()
        packed = pack_padded_sequence(self.first(x), lengths, batch_first=True, enforce_sorted=False)
        return self.last(self.rnn(packed)[1][-1])


class Around(nn.Module):
    """Applies a function to the outputs of a sparse layer."""

    def __init__(self, then, inputs=5):
        super().__init__()
        self.layer, self.then = nn.Linear(inputs, 3), then

    def forward(self, x):
        return self.then(self.layer(x))


class Own(torch.autograd.Function):
    """A user's own function, written without a rule for vmap as usual."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (1 - x.tanh().square())


def looked_at(z):
    if not bool(z.isfinite().all()):
        raise ValueError("not finite")
    return 2 * z.tanh()


TAKEN = {
    "gru": lambda: Recurrent(nn.GRU, batch_first=True),
    "rnn of two layers, batch second": lambda: Recurrent(nn.RNN, num_layers=2),
    "gru with a state": lambda: Recurrent(nn.GRU, batch_first=True, given=True),
    "lstm of two directions": lambda: Recurrent(nn.LSTM, batch_first=True, bidirectional=True),
    "lstm with a projection": lambda: Recurrent(nn.LSTM, batch_first=True, width=5, proj_size=2),
}
REFUSED = {
    "packed": lambda: Packed(nn.GRU, batch_first=True),
    "branches on values": lambda: nn.Sequential(nn.Flatten(), Around(looked_at, 20)),
    "a function of one's own": lambda: nn.Sequential(nn.Flatten(), Around(Own.apply, 20)),
    "a dimension that is dropped": lambda: nn.Sequential(nn.Flatten(), Around(torch.squeeze, 20)),
}


def model_of(make, n=7):
    """A sparse model, and sequences, some of which end early; the last batch of `n` may have one example."""
    torch.manual_seed(0)
    model = sparse(make())
    x = torch.randn(n, 4, 5)
    x[1, 2:], x[n - 1, 3:] = 0, 0
    return model, examples_of(x, torch.randint(0, 3, (n,)))


def explicit(model, x):
    """Gradients (B, H, K) by backward() for each head of each example, in float64, with weights in the order of the layers."""
    model = copy.deepcopy(model).double()
    layers = [layer for layer in model.modules() if hasattr(layer, "log_sigma2")]
    found = []
    for row in x.double():
        for head in range(3):
            model.zero_grad()
            model(torch.stack([row, row]))[0, head].backward()
            found.append(torch.cat([layer.weight.grad[layer.mask] for layer in layers]))
    return torch.stack(found).unflatten(0, (len(x), 3))


def slow_gauss_newton(model, x):
    jacobian = explicit(model, x)
    p = copy.deepcopy(model).double()(torch.cat([x, x]).double())[: len(x)].detach().softmax(1)
    return torch.einsum("bhk,bhg,bgl->kl", jacobian, torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1), jacobian)


@pytest.mark.parametrize("batch", [1, 3, 250])
@pytest.mark.parametrize("name", [*TAKEN, *REFUSED])
def test_jacobians_are_those_of_each_example(name, batch):
    model, examples = model_of({**TAKEN, **REFUSED}[name])
    with held(model):
        jacobians = Jacobians(model, kept_of(model), CLASSES)
        found = [jacobians(inputs) for inputs, _ in examples.batches(batch)]
        wanted = explicit(model, examples.inputs)
        heads = torch.stack([model(torch.stack([row, row]))[0] for row in examples.inputs])
    torch.testing.assert_close(torch.cat([one[1] for one in found]), wanted.float(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(torch.cat([one[0] for one in found]), heads.detach(), atol=1e-5, rtol=1e-4)
    assert jacobians.together == (name in TAKEN)  # otherwise it is slow
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", [*TAKEN, *REFUSED])
def test_curvatures_are_sums_of_them(name):
    model, examples = model_of({**TAKEN, **REFUSED}[name])
    kept = kept_of(model)
    with held(model):
        full = gauss_newton(model, kept, examples, CLASSES).blocks[0]
        diagonal = gauss_newton(model, kept, examples, CLASSES, "diagonal").blocks[0].values
    wanted = slow_gauss_newton(model, examples.inputs)
    assert full.vectors is not None and float(wanted.diagonal().max()) > 0.01
    torch.testing.assert_close(full.vectors * full.values @ full.vectors.T, wanted, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(diagonal, wanted.diagonal(), atol=1e-5, rtol=1e-4)


def test_fewer_examples_are_looked_at_where_each_takes_passes_of_its_own(monkeypatch):
    monkeypatch.setattr(_curvature, "PASSES", 1500)
    for name, count in (("gru", 1000), ("packed", 500)):
        model, examples = model_of({**TAKEN, **REFUSED}[name], 1000)
        with held(model):
            found = gauss_newton(model, kept_of(model), examples, CLASSES, "diagonal")
            assert found.examples == count
            monkeypatch.setattr(_curvature, "PASSES", 10**9)
            whole = gauss_newton(model, kept_of(model), examples, CLASSES, "diagonal")
            monkeypatch.setattr(_curvature, "PASSES", 1500)
        assert float(found.blocks[0].values.sum()) == pytest.approx(float(whole.blocks[0].values.sum()), rel=0.1)


@pytest.mark.parametrize("name", ["gru", "packed"])
def test_a_recurrence_is_calibrated_by_every_posterior(name):
    model, examples = model_of({**TAKEN, **REFUSED}[name], 60)
    found = calibrate(model, examples, examples, CLASSES, posterior="auto", epochs=1)
    assert [(one.name, one.note) for one in found.tried if one.nll is None] == [] and len(found.tried) == 4


def only_of_many(z):
    if len(z) < 5:
        raise KeyError("a batch of five or more is wanted")
    return z


@pytest.mark.parametrize(
    ("then", "why"),
    [
        (lambda z: z + 0.01 * torch.randn_like(z), "draws random numbers"),
        (only_of_many, "KeyError.*five or more"),
        (lambda z: z if len(z) > 2 else torch.cat([z, z], 1), "another shape"),
    ],
    ids=["random", "raises", "another shape"],
)
def test_a_model_without_jacobians_goes_out_with_another_posterior_and_says_so(then, why):
    model, examples = model_of(lambda: nn.Sequential(nn.Flatten(), Around(then, 20)), 60)
    with held(model), pytest.raises(ModelError, match=f"(?s)no Laplace approximation.*{why}"):
        gauss_newton(model, kept_of(model), examples, CLASSES, "diagonal")
    for posterior in ("laplace-diagonal", "auto"):
        found = calibrate(model, examples, examples, CLASSES, posterior=posterior, epochs=1)
        nll = {one.name: one.nll for one in found.tried}
        assert nll.pop("laplace-diagonal") is None and None not in nll.values() and found.posterior in nll
        (note,) = [note for note in found.notes if "laplace-diagonal" in note]
        assert note.startswith("posterior laplace-diagonal: no Laplace approximation")


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("make", [kronecker, gauss_newton])
def test_cudnn_has_no_part_in_gradients_of_a_recurrence(monkeypatch, make, enabled):
    """cuDNN has no gradients of a recurrence in eval(). Its switch shows this without a GPU."""
    monkeypatch.setattr(torch.backends.cudnn, "enabled", enabled)
    seen = []
    for model, examples in (model_of(TAKEN["gru"]), model_of(lambda: nn.Sequential(nn.Flatten(), nn.Linear(20, 3)))):
        hook = model.register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.enabled))
        with held(model):
            make(model, kept_of(model), examples, CLASSES)
        hook.remove()
        assert set(seen) == {enabled and not isinstance(model, Recurrent)}
        assert torch.backends.cudnn.enabled == enabled
        seen.clear()


def test_switches_of_the_backends_are_put_back():
    model, examples = model_of(TAKEN["gru"])
    backend = torch.backends.cudnn

    def switches():
        return backend.enabled, backend.benchmark, backend.deterministic, torch._C._get_mkldnn_enabled()

    before, seen = switches(), []
    model.register_forward_hook(lambda *_: seen.append(torch._C._get_mkldnn_enabled()))
    with pytest.raises(ModelError), for_gradients(model):
        assert not backend.enabled and backend.deterministic
        raise ModelError("whatever")
    with warnings.catch_warnings(), held(model):
        warnings.simplefilter("error")
        gauss_newton(model, kept_of(model), examples, CLASSES, "diagonal")
    assert switches() == before and False in seen  # its kernels for recurrences are slow under vmap
