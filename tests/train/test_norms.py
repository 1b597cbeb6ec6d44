"""Batch normalization in training: which statistics it uses, and the note if those of a batch are far off."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from svdcompress.errors import TrainingError
from svdcompress.likelihoods import make_loss
from svdcompress.pipeline import run
from svdcompress.pipeline._trainer import Trainer
from svdcompress.recipe import LossSection, Training, load_recipe
from svdcompress.sources import InMemory
from svdcompress.train import fit
from svdcompress.train._norms import far
from svdcompress.train._standing import Standing

COUNT = 64


def data(mean=0.0):
    x = mean + torch.randn(COUNT, 6, generator=torch.Generator().manual_seed(0))
    return InMemory(x, (x[:, 0] > mean).long())


def taught(mean=0.0):
    """A network trained by hand on inputs with mean 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    x = torch.randn(2000, 6, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), (x[:, 0] > mean).long()).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model


def trained(model, examples, norms="batch", **more):
    said = []
    settings = Training(epochs=2, batch_size=32, norms=norms, lr=1e-4)
    heard = {"on_note": lambda line, settled: said.append((line, settled))} | more
    fit(model, examples, make_loss(LossSection()), settings, stage="recover", device="cpu", **heard)
    return said


def buffers(model):
    return {name: value.clone() for name, value in model.named_buffers()}


def test_kept_statistics_stay_and_the_rest_is_trained():
    model = taught()
    before, weights = buffers(model), [p.detach().clone() for p in model.parameters()]
    assert trained(model, data(), "keep") == []
    assert all(torch.equal(value, before[name]) for name, value in buffers(model).items())
    assert not any(torch.equal(one, other) for one, other in zip(weights, model.parameters(), strict=True))  # including scales
    trained(model, data())
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])


def test_steps_with_kept_statistics_are_those_by_hand():
    """One batch, one step of SGD, against the gradient of the network in eval()."""
    model, by_hand, examples = taught(), taught().eval(), data()
    settings = Training(epochs=1, batch_size=COUNT, optimizer="sgd", momentum=0.0, lr=0.1, norms="keep")
    fit(model, examples, make_loss(LossSection()), settings, stage="recover", device="cpu")
    x, y = next(iter(examples.batches(COUNT)))
    nn.functional.cross_entropy(by_hand(x), y).backward()
    for one, other in zip(model.parameters(), by_hand.parameters(), strict=True):
        # the decaying learning rate is still at its start in the only step
        torch.testing.assert_close(one, other - 0.1 * other.grad, atol=1e-6, rtol=1e-5)


class Shifted(nn.Module):
    """Its running statistics differ from those of the batches, as if they came from a mixture with other data."""

    def __init__(self):
        super().__init__()
        self.net = taught()
        with torch.no_grad():
            self.net[1].running_mean -= 3.0 * self.net[1].running_var.sqrt()
            self.net[1].bias -= 3.0 * self.net[1].weight  # the same outputs in eval()

    def forward(self, x):
        return self.net(x)


def test_statistics_that_are_far_off_are_told_before_training():
    model = Shifted()
    x, y = next(iter(data().batches(COUNT)))
    with torch.no_grad():
        assert float(nn.functional.cross_entropy(model.eval()(x), y)) < 0.1
    ((line, settled),) = trained(model, data())
    assert (
        "recover.norms: the network's loss is " in line
        and "with the statistics of a batch of 32" in line
        and "--set recover.norms=keep" in line
    )
    assert not settled
    assert trained(Shifted(), data(), "keep") == [] == trained(taught(), data())


def test_auto_keeps_statistics_that_are_far_off_and_follows_others():
    model, by_hand = Shifted(), Shifted()
    ((line, settled),) = trained(model, data(), "auto")
    assert settled and "so these are kept (auto; --set recover.norms=batch" in line
    trained(by_hand, data(), "keep")
    assert states_equal(model, by_hand)
    model, by_hand = taught(), taught()
    assert trained(model, data(), "auto") == []
    trained(by_hand, data(), "batch")
    assert states_equal(model, by_hand)


