"""Targets of many positions: a fixed random part of each example's, and all of them below the cap, bit for bit."""

from __future__ import annotations

import pytest
import torch
from calibration_data import examples_of, mlp_classifier, sparse
from torch import nn

from svdcompress import batch
from svdcompress.calibrate import _draws, calibrate, draws_of
from svdcompress.calibrate._draws import CHUNK, MOST, TARGETS, affordable, most_targets, rows
from svdcompress.calibrate._part import Part
from svdcompress.likelihoods import likelihood_for
from svdcompress.sources import IGNORED
from svdcompress.uncertainty import mc_predict

CLASSES = likelihood_for("classification")


def ragged(examples=50, positions=40, seed=0):
    """Targets of which a different number counts in each example, from none to all; outputs are their own numbers."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.linspace(0, 1, examples).view(-1, 1)
    counts = torch.rand(examples, positions, generator=generator) <= share
    targets = torch.arange(examples * positions).view(examples, positions)
    return targets, counts


def parted(targets, counts, most, size=7, samples=1):
    part = Part(most)
    for at in range(0, len(targets), size):
        some = targets[at : at + size]
        part.add(some.flatten().float().expand(samples, -1), some, counts[at : at + size])
    return part, *part.kept()


def test_below_the_cap_all_stay_in_order():
    targets, counts = ragged()
    part, outputs, kept, owner = parted(targets, counts, int(counts.sum()))
    assert torch.equal(kept, targets[counts]) and torch.equal(outputs[0], kept.float())
    assert torch.equal(owner, counts.nonzero()[:, 0]) and part.total == len(kept)


@pytest.mark.parametrize("most", [1, 17, 300])
def test_each_example_keeps_its_share_whatever_the_batches(most):
    targets, counts = ragged()
    part, outputs, kept, owner = parted(targets, counts, most, samples=2)
    assert len(kept) == most and part.total == int(counts.sum())
    assert torch.equal(outputs, kept.float().expand(2, -1)) and torch.equal(owner, kept // targets.shape[1])
    assert bool(counts.flatten()[kept].all()) and bool((kept.diff() > 0).all())
    share = most / part.total
    found = owner.bincount(minlength=len(targets))
    assert bool(((found - share * counts.sum(1)).abs() <= 2).all())  # at random, each would be off by about 2.6
    for size in (1, 13, 50):
        assert torch.equal(parted(targets, counts, most, size)[2], kept)
    larger = parted(targets, counts, 2 * most)[2]
    assert set(kept.tolist()) <= set(larger.tolist())


def test_positions_of_an_example_are_drawn_alike():
    counts = torch.ones(4000, 10, dtype=torch.bool)
    kept = parted(torch.arange(40_000).view(4000, 10), counts, 8000, 500)[2]
    assert bool(((kept % 10).bincount(minlength=10) - 800).abs().max() < 4 * 800**0.5)


class Pixels(nn.Module):
    """Logits (B, 3, T) of each position of inputs (B, 4, T), three times too large."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(4, 6, 1), nn.Tanh(), nn.Conv1d(6, 3, 1))

    def forward(self, x):
        return 3 * self.net(x)


def pixels(examples=60, positions=50):
    torch.manual_seed(1)
    model, x = sparse(Pixels(), log_sigma2=-5.0), torch.randn(examples, 4, positions)
    logits = (model(x) / 3).detach()
    y = torch.multinomial(logits.movedim(1, -1).flatten(0, 1).softmax(1), 1).view(examples, positions)
    y[:, ::7] = IGNORED
    return model, x, y


def test_below_the_cap_draws_are_those_of_plain_calls():
    model, x, y = pixels()
    found = draws_of(model, examples_of(x, y), CLASSES, 5, seed=3)
    drawn = mc_predict(model, x, 5, task=(kept := _draws._Kept(CLASSES.plain())), generator=torch.Generator().manual_seed(3))
    assert len(x) <= CHUNK and drawn.samples == 5
    assert torch.equal(found.outputs, rows(kept.outputs(), CLASSES)[:, (y != IGNORED).flatten()])
    assert torch.equal(found.targets, y[y != IGNORED]) and torch.equal(found.owner, (y != IGNORED).nonzero()[:, 0])
    assert found.left_out == 0 and found.total == len(found)


