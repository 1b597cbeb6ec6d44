"""What an earlier session reported about trials and trainings is in the report of the resumed run."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from test_search import searching
from torch import nn
from torch.nn import functional as F

import svdcompress as svdc
from svdcompress.errors import Interrupted
from svdcompress.likelihoods import make_loss
from svdcompress.pipeline import _search_trials, run
from svdcompress.recipe import LossSection, Training, load_recipe
from svdcompress.sources import InMemory
from svdcompress.train import fit

WILD = ("train.epochs=0", "dense.epochs=8", "recover.epochs=2", "recover.lr=3", "recover.noise=false", "recover.clip=null")


def test_what_a_trial_was_told_of_is_told_after_a_resume(tiny_recipe, tmp_path, monkeypatch):
    recipe = searching(tiny_recipe, "search.max_drop=20", "search.objective=parameters", "search.trials=2", *WILD)
    trial = _search_trials.Trials._trial

    def first_alone(self, *given):
        if self.kept.trials:
            raise Interrupted("stopped")
        return trial(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(_search_trials.Trials, "_trial", first_alone)
        with pytest.raises(Interrupted):
            run(recipe, tmp_path / "run")
    results = run(recipe, tmp_path / "run", resume=True)
    told = [line for line in results["warnings"] if line.startswith("trial 1: 2 epochs of recovery made the network worse")]
    assert len(told) == 1 and len(results["search"]["trials"]) >= 2
    assert len(set(results["warnings"])) == len(results["warnings"])


def test_how_it_was_measured_is_told_after_a_resume(tiny_recipe, tmp_path, monkeypatch):
    recipe = searching(tiny_recipe, "search.goal='latency=2x'", "search.trials=1", "search.levels=1", "train.epochs=1")
    busy = SimpleNamespace(crowded=lambda threads: True)

    def stops(*given):
        raise Interrupted("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(_search_trials, "watched", lambda: nullcontext(busy))
        patch.setattr(_search_trials, "busy_machine", lambda *given: "the machine was busy")
        patch.setattr(_search_trials.Trials, "_trial", stops)
        with pytest.raises(Interrupted):
            run(
                recipe.model_copy(update={"search": recipe.search.model_copy(update={"goal": "latency=0.01ms"})}),
                tmp_path / "run",
            )
    results = run(load_recipe(tmp_path / "run"), tmp_path / "run", resume=True)
    assert results["warnings"].count("the machine was busy") == 1


def test_a_fit_that_goes_on_says_again_what_was_settled_at_its_start(tmp_path, monkeypatch):
    """For example that running statistics are kept, which a later check might not find."""
    monkeypatch.setattr("svdcompress.train._state.SHARE_OF_TIME", 1e9)  # save after each epoch
    torch.manual_seed(0)
    x = torch.randn(200, 4) + torch.tensor([30.0, 0, 0, 0]) * (torch.arange(200) % 2)[:, None]
    y, told = (x[:, 0] > 15).long(), []

    def fitted(stop=lambda: False):
        torch.manual_seed(1)
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
        with torch.no_grad():  # correct for only one half of the data
            model[0].running_mean[0], model[0].running_var[0] = 0.0, 1.0
            model[1].weight.copy_(torch.tensor([[-5.0, 0, 0, 0], [5.0, 0, 0, 0]]))
            model[1].bias.copy_(torch.tensor([75.0, -75.0]))
        settings = Training(epochs=3, batch_size=50, norms="auto", lr=1e-6)
        more = {"device": "cpu", "state": tmp_path / "fit.pt", "on_note": lambda line, settled: told.append((line, settled))}
        fit(svdc.convert(model), InMemory(x, y), make_loss(LossSection()), settings, stop=stop, **more)

    assert F.cross_entropy(torch.zeros(2, 2), torch.zeros(2).long()) > 0
    asked = iter([False] * 5)
    with pytest.raises(Interrupted):
        fitted(lambda: next(asked, True))
    assert len(told) == 1 and told[0][1] and "running" in told[0][0]
    fitted()
    assert told[1:] == told[:1]