def test_auto_keeps_without_anybody_to_hear_it():
    model, by_hand = Shifted(), Shifted()
    trained(model, data(), "auto", on_note=None)
    trained(by_hand, data(), "keep")
    assert states_equal(model, by_hand)


def test_a_loss_that_is_not_finite_tells_of_statistics_that_were_kept():
    model, examples = Shifted(), data()
    settings = Training(epochs=2, batch_size=32, norms="auto", lr=1e30, optimizer="sgd")
    with pytest.raises(TrainingError) as error:
        fit(model, examples, make_loss(LossSection()), settings, stage="recover", device="cpu")
    assert "recover.norms=batch, in a new run" in str(error.value)


def test_what_auto_settled_holds_for_a_fit_that_goes_on(tmp_path):
    """The first epoch brings the two losses together, so auto would decide otherwise if asked again."""
    once, parts = Shifted(), Shifted()
    settings = Training(epochs=2, batch_size=32, norms="auto", lr=0.05)
    ways = {"stage": "recover", "device": "cpu"}
    fit(once, data(), make_loss(LossSection()), settings, **ways)
    fit(parts, data(), make_loss(LossSection()), settings, last_epoch=1, state=tmp_path / "state.pt", **ways)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["keeps_norms"] is True
    again = Shifted()
    again.net = taught()  # its statistics are not far off
    fit(again, data(), make_loss(LossSection()), settings, state=tmp_path / "state.pt", **ways)
    assert states_equal(once, again)


def test_an_epoch_that_is_done_again_keeps_what_was_settled():
    """If losses are checked rarely, one that is not finite leads back to the state before the first epoch."""
    standing = Standing(keeps_norms=True)
    standing.take(Standing(keeps_norms=False).state(), torch.device("cpu"))
    assert standing.keeps_norms
    standing.take(Standing(epoch=1, keeps_norms=False).state(), torch.device("cpu"))
    assert not standing.keeps_norms


def test_a_state_that_does_not_say_goes_on_as_the_recipe_asks(tmp_path):
    """A state from an older version, in a stage with `norms: keep`."""
    model, file = taught(), tmp_path / "state.pt"
    settings = Training(epochs=2, batch_size=32, norms="keep")
    fit(model, data(), make_loss(LossSection()), settings, stage="recover", device="cpu", last_epoch=1, state=file)
    former = torch.load(file, weights_only=True)
    del former["keeps_norms"]
    torch.save(former, file)
    before = buffers(model)
    fit(model, data(), make_loss(LossSection()), settings, stage="recover", device="cpu", state=file)
    assert all(torch.equal(value, before[name]) for name, value in buffers(model).items())


def test_far_takes_both_many_times_the_loss_and_much_more():
    assert far(0.001, 0.12)
    assert not far(0.001, 0.05)  # a network that has memorized its data
    assert not far(0.5, 1.5)  # a network that a cut has changed in any case


def states_equal(one, other):
    found, expected = one.state_dict(), other.state_dict()
    return all(torch.equal(found[name], expected[name]) for name in expected)


def test_looking_changes_nothing():
    looked, alone = Shifted(), Shifted()
    trained(looked, data())
    settings = Training(epochs=2, batch_size=32, lr=1e-4)
    fit(alone, data(), make_loss(LossSection()), settings, stage="recover", device="cpu")  # without a listener
    assert states_equal(looked, alone)


NET = """
from torch import nn

def net(sizes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
"""