def test_posteriors_and_the_mean_keep_the_same_targets(monkeypatch):
    model, x, y = pixels()
    monkeypatch.setattr(_draws, "TARGETS", 200)
    data, other = examples_of(x, y), sparse(Pixels(), seed=5)
    first, mean = draws_of(model, data, CLASSES, 5), draws_of(other, data, CLASSES)
    assert len(first) == 200 and first.total == int((y != IGNORED).sum()) and first.left_out == first.total - 200
    assert torch.equal(first.owner, mean.owner) and torch.equal(first.targets, mean.targets)
    monkeypatch.setattr(batch, "WIDEST", 3000)  # other batches
    again = draws_of(model, data, CLASSES, 5)
    assert torch.equal(first.owner, again.owner) and torch.equal(first.targets, again.targets)
    assert len(draws_of(model, data, CLASSES, 5, most=20)) == 20


def test_calibration_keeps_to_the_cap_and_finds_about_the_same_temperature(monkeypatch):
    model, x, y = pixels(150, 60)
    data = examples_of(x, y)
    whole = calibrate(model, data, data, "classification")
    assert not any("fitted on" in note for note in whole.notes)
    sizes, kept = [], Part.kept

    def noted(self):
        found = kept(self)
        sizes.append(len(found[1]))
        return found

    monkeypatch.setattr(Part, "kept", noted)
    monkeypatch.setattr(_draws, "TARGETS", 3000)
    part = calibrate(model, data, data, "classification")
    assert set(sizes) == {3000}
    total = int((y != IGNORED).sum())
    for what in ("samples", "mean"):
        assert any(note.startswith(f"{what}: fitted on 3,000 of {total:,} targets") for note in part.notes)
        few, all_of = getattr(part, what), getattr(whole, what)
        assert few.taken and all_of.taken and few.examples == all_of.examples == 150
        assert few.value == pytest.approx(all_of.value, rel=0.1) and all_of.value > 2


def test_draws_are_compared_with_the_mean_on_the_same_targets(monkeypatch):
    model, x, y = pixels(100, 60)
    monkeypatch.setattr(_draws, "MOST", 25_000)  # 3 classes: all targets of the mean, but fewer of 10 draws
    monkeypatch.setattr(_draws, "FEWEST", 100)
    kept, seen = Part.kept, []
    monkeypatch.setattr(Part, "kept", lambda self: seen.append(found := kept(self)) or found)
    found = calibrate(model, examples_of(x, y), examples_of(x, y), "classification")
    first, draws, same = seen
    assert len(draws[1]) < len(first[1]) and draws[0].numel() <= 25_000
    assert torch.equal(draws[1], same[1]) and torch.equal(draws[2], same[2])
    assert found.mean_on_same != found.mean


def test_how_many_draws_and_targets_are_affordable():
    assert affordable(50, 5000, 1, 10) == 50 and affordable(50, 5000, 1, 1000) == 4  # as many targets as there are
    assert affordable(50, 500, 65536, 2) == 50 and most_targets(50, 2) == TARGETS
    assert affordable(50, 500, 65536, 21) == 10 and most_targets(10, 21) == MOST // 210
    assert affordable(50, 500, 128, 50_257) == 2 and most_targets(2, 50_257) == 1000
    assert most_targets(0, 1000) == 20_000
    for classes in (1, 2, 21, 150, 1000):
        samples = affordable(50, 500, 65536, classes)
        assert 2 <= samples <= 50 and samples * most_targets(samples, classes) * classes <= max(MOST, 2000 * classes)


def test_wide_draws_are_made_in_small_batches(monkeypatch):
    model, (x, y) = mlp_classifier(80)
    sizes = []
    model.register_forward_pre_hook(lambda module, given: sizes.append(len(given[0])))
    whole = draws_of(model, examples_of(x, y), CLASSES)
    monkeypatch.setattr(batch, "WIDEST", 7 * 20)
    sizes.clear()
    parts = draws_of(model, examples_of(x, y), CLASSES)
    assert max(sizes) == 20
    torch.testing.assert_close(parts.outputs, whole.outputs)
