"""Dropout in further training: the rates of each step, and whether a network still bears dropout."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from transformers.models.convnext.modeling_convnext import ConvNextDropPath

import svdcompress as svdc
from svdcompress.errors import Interrupted, ModelError
from svdcompress.layers import BernoulliDropout, GaussianDropout
from svdcompress.likelihoods import make_loss
from svdcompress.pipeline import run
from svdcompress.recipe import LossSection, RecoverSection, Training, load_recipe
from svdcompress.sources import InMemory
from svdcompress.train import fit
from svdcompress.train._dropout import Rates

COUNT, WIDTH = 64, 40


def data():
    """One number, many times over: a network may read any of its copies."""
    x = torch.randn(COUNT, 1, generator=torch.Generator().manual_seed(0))
    return InMemory(x.repeat(1, WIDTH), (x[:, 0] > 0).long())


def network(leans=False, dropout=None):
    """leans: the answer is a difference between large parts, right only if no input is dropped."""
    model = nn.Sequential(dropout or nn.Dropout(0.2), nn.Linear(WIDTH, 2, bias=False))
    row = torch.full((WIDTH,), 20.0 / WIDTH)
    if leans:
        row += 20.0 * (-1.0) ** torch.arange(WIDTH)
    with torch.no_grad():
        model[1].weight.copy_(torch.stack([-row, row]))
    return model


class InAFunction(nn.Module):
    """Dropout that no module has a rate of."""

    def __init__(self, model):
        super().__init__()
        self.net = model[1]

    def forward(self, x):
        return self.net(F.dropout(x, 0.2, self.training))


def trained(model, dropout="auto", loss=None, epochs=6, **more):
    """Train; returns what it said."""
    said = []
    settings = Training(epochs=epochs, batch_size=32, lr=1e-3, dropout=dropout)
    more = {"stage": "recover", "device": "cpu", "on_note": lambda line, settled: said.append((line, settled))} | more
    fit(model, data(), loss or make_loss(LossSection()), settings, **more)
    return said


def states_equal(one, other):
    found, expected = one.state_dict(), other.state_dict()
    return all(torch.equal(found[name], expected[name]) for name in expected)


class StochasticDepth(nn.Module):
    """As torchvision's."""

    def __init__(self, p):
        super().__init__()
        self.p, self.mode = p, "row"

    def forward(self, x):
        if not self.training or self.p == 0:
            return x
        return x * torch.bernoulli(torch.full((len(x), 1), 1 - self.p)) / (1 - self.p)


class ByAFloat(nn.Module):
    """As in attention of transformers: a rate that a function is given."""

    def __init__(self, rate, name):
        super().__init__()
        self.name = name
        setattr(self, name, rate)

    def forward(self, x):
        return F.dropout(x, getattr(self, self.name), self.training)


ELSEWHERE = [
    (StochasticDepth, "p"),
    (ConvNextDropPath, "drop_prob"),
    (partial(ByAFloat, name="dropout"), "dropout"),
    (partial(ByAFloat, name="attention_dropout"), "attention_dropout"),
]
"""Modules that torch.nn does not have, and the attribute that holds their rate."""


@pytest.mark.parametrize(("dropout", "name"), [(nn.Dropout, "p"), *ELSEWHERE])
def test_a_step_without_dropout_is_that_by_hand(dropout, name):
    model, by_hand, examples = network(dropout=dropout(0.2)), network().eval(), data()
    settings = Training(epochs=1, batch_size=COUNT, optimizer="sgd", momentum=0.0, lr=0.1, dropout="off")
    fit(model, examples, make_loss(LossSection()), settings, device="cpu")
    x, y = next(iter(examples.batches(COUNT)))
    F.cross_entropy(by_hand(x), y).backward()
    torch.testing.assert_close(model[1].weight, by_hand[1].weight - 0.1 * by_hand[1].weight.grad, atol=1e-6, rtol=1e-5)
    assert getattr(model[0], name) == 0.2


