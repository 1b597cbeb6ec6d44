"""`distill.views` in whole runs: what the teacher is asked, what is said, and that a stopped run ends in the same bytes."""

import pytest
import torch
from torch import nn

from svdcompress.errors import Interrupted
from svdcompress.pipeline import open_run, run
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


def test_recovery_asks_for_each_view_once_and_says_nothing(tmp_path, asked):
    results = ran(tmp_path / "run", "recover.distill.views=2")
    assert sum(asked) == 2 * COUNT + BATCH  # the first batch twice
    assert not any("views" in line for line in results["warnings"] + results["notes"])
    opened = open_run(tmp_path / "run", trust_code=True)
    assert opened.recovery.distill.views == 2
    assert opened.recovery.distill.weight == 0.9  # chosen by recover.optimizer: auto, whatever else is set
    asked.clear()
    ran(tmp_path / "each", "recover.distill.views=0")
    assert sum(asked) == 6 * COUNT


def test_the_trials_of_a_search_share_them(tmp_path, asked):
    search = ["search.max_drop=20", "search.objective=macs", "search.trials=3", "search.mixture=off"]
    results = ran(tmp_path / "run", *search, "recover.distill.views=2", "recover.epochs=2")
    assert sum(trial["continues"] is None for trial in results["search"]["trials"]) > 1
    assert sum(asked) == 2 * COUNT + BATCH
    (line,) = {line for line in results["warnings"] if "distill.views" in line}
    assert line.startswith("recover.distill.views: no epoch comes again in 2 epochs, so only the trials of a search save time")


def test_a_stopped_run_ends_in_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setattr("svdcompress.train._state.SHARE_OF_TIME", 1e9)  # save after each epoch
    ran(tmp_path / "whole", "recover.distill.views=2")
    own, steps = Teacher.mix, iter(range(10**6))

    def mix(self, *given):
        if next(steps) == 3 * 6 + 2:
            raise Interrupted("in the fourth epoch")
        return own(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Teacher, "mix", mix)
        with pytest.raises(Interrupted):
            ran(tmp_path / "parts", "recover.distill.views=2")
    ran(tmp_path / "parts", "recover.distill.views=2", resume=True)
    one, other = (open_run(tmp_path / name, trust_code=True).model.state_dict() for name in ("whole", "parts"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_without_a_teacher_says_that_it_changes_nothing(tmp_path):
    results = ran(tmp_path / "run", "recover.distill.views=2", "recover.optimizer=adam")
    assert [line for line in results["warnings"] if "recover.distill.views: it changes nothing" in line]
