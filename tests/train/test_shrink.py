"""Dead units removed during training: the same function, ties kept, and a state to resume from."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from svdcompress import LinearWarmup, convert, load, save
from svdcompress.errors import Interrupted
from svdcompress.likelihoods import make_loss
from svdcompress.recipe import LossSection, Training
from svdcompress.sources import InMemory
from svdcompress.train import fit
from svdcompress.train._shrink import reshape, shrink, size

LOSS = make_loss(LossSection())


def net():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 12), nn.ReLU()]
    return convert(nn.Sequential(*layers, nn.Linear(12, 3)), log_sigma2=-6.0)


def kill(model, channels=2, units=4):
    """Make filters and units irrelevant, except for their biases."""
    for index, count in ((0, channels), (4, units)):
        model[index].log_sigma2.data[:count] = 5.0
    return model.eval()


def examples(count=64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 1, 4, 4, generator=generator)
    return InMemory(x, (x.mean((1, 2, 3)) > 0).long())


def test_a_shrunk_model_computes_the_same_and_goes_on_training():
    model, x = kill(net()), torch.randn(8, 1, 4, 4)
    before, full = model(x), size(model)  # its graph is still alive
    assert shrink(model, x[:2])
    assert torch.allclose(model(x), before, atol=1e-5)
    assert model[0].weight.shape == (4, 1, 3, 3) and model[4].weight.shape == (8, 64) and model[1].num_features == 4
    assert size(model) < full
    assert all(layer.mask is None for layer in (model[0], model[4], model[6]))  # weights may still come back
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model.train()(x).square().sum().backward()
    optimizer.step()
    assert not torch.allclose(model.eval()(x), before, atol=1e-3)


def test_nothing_dead_changes_nothing():
    model, x = net().eval(), torch.randn(2, 1, 4, 4)
    before = copy.deepcopy(model.state_dict())
    assert not shrink(model, x)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_fresh_model_takes_the_shapes_of_a_shrunk_one(tmp_path):
    model, x = kill(net()), torch.randn(8, 1, 4, 4)
    shrink(model, x[:2])
    kill(model, 1, 2)
    assert shrink(model, x[:2])  # again: the checkpoint's records accumulate
    fresh = net().eval()
    reshape(fresh, model.surgery, model.state_dict())
    assert torch.equal(fresh(x), model(x))
    save(model, tmp_path / "small.safetensors")
    assert torch.equal(load(tmp_path / "small.safetensors", net().eval())(x), model(x))


def test_options_are_those_of_pruning():
    model, x = kill(net()), torch.randn(2, 1, 4, 4)
    assert not shrink(model, x, protect=["*"])
    assert not shrink(model, x, threshold=20.0)
    assert shrink(model, x, round_to=4)
    assert model[0].weight.shape[0] % 4 == model[4].weight.shape[0] % 4 == 0


def test_ties_stay():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
            self.inner = nn.Linear(6, 5)
            self.second.weight = self.first.weight
            self.back = nn.Linear(5, 6)

        def forward(self, x):
            return self.head(self.second(self.back(self.inner(self.first(x)).relu())).relu())

    torch.manual_seed(0)
    model = convert(Twice(), log_sigma2=-6.0).eval()
    x = torch.randn(4, 6)
    model.inner.log_sigma2.data[:2] = 5.0
    before = model(x)
    assert shrink(model, x)
    assert torch.allclose(model(x), before, atol=1e-5)
    assert model.second.weight is model.first.weight
    assert model.inner.weight.shape == (3, 6)


@pytest.mark.parametrize("keep", ["last", "best"])
def test_a_fit_shrinks_and_goes_on_after_a_stop_to_the_same_end(tmp_path, keep):
    data = examples()
    smaller = partial(shrink, inputs=data.inputs[:2])
    settings = Training(epochs=5, batch_size=16, lr=1e-2, keep=keep)

    def run(model, **more):
        found = {"schedule": LinearWarmup(0, 1, 0.1), "shrink_from": 2.0, "shrink": smaller, "device": "cpu"}
        return fit(model, data, LOSS, settings, validate=lambda model: {"error": -size(model), "nll": 0.0}, **found, **more)

    straight = kill(net())
    result = run(straight)
    full = size(net())
    assert size(straight) < full and straight[0].weight.shape[0] <= 4
    sizes = [-row["val_error"] for row in result.history]  # the largest are the best, but their weights no longer fit
    assert sizes[:2] == [full, full] and sizes[-1] < full  # not before the requested moment
    assert all(0 <= row["sparsity"] <= 1 for row in result.history)
    assert result.history[2]["sparsity"] > 0.1  # a fraction of the initial number of weights, not of the remaining ones
    steps = iter(range(1000))
    with pytest.raises(Interrupted):
        run(kill(net()), state=tmp_path / "state.pt", stop=lambda: next(steps) == 14)  # in the fourth epoch
    resumed = kill(net())
    again = run(resumed, state=tmp_path / "state.pt")
    assert [-row["val_error"] for row in again.history] == sizes
    assert all(torch.equal(one, other) for one, other in zip(straight.parameters(), resumed.parameters(), strict=True))