def test_rates_are_found_once_and_only_where_they_are_floats():
    layers = [nn.MultiheadAttention(4, 2, dropout=0.1), nn.LSTM(4, 4, 2, dropout=0.3), StochasticDepth(0.4)]
    other = nn.Linear(2, 2)
    other.dropout, other.p = nn.Dropout(0.5), 0.9  # a module inside, and a number that means something else
    rates = Rates(nn.ModuleList([*layers, other]))
    assert sorted(rate for _, _, rate in rates._own) == [0.1, 0.3, 0.4, 0.5]
    rates.set(0.5)
    assert (layers[0].dropout, layers[1].dropout, layers[2].p, other.dropout.p, other.p) == (0.05, 0.15, 0.2, 0.25, 0.9)
    rates.set(1.0)
    assert (layers[0].dropout, layers[1].dropout, layers[2].p, other.dropout.p) == (0.1, 0.3, 0.4, 0.5)


@pytest.mark.parametrize(
    ("how", "rates"),
    [
        # a step in each half of 6 epochs; in the first four of them a quarter more after each
        ("rising", [0, 0, 0.25, 0.25, 0.5, 0.5, 0.75, 0.75, 1, 1, 1, 1]),
        ("off", [0] * 12),
        ("on", [1] * 12),
        ("auto", [1] * 12),  # nothing is wrong with this network
    ],
)
def test_the_rates_of_each_step(how, rates):
    model, seen = network(), []

    def loss(output, y):
        seen.append(model[0].p / 0.2)
        return F.cross_entropy(output, y)

    assert trained(model, how, loss) == []
    assert seen[-12:] == pytest.approx(rates) and model[0].p == 0.2
    assert len(seen) == (12 if how != "auto" else 12 + 2 * 2)  # both batches with and without dropout


@pytest.mark.parametrize(
    ("dropout", "epochs", "how"),
    [
        (nn.Dropout, 6, "off"),
        (nn.AlphaDropout, 3, "off"),
        (partial(ByAFloat, name="dropout_p"), 6, "off"),
        (BernoulliDropout, 6, "rising"),
        (GaussianDropout, 2, "rising"),
    ],
)
def test_auto_begins_without_dropout_where_a_network_leans_on_single_inputs(dropout, epochs, how):
    """A network that draws its dropout in predictions has to learn it again."""
    model, by_hand, silent = (network(leans=True, dropout=dropout(0.2)) for _ in range(3))
    ((line, settled),) = trained(model, epochs=epochs)
    assert settled and line.startswith("recover.dropout: the network's loss is ") and "--set recover.dropout=on" in line
    assert ("so it is off" in line, "rise to their own" in line) == (how == "off", how == "rising")
    assert trained(by_hand, how, epochs=epochs) == []
    assert states_equal(model, by_hand) and not states_equal(model, network(leans=True))
    trained(silent, epochs=epochs, on_note=None)
    assert states_equal(silent, model)


def test_the_losses_of_the_note_are_those_by_hand(monkeypatch):
    """Against many draws of which inputs are dropped."""
    monkeypatch.setattr("svdcompress.train._dropout.BATCHES", 2)
    ((line, _),) = trained(network(leans=True))
    on, none = (float(line.split(word)[0].split()[-1]) for word in (" with dropout", " without"))
    model, (x, y) = network(leans=True), next(iter(data().batches(COUNT)))
    kept = (torch.rand(2000, COUNT, WIDTH, generator=torch.Generator().manual_seed(1)) > 0.2) / 0.8
    with torch.no_grad():
        drawn = (kept * x) @ model[1].weight.T
        expected = F.cross_entropy(drawn.flatten(0, 1), y.repeat(2000))
        assert none == pytest.approx(float(F.cross_entropy(model.eval()(x), y)), rel=0.05)
    assert on == pytest.approx(float(expected), rel=0.3)  # of 64 examples with one draw each


