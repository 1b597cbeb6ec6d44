"""What stands next to our networks (benchmarks/real_peers.py): how peers are trained, and by which loss."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import test_real_nets
import torch
from scipy import stats

from svdcompress.pipeline import open_run, run
from svdcompress.recipe import load_recipe

module = test_real_nets.module  # the fixture
Named = test_real_nets.Named


def test_a_peer_goes_on_where_its_slice_ended(module, tmp_path):
    peers, slices = module("real_peers"), module("slices")
    sets = ["model.args={sizes: [64, 24, 10]}", "data.limit=200", "dense.epochs=1", "train.epochs=1", "recover.epochs=1"]
    run(
        load_recipe("digits", [*sets, "report.html=false", "export.onnx=false", "uncertainty.samples=0", "device=cpu"]),
        tmp_path / "run",
    )
    opened = open_run(tmp_path / "run")

    class Ends(slices.Slice):
        def __init__(self, steps):
            self.steps = steps

        def check(self):
            self.steps -= 1
            if not self.steps:
                raise self.Over

    def train(steps, name):
        way = peers.Way(4, 0)
        return peers.train(copy.deepcopy(opened.dense), opened, way, "dense, trained as long", tmp_path / name, Ends(steps))

    whole, seconds = train(-1, "whole.pt")
    batches = math.ceil(len(opened.data.train) / opened.recipe.recover.batch_size)
    with pytest.raises(slices.Slice.Over):
        train(2 * batches + 1, "sliced.pt")
    kept = torch.load(tmp_path / "sliced.pt", weights_only=False)
    assert kept["epochs"] == 2 and 0 < kept["seconds"] < 60
    torch.save(kept | {"seconds": 1000.0}, tmp_path / "sliced.pt")
    sliced, of_both = train(-1, "sliced.pt")
    assert 0 < seconds < 60 and 1000 < of_both < 1060
    for value, wanted in zip(sliced.state_dict().values(), whole.state_dict().values(), strict=True):
        assert torch.equal(value, wanted)
    again, same = train(1, "sliced.pt")  # finished, so it is not trained again
    assert same == pytest.approx(of_both, abs=5) and torch.equal(next(again.parameters()), next(whole.parameters()))


def opened_for(dense, task, weight, unlabelled=False):
    recover = SimpleNamespace(distill=SimpleNamespace(weight=weight, temperature=3.0))
    return SimpleNamespace(
        dense=dense, recovery=recover, recipe=SimpleNamespace(task=task, data=SimpleNamespace(unlabelled=unlabelled))
    )


def test_peers_learn_by_the_loss_of_the_run(module):
    peers = module("real_peers")
    x, y = torch.tensor([[0.5], [-1.0]]), torch.tensor([[1.0], [2.0]])
    found = peers.Loss(opened_for(Named(), "gaussian", 0.0), torch.device("cpu"))(Named(), x, y)
    wanted = -stats.norm(0, np.exp(0.5 * x.numpy())).logpdf(y.numpy()).mean() - 0.5 * math.log(2 * math.pi)
    assert float(found) == pytest.approx(wanted, rel=1e-3)


def test_peers_are_distilled_as_our_recovery_is(module):
    """Gradients with respect to the outputs, against the formula by hand; the loss differs from it by a constant."""
    peers = module("real_peers")
    rng = np.random.default_rng(0)
    own, others, labels = rng.standard_normal((4, 5)), rng.standard_normal((4, 5)), np.array([0, 3, 1, 4])
    student, teacher = torch.nn.Embedding(4, 5), torch.nn.Embedding(4, 5)
    for net, values in ((student, own), (teacher, others)):
        net.weight.data = torch.from_numpy(values).float()
    x, y = torch.arange(4), torch.from_numpy(labels)

    def gradient(weight, task, target, unlabelled=False):
        student.zero_grad()
        peers.Loss(opened_for(teacher, task, weight, unlabelled), torch.device("cpu"))(student, x, target).backward()
        return student.weight.grad.numpy()

    def share(values, temperature=1.0):
        powers = np.exp(values / temperature)
        return powers / powers.sum(1, keepdims=True)

    hard = (share(own) - np.eye(5)[labels]) / 4
    soft = 3.0 * (share(own, 3.0) - share(others, 3.0)) / 4  # the square of the temperature, divided by it once
    assert gradient(0.0, "classification", y) == pytest.approx(hard, abs=1e-6)
    assert gradient(0.9, "classification", y) == pytest.approx(0.1 * hard + 0.9 * soft, abs=1e-6)
    assert gradient(0.0, "classification", y, unlabelled=True) == pytest.approx((share(own) - share(others)) / 4, abs=1e-6)
    target = torch.ones(4, 5)
    mixed = (0.1 * (own - 1) + 0.9 * (own - others)) * 2 / 20
    assert gradient(0.9, "regression", target) == pytest.approx(mixed, abs=1e-6)


def test_units_are_scored_by_gradients_that_a_network_equal_to_its_teacher_has(module):
    """Towards its own answers it has none; torch-pruning's Taylor scores would be 0."""
    peers = module("real_peers")
    net, x, y = torch.nn.Embedding(4, 5), torch.arange(4), torch.tensor([0, 3, 1, 4])
    for unlabelled in (True, False):
        loss = peers.Loss(opened_for(net, "classification", 0.5, unlabelled), torch.device("cpu"))
        targets = net.weight.detach().argmax(1) if unlabelled else y
        net.zero_grad()
        loss.of_scores(net, x, y).backward()
        powers = np.exp(net.weight.detach().double().numpy())
        hard = (powers / powers.sum(1, keepdims=True) - np.eye(5)[targets]) / 4
        assert net.weight.grad.numpy() == pytest.approx(hard if unlabelled else 0.5 * hard, abs=1e-6)
    net.zero_grad()
    peers.Loss(opened_for(net, "classification", 0.5, True), torch.device("cpu"))(net, x, y).backward()
    assert np.abs(net.weight.grad.numpy()).max() < 1e-6