def test_a_run_tells_it(tmp_path):
    (tmp_path / "nets.py").write_text(NET)
    settings = [f"model.name={tmp_path / 'nets.py'}:net", "data.limit=300", "train.epochs=0", "recover.epochs=1", "device=cpu"]
    settings += ["uncertainty.samples=0", "report.html=false", "export.onnx=false", "report.latency=false", "dense.epochs=60"]
    first = run(load_recipe("digits", [*settings, "recover.epochs=0"]), tmp_path / "first", quiet=True)
    assert not told(first)
    tensors = load_file(tmp_path / "first" / "dense.safetensors")
    tensors["2.running_mean"] -= 3.0 * (tensors["2.running_var"] + 1e-5).sqrt()
    tensors["2.bias"] -= 3.0 * tensors["2.weight"]
    save_file(tensors, tmp_path / "far.safetensors")
    settings += [f"weights.file={tmp_path / 'far.safetensors'}", "search.goal='parameters=1.2x'", "search.trials=2"]
    auto = run(load_recipe("digits", settings), tmp_path / "run", quiet=True)
    assert len(told(auto, "notes")) == 1 and not told(auto)
    batch = run(load_recipe("digits", [*settings, "recover.norms=batch"]), tmp_path / "batch", quiet=True)
    assert len(told(batch)) == 1 and not told(batch, "notes")
    assert not told(run(load_recipe("digits", [*settings, "recover.norms=keep"]), tmp_path / "kept", quiet=True))
    kept = load_file(tmp_path / "run" / "model.safetensors"), load_file(tmp_path / "kept" / "model.safetensors")
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[1])


def told(results, where="warnings"):
    return [line for line in results[where] if line.startswith("recover.norms:")]


def test_of_each_section_one_line_is_heard():
    """Trials of a search are alike: one line stands for all."""
    said, noted = [], []
    results = SimpleNamespace(warnings=said, notes=noted)
    trainer = Trainer(SimpleNamespace(results=results, warn=said.append, note=noted.append), None, None, None)
    for settled in (False, True):
        for line in ("recover.norms: 0.12", "recover.norms: 0.13", "train.norms: 0.2"):
            trainer._heard(line, settled)
    assert said == noted == ["recover.norms: 0.12", "train.norms: 0.2"]


STEADY = Training(epochs=9, batch_size=32, lr=1e-3, keep="best")
"""Adam, in place of SGD at a rate for batch statistics."""


def by_sgd(model, steady, norms="auto", **more):
    said, settings = [], Training(epochs=2, batch_size=32, norms=norms, optimizer="sgd", lr=0.5)
    heard = {"on_note": lambda line, settled: said.append((line, settled))} | more
    fit(model, data(), make_loss(LossSection()), settings, stage="recover", device="cpu", steady=steady, **heard)
    return said


@pytest.mark.parametrize("norms", ["auto", "keep"])
def test_steady_settings_train_where_statistics_stay(norms):
    model, by_hand = Shifted(), Shifted()
    ((line, settled),) = by_sgd(model, STEADY, norms)
    assert settled and "Adam at 0.001 trains in place of SGD" in line and "recover.optimizer sets another" in line
    settings = STEADY.model_copy(update={"norms": "keep", "epochs": 2, "keep": "last"})
    fit(by_hand, data(), make_loss(LossSection()), settings, stage="recover", device="cpu")
    assert states_equal(model, by_hand)


def test_steady_settings_do_nothing_where_batches_update_the_statistics():
    for make, norms in ((taught, "auto"), (Shifted, "batch")):
        model, plain = make(), make()
        assert not any("in place of" in line for line, _ in by_sgd(model, STEADY, norms))
        by_sgd(plain, None, norms)
        assert states_equal(model, plain)


def test_a_fit_by_steady_settings_resumes_with_the_same_result(tmp_path):
    whole, part = Shifted(), Shifted()
    by_sgd(whole, STEADY)
    by_sgd(part, STEADY, state=tmp_path / "state.pt", last_epoch=1)
    again = Shifted()
    again.net = taught()  # by itself, this one would not be kept
    ((line, _),) = by_sgd(again, STEADY, state=tmp_path / "state.pt")
    assert "in place of" in line and states_equal(again, whole) and not states_equal(part, whole)