def test_a_network_is_compared_with_the_dense_one():
    assert trained(network(), reference=network()) == []
    ((line, settled),) = trained(network(leans=True), reference=network())
    assert settled and "(the dense network's: " in line
    assert trained(network(leans=True), reference=network(leans=True)) == []  # no worse than it has always been


def test_dropout_in_a_function_is_told_and_left():
    model, by_hand = InAFunction(network(leans=True)), InAFunction(network(leans=True))
    ((line, settled),) = trained(model)
    assert not settled and "training begins by unlearning" in line and "no rate that is known" in line
    trained(by_hand, "on")
    assert states_equal(model, by_hand)


def test_a_network_without_dropout_is_looked_at_once():
    model, seen = nn.Linear(WIDTH, 2), []
    assert trained(model, "auto", lambda output, y: seen.append(model.training) or F.cross_entropy(output, y)) == []
    assert seen == [False, True] + [True] * 12


@pytest.mark.parametrize("how", ["off", "rising"])
def test_a_setting_without_effect_is_told(how):
    """Also if a rate is 0."""
    for model in (nn.Linear(WIDTH, 2), network(dropout=nn.Dropout(0.0)), InAFunction(network())):
        ((line, settled),) = trained(model, how)
        assert (
            not settled
            and line == f"recover.dropout: {how} changes nothing, as no module of the model has a dropout rate that is known"
        )


def test_training_without_the_dropout_of_predictions_is_told():
    ((line, settled),) = trained(network(dropout=BernoulliDropout(0.2)), "off")
    assert not settled and line == "recover.dropout: off does not prepare for the dropout that predictions draw; rising does"
    assert trained(network(dropout=BernoulliDropout(0.2)), "rising") == []


def test_looking_changes_nothing():
    looked, alone, dense = network(), network(), network()
    trained(looked, reference=dense)
    trained(alone, "on")
    assert states_equal(looked, alone) and states_equal(dense, network()) and dense.training and dense[0].p == 0.2


def test_a_model_that_fails_is_explained_by_its_training():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x):
            raise ZeroDivisionError("of its own")

    with pytest.raises(ModelError, match="of its own"):
        trained(Fails())


@pytest.mark.parametrize(
    "module",
    [
        nn.Dropout(0.3),
        nn.Dropout1d(0.3),
        nn.AlphaDropout(0.3),
        BernoulliDropout(0.3),
        GaussianDropout(0.3),
        nn.MultiheadAttention(4, 2, dropout=0.3),
        nn.LSTM(4, 4, num_layers=2, dropout=0.3),
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3),
    ],
    ids=lambda module: type(module).__name__,
)
def test_without_their_rates_modules_compute_as_in_eval(module):
    torch.manual_seed(0)
    x = torch.randn(5, 3, 4)
    called = (lambda: module(x, x, x)[0]) if isinstance(module, nn.MultiheadAttention) else (lambda: module(x))
    first = lambda found: found[0] if isinstance(found, tuple) else found  # noqa: E731
    expected = first(module.eval() and called())
    module.train()
    with pytest.raises(KeyError), Rates(module) as rates:
        rates.set(0.0)
        torch.testing.assert_close(first(called()), expected)
        rates.set(0.5)
        assert not torch.allclose(first(called()), expected)
        raise KeyError
    rates = [getattr(part, name, None) for part in module.modules() for name in ("p", "dropout")]
    assert {rate for rate in rates if isinstance(rate, float)} - {0.0} == {0.3}