def test_the_control_that_is_not_distilled_learns_from_the_labels_alone(module):
    peers = module("real_peers")
    student, teacher = torch.nn.Embedding(4, 5), torch.nn.Embedding(4, 5)
    x, y = torch.arange(4), torch.tensor([0, 3, 1, 4])
    opened = opened_for(teacher, "classification", 0.9)
    found = peers.Loss(opened, torch.device("cpu"), distilled=False)(student, x, y)
    logits = student.weight.detach().double().numpy()
    assert float(found.detach()) == pytest.approx(
        -np.log(np.exp(logits) / np.exp(logits).sum(1, keepdims=True))[range(4), y].mean(), rel=1e-5
    )
    assert peers.NOT_DISTILLED in peers.peers_of(opened)
    twins = [opened_for(teacher, "classification", 0.0), opened_for(teacher, "classification", 0.9, unlabelled=True)]
    assert not any(peers.NOT_DISTILLED in peers.peers_of(each) for each in twins)
    assert not set(peers.EVENLY) & set(peers.peers_of(opened)) and set(peers.EVENLY) < set(peers.PEERS)


@pytest.mark.parametrize("taught", [True, False])
def test_a_peer_is_trained_as_its_name_says(module, tmp_path, monkeypatch, taught):
    """The dense network's answers differ from the labels: only a distilled peer follows it."""
    peers, slices = module("real_peers"), module("slices")
    monkeypatch.setattr(peers, "torch_pruning", lambda *given, taylor, evenly=False: peers.idle)
    sets = ["model.args={sizes: [64, 10]}", "data.limit=300", "dense.epochs=1", "train.epochs=1", "recover.epochs=1"]
    quiet = ["report.html=false", "export.onnx=false", "uncertainty.samples=0", "device=cpu"]
    run(load_recipe("digits", [*sets, "recover.distill.weight=0.9", *quiet]), tmp_path / "run")
    opened = open_run(tmp_path / "run")
    start = copy.deepcopy(opened.dense)
    with torch.no_grad():
        for parameter in opened.dense.parameters():
            parameter.mul_(-20)  # it is certain of a wrong digit each time
    name = "torch-pruning, Taylor" if taught else peers.NOT_DISTILLED
    model, _ = peers.train(start, opened, peers.Way(40, 0), name, tmp_path / "peer.pt", slices.Slice(None))
    x, y = next(iter(opened.data.train.batches(300)))
    right = float((model(x).argmax(1) == y).float().mean())
    assert right < 0.5 if taught else right > 0.5, right


