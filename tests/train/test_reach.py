"""Whether the threshold can be reached, estimated before training: against real fits, and a count weight by weight."""

import math

import pytest
import torch
from torch import nn

from svdcompress import Constant, LinearWarmup, convert
from svdcompress.layers import variational_layers
from svdcompress.recipe import Training
from svdcompress.sources import InMemory
from svdcompress.train import distances, factors, fit, frozen_layers, reach, steps_of

COUNT = 50


def settings(**fields):
    return Training(**{"epochs": 6, "batch_size": 8, "schedule": {"name": "linear", "start": "50%"}, **fields})


def blind(output, targets):
    """A loss without any influence of the weights: only the KL moves them."""
    return (output * 0).sum()


def travelled(beta, optimizer="adam", lr_log_sigma2=0.01, **fields):
    """How far log sigma2 rose on average in a fit by the KL alone; with means of 1 its gradient is always the same."""
    model = nn.Sequential(nn.Linear(4, 3))
    nn.init.constant_(model[0].weight, 1.0)
    convert(model, log_sigma2=-20.0)
    made = settings(optimizer=optimizer, lr=1e-6, **fields)
    data = InMemory(torch.randn(COUNT, 4), torch.zeros(COUNT).long())
    fit(model, data, blind, made, schedule=beta, lr_log_sigma2=lr_log_sigma2, device="cpu")
    return float((model[0].log_sigma2 + 20).mean().detach())


@pytest.mark.parametrize(
    "fields",
    [{}, {"schedule": "constant"}, {"schedule": {"name": "cosine", "start": 0.0}}, {"accumulate": 3}, {"batch_size": 50}],
    ids=["linear", "constant", "cosine", "accumulated", "whole batches"],
)
def test_adam_travels_as_far_as_is_said(fields):
    made = settings(**fields)
    up, means = factors(made, steps_of(made, COUNT), Constant(1.0))
    assert travelled(Constant(1.0), **fields) == pytest.approx(0.01 * up, rel=0.12)
    assert up == means


def test_nothing_rises_before_beta_does():
    made, schedule = settings(), LinearWarmup(3, 3, 1.0)
    up, means = factors(made, steps_of(made, COUNT), schedule)
    assert 0 < up < 0.5 * means
    assert travelled(schedule) == pytest.approx(0.01 * up, rel=0.15)


def test_log_sigma2_travels_as_far_beside_means_that_sgd_trains():
    fields = {"schedule": "constant", "epochs": 20}
    made = settings(optimizer="sgd", **fields)
    up, means = factors(made, steps_of(made, COUNT), Constant(1.0))
    assert travelled(Constant(1.0), "sgd", 0.01, **fields) == pytest.approx(0.01 * up, rel=0.1)
    assert up == 20 * 7 and means == 0  # how far gradients move means is unknown in advance
    model = convert(nn.Sequential(nn.Linear(30, 20)))
    assert reach(model, settings(optimizer="sgd", lr=0.1), COUNT, Constant(1.0)).lr_log_sigma2 == 1e-3
    assert reach(model, settings(optimizer="sgd", lr=1e-4), COUNT, Constant(1.0)).lr_log_sigma2 == 1e-4


def test_steps_are_those_that_a_fit_takes():
    assert steps_of(settings(), 50) == 6 * 7
    assert steps_of(settings(accumulate=3), 50) == 6 * 3
    assert steps_of(settings(), 50, world=2) == 6 * 4
    assert steps_of(settings(epochs=0), 50) == 0
    assert factors(settings(epochs=0), 0, Constant(1.0)) == (0, 0)