@pytest.mark.parametrize("dropout", ["auto", "rising", "off"])
def test_a_fit_that_is_stopped_goes_on_with_its_rates(tmp_path, monkeypatch, dropout):
    monkeypatch.setattr("svdcompress.train._state.SHARE_OF_TIME", 1e9)  # save after each epoch
    once, parts = network(leans=True), network(leans=True)
    said = trained(once, dropout)
    asked = iter([False] * 6)
    with pytest.raises(Interrupted):
        trained(parts, dropout, state=tmp_path / "state.pt", stop=lambda: next(asked, True))
    assert parts[0].p == 0.2
    again = network()  # auto would decide otherwise
    assert trained(again, dropout, state=tmp_path / "state.pt") == said
    assert states_equal(once, again)


def test_a_compiled_network_is_compiled_anew_for_each_rate(monkeypatch):
    """torch stops compiling after eight versions of a function, without an error."""
    done = []
    monkeypatch.setattr(torch, "compile", lambda model: done.append(model[0].p) or model)
    monkeypatch.setattr(torch.compiler, "reset", lambda: done.append("reset"))
    trained(network(), "rising", compiled=True)
    assert done == pytest.approx([0.2, "reset", 0, "reset", 0.05, "reset", 0.1, "reset", 0.15, "reset", 0.2])


def test_variational_layers_keep_their_noise():
    """The loss without dropout is that of the mean, but training draws the weights."""
    model = svdc.convert(network(leans=True), log_sigma2=-3.0)
    drawn = []
    model[1].register_forward_hook(lambda layer, inputs, output: drawn.append((layer.training, output.std().item())))
    trained(model, "off", schedule=svdc.Constant(0.0))
    assert all(training for training, _ in drawn[-12:])


def test_a_state_of_an_earlier_version_goes_on_with_dropout(tmp_path):
    model, file = network(leans=True), tmp_path / "state.pt"
    trained(model, "on", state=file, last_epoch=3)
    former = torch.load(file, weights_only=True)
    del former["dropout"]
    former["said"] = ["train.norms: far", False]
    torch.save(former, file)
    by_hand = network(leans=True)
    trained(by_hand, "on")
    assert trained(model, "auto", state=file) == [("train.norms: far", False)]
    assert states_equal(model, by_hand)


def test_the_recipe_takes_words_and_what_yaml_makes_of_them():
    assert RecoverSection().dropout == "auto" and Training().dropout == "on"
    assert [RecoverSection.model_validate({"dropout": value}).dropout for value in (True, False, "rising")] == [
        "on",
        "off",
        "rising",
    ]
    assert load_recipe("digits", ["recover.dropout=off"]).recover.dropout == "off"


NET = """
from torch import nn

def net(sizes):
    hidden = nn.Linear(64, 96), nn.ReLU(), nn.Dropout(0.2), nn.Linear(96, 48), nn.ReLU()
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(48, 10))
"""


def test_a_run_tells_it_and_trains_so(tmp_path, monkeypatch):
    (tmp_path / "nets.py").write_text(NET)
    settings = [f"model.name={tmp_path / 'nets.py'}:net", "data.limit=300", "train.epochs=0", "recover.epochs=3", "device=cpu"]
    settings += ["uncertainty.samples=0", "report.html=false", "export.onnx=false", "report.latency=false", "dense.epochs=60"]
    settings += ["search.goal='macs=3x'", "search.trials=1"]

    def told(name, *more):
        results = run(load_recipe("digits", [*settings, *more]), tmp_path / name, quiet=True)
        return [line for line in results["notes"] if "recover.dropout" in line]

    (line,) = told("auto")
    assert line.startswith("recover.dropout: the network's loss is") and "(the dense network's: " in line
    assert not told("off", "recover.dropout=off") + told("on", "recover.dropout=on")
    (line,) = told("drawn", "convert.dropout=draw")
    assert "rise to their own" in line
    monkeypatch.setattr("svdcompress.train._dropout.MORE", 1e6)
    assert not told("bears")
    auto, off, on, bears = (load_file(tmp_path / name / "model.safetensors") for name in ("auto", "off", "on", "bears"))
    for one, other, same in ((auto, off, True), (bears, on, True), (off, on, False)):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one) == same
