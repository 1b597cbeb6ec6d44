"""The trials of a search share their batches, so that the dense network answers each of them once."""

import pytest
import torch
from torch import nn

from svdcompress.errors import Interrupted
from svdcompress.pipeline import estimate, open_run, run
from svdcompress.recipe import load_recipe
from svdcompress.train import _loop
from svdcompress.train._distill import Teacher

COUNT, BATCH = 108, 20  # training examples: without 30 for the test and 12 for validation


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2))


def images() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.rand(150, 1, 4, 4)
    return x, (x.mean((1, 2, 3)) > 0.5).long()


SHORT = ["dense.epochs=1", "train.epochs=0", "recover.epochs=6", f"recover.batch_size={BATCH}", "data.validation=12"]
SHORT += ["data.augment=[{crop: 1}, flip]", "uncertainty.samples=0", "export.onnx=false", "report.latency=false"]


def ran(folder, *settings, resume=False):
    recipe = load_recipe(None, [*SHORT, *settings]).model_copy(update={"out": str(folder)})
    recipe.model.name, recipe.data.name = f"{__file__}:net", f"{__file__}:images"
    return run(recipe, quiet=True, resume=resume)


@pytest.fixture
def asked(monkeypatch):
    """The number of examples of each call of the teacher in an epoch (a check of the statistics calls it, too)."""
    counts, own, here = [], Teacher.answer, []

    def epoch(*given, **more):
        here.append(True)
        try:
            return whole(*given, **more)
        finally:
            here.pop()

    def answer(self, inputs):
        counts.extend([len(inputs)] if here else [])
        return own(self, inputs)

    whole = _loop.train_epoch
    monkeypatch.setattr(_loop, "train_epoch", epoch)
    monkeypatch.setattr(Teacher, "answer", answer)
    return counts


SEARCH = ["search.max_drop=20", "search.objective=macs", "search.mixture=off", "recover.epochs=2"]


def test_the_trials_of_a_search_ask_once(tmp_path, asked):
    results = ran(tmp_path / "run", *SEARCH, "search.trials=3")
    roots = [trial for trial in results["search"]["trials"] if trial["continues"] is None]
    assert len(roots) > 1
    assert sum(asked) == 2 * COUNT + BATCH  # the first batch twice


def test_a_single_trial_draws_its_own_batches_as_ever(tmp_path, asked):
    ran(tmp_path / "run", *SEARCH, "search.trials=1")
    assert sum(asked) == 2 * COUNT


def test_what_recovers_further_meets_new_batches(tmp_path, asked):
    """A network would see those of its first recovery again."""
    settings = ["search.goal='macs=2x'", "search.mixture=off", "recover.epochs=2", "train.epochs=6"]
    results = ran(tmp_path / "run", *settings)
    trials = results["search"]["trials"]
    further = [trial for trial in trials if trial["continues"] is not None]
    assert further, [trial["number"] for trial in trials]
    epochs = [sum(row["stage"] == f"trial {number}" for row in results["history"]) for number in (1, further[0]["number"])]
    assert further[0]["continues"] == 1 and epochs == [4, 4]  # without pressure, the first has more epochs than the others
    assert sum(asked) == sum(epochs) * COUNT + BATCH


def test_a_stopped_search_ends_in_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setattr("svdcompress.train._state.SHARE_OF_TIME", 1e9)  # save after each epoch
    search = [*SEARCH, "search.trials=2"]
    ran(tmp_path / "whole", *search)
    own, steps = Teacher.mix, iter(range(10**6))

    def mix(self, *given):
        if next(steps) == 3 * 6 + 2:
            raise Interrupted("in the second trial")
        return own(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Teacher, "mix", mix)
        with pytest.raises(Interrupted):
            ran(tmp_path / "parts", *search)
    ran(tmp_path / "parts", *search, resume=True)
    one, other = (open_run(tmp_path / name, trust_code=True).model.state_dict() for name in ("whole", "parts"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_plan_counts_the_answers_once(monkeypatch):
    monkeypatch.setattr("svdcompress.pipeline._estimate._epoch_seconds", lambda *given, **more: 1.0)
    monkeypatch.setattr("svdcompress.pipeline._estimate._forward_seconds", lambda *given: 0.01)

    def planned(*settings):
        recipe = load_recipe(None, [*SHORT, *SEARCH, *settings])
        recipe.model.name, recipe.data.name = f"{__file__}:net", f"{__file__}:images"
        return estimate(recipe).seconds["search"]

    for trials, spared in ((1, 0.0), (3, 2 * 2 * 0.01 * COUNT)):
        each = [f"search.trials={trials}"]
        layers = planned(*each, "recover.distill.layers=1")  # needs the dense network in each step
        assert layers - planned(*each) == pytest.approx(spared)