def test_the_share_within_reach_is_counted_weight_by_weight():
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 5)), log_sigma2=-6.0)
    made = settings(lr=0.002)
    found = reach(model, made, COUNT, Constant(1.0), lr_log_sigma2=0.05)
    up = 0.05 * sum(1.0 if i / 7 <= 3 else 1 - (i / 7 - 3) / 3 for i in range(42))
    assert found.steps == 42 and found.travel == pytest.approx(up)
    weights = [w for _, layer in variational_layers(model) for w in layer.weight.detach().flatten().tolist()]
    past = [-6 - math.log(w * w + 1e-8) >= 3 for w in weights]
    nearer = [max(abs(w) - found.means / 3, 0) for w in weights]
    within = [-6 + up - math.log(w * w + 1e-8) >= 3 for w in nearer]
    assert found.past == pytest.approx(sum(past) / len(past))
    assert found.within == pytest.approx(sum(within) / len(within)) and 0.1 < found.within < 0.9
    ways = sorted(3 + 6 + math.log(w * w + 1e-8) for w in weights)
    for quantile, way in zip((0.1, 0.5, 0.9), found.distance["weight"], strict=True):
        assert way == pytest.approx(ways[int(quantile * len(ways))], abs=0.1)
    assert all(float(layer.log_sigma2.detach().max()) == -6 for _, layer in variational_layers(model))  # nothing was changed


def test_groups_have_a_way_of_their_own_and_each_layer_its_threshold():
    model = nn.Sequential(nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.1]]))
    convert(model, share={"output": 0.5, "weight": 0.5}, log_sigma2=-4.0, threshold={"output": 2, "weight": 100})
    found = distances(model)
    assert set(found) == {"output"}  # a threshold of 100 is never reached
    rows = [2 - (math.log(3 * math.exp(-4)) - math.log(1.0)), 2 - (math.log(3 * math.exp(-4)) - math.log(2.01))]
    assert found["output"][0] == pytest.approx(min(rows), abs=1e-4)
    assert found["output"][2] == pytest.approx(max(rows), abs=1e-4)
    assert distances(model, 3.0)["output"][0] == pytest.approx(min(rows) + 1, abs=1e-4)


def test_a_start_by_the_scale_of_each_layer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 3))
    with torch.no_grad():
        model[0].weight.mul_(100)
    convert(model, log_alpha=-6.0)
    for layer in (model[0], model[2]):
        scale = math.sqrt(sum(w * w for w in layer.weight.detach().flatten().tolist()) / layer.weight.numel())
        assert (layer.log_sigma2.detach() - 2 * math.log(scale) + 6).abs().max() < 1e-4
        assert layer.log_sigma2.requires_grad
    assert distances(model)["weight"][2] < 12  # one weight in ten has more than twice the scale of its layer


def test_half_of_the_weights_are_within_reach_of_so_many_times_the_steps():
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(40, 40)))
    made = settings(lr=1e-4, schedule="constant")
    found = reach(model, made, COUNT, Constant(1.0))
    assert not found.enough and found.times > 2
    longer = settings(lr=1e-4, schedule="constant", epochs=math.ceil(6 * found.times))
    assert reach(model, longer, COUNT, Constant(1.0)).enough
    shorter = settings(lr=1e-4, schedule="constant", epochs=int(6 * found.times / 1.3))
    assert not reach(model, shorter, COUNT, Constant(1.0)).enough
    assert reach(model, settings(lr=1e-12), COUNT, Constant(1.0)).times is None


def test_frozen_layers_go_nowhere():
    """Beside a count by hand: only what training can move may get to the threshold."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 4))
    model[0].requires_grad_(False)
    model[2].weight.data.fill_(0.01)  # log alpha starts at -0.8: in enough steps, all of them get to 3
    convert(model, log_sigma2=-10.0)
    made = settings(epochs=200, lr=0.01, schedule="constant")
    found = reach(model, made, COUNT, Constant(1.0))
    assert found.frozen == pytest.approx(600 / 680) and frozen_layers(model) == {"0": 600}
    assert found.within == pytest.approx(found.past + 80 / 680) and found.past < 0.05 and found.times is None
    assert found.mostly_frozen and not found.enough and "88% are frozen" in str(found)
    only = nn.Sequential(nn.Linear(20, 4))
    only[0].weight.data.fill_(0.01)
    assert distances(model) == distances(convert(only, log_sigma2=-10.0))
    model[2].requires_grad_(False)
    none = reach(model, made, COUNT, Constant(1.0))
    assert none.within == none.past and not none.enough and str(none) == "100% of the weights are frozen"
    model.requires_grad_(True)
    model[0].weight.requires_grad_(False)  # a variance that trains is enough
    assert frozen_layers(model) == {} and reach(model, made, COUNT, Constant(1.0)).frozen == 0