def weights(model):
    return sum(tensor.numel() for tensor in model.state_dict().values())


@pytest.mark.parametrize("by_weights", [False, True])
def test_torch_pruning_goes_by_what_the_goal_counts(module, by_weights):
    """The two sizes fall apart: channels of the convolutions cost most MACs, those of the wide layer most parameters."""
    pytest.importorskip("torch_pruning")
    peers = module("real_peers")
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(256, 400),
        torch.nn.ReLU(),
        torch.nn.Linear(400, 10),
    )
    x = torch.randn(8, 3, 16, 16)
    opened = SimpleNamespace(data=SimpleNamespace(train=SimpleNamespace(batches=lambda size: iter([(x[:size], None)]))))
    most = weights(net) // 4 if by_weights else 256 * (3 * 32 + 32 * 16) * 9 // 4
    way = peers.Way(10, most, most, by_weights=by_weights)
    prune = peers.torch_pruning(net, opened, way, None, taylor=False)
    assert prune(0.5)
    early = weights(net)
    assert prune(5.0) and not prune(10.0)
    macs = 256 * (net[0].weight.numel() + net[2].weight.numel()) + net[6].weight.numel() + net[8].weight.numel()
    size = weights(net) if by_weights else macs
    assert weights(net) < early and 0.7 * most < size <= most
    assert net(x).shape == (8, 10)


@pytest.mark.parametrize("evenly", [True, False])
def test_torch_pruning_takes_the_same_share_of_each_layer_if_asked(module, evenly):
    """One layer's weights are a tenth of the other's: ranked together, its units go first."""
    pytest.importorskip("torch_pruning")
    peers = module("real_peers")
    net = torch.nn.Sequential(
        torch.nn.Linear(20, 40), torch.nn.ReLU(), torch.nn.Linear(40, 40), torch.nn.ReLU(), torch.nn.Linear(40, 4)
    )
    with torch.no_grad():
        net[0].weight.mul_(0.1)
        net[2].weight.mul_(0.1)
        net[4].weight.mul_(10)
    opened = SimpleNamespace(
        data=SimpleNamespace(train=SimpleNamespace(batches=lambda size: iter([(torch.randn(size, 20), None)])))
    )
    way = peers.Way(10, 800, 800, by_weights=True)
    assert peers.torch_pruning(net, opened, way, None, taylor=False, evenly=evenly)(10.0)
    left = net[0].out_features, net[2].out_features
    assert (abs(left[0] - left[1]) <= 2) is evenly, left


def test_peers_get_the_size_that_the_goal_counts(module):
    real, small = module("real"), {"macs": 900, "parameters": 50, "nonzero": 20}
    sizes = {goal.partition("=")[0]: real.way_of(goal, 8, small) for goal in {case.goal for case in real.CASES.values()}}
    assert {measure: (way.epochs, way.size) for measure, way in sizes.items()} == {
        "macs": (8, 900),
        "parameters": (8, 50),
        "nonzero": (8, 20),
        "max-drop": (8, 900),  # a budget: whatever size it led to
        "latency": (8, 900),  # the multiply-accumulates that it led to
    }
    assert [sizes[measure].left for measure in ("macs", "parameters", "nonzero")] == [50, 50, 20]  # of single weights


def test_a_difference_that_is_not_paired_is_newcombes(module):
    """9 of 10 and 3 of 10: 0.6 (0.1705 to 0.8090) in his table II of 1998, method 10."""
    unpaired = module("late_peers").unpaired
    assert unpaired(30.0, 90.0, 10) == pytest.approx([60.0, 17.05, 80.90], abs=0.01)
    assert unpaired(90.0, 30.0, 10) == pytest.approx([-60.0, -80.90, -17.05], abs=0.01)


def test_a_late_peer_is_of_the_row_with_the_longest_name(module):
    assert module("late_peers").case_of("resnet56-macs2.6x-few") == "resnet56-macs2.6x"
    assert module("late_peers").case_of("vgg16-nonzero80x-few") == "vgg16-nonzero80x"
