"""How many validation and test examples get draws for promises: as requested, or a bounded number if nothing was requested."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from svdcompress.calibrate import load_promises
from svdcompress.errors import CheckpointError
from svdcompress.pipeline import KEPT, _calibrate, _figures, open_run
from svdcompress.pipeline._calibrate import LATER_MACS, MOST_MACS, measure_promises, promise_stage
from svdcompress.sources import InMemory


@pytest.fixture
def staged(tiny_run, tmp_path, monkeypatch):
    """A function of multiply-accumulates and settings that runs the stage and counts its draws."""
    run = open_run(tiny_run[0])
    some = run.data.validation.subset(torch.arange(720) % len(run.data.validation))
    data = dataclasses.replace(run.data, validation=some, test=some)

    def stage(macs, **asked):
        drawn, notes = [], []
        real = _calibrate.mc_predict

        def counted(model, inputs, *, samples, **more):
            drawn.append(samples * len(inputs))
            return real(model, inputs, samples=2, **more)

        monkeypatch.setattr(_calibrate, "mc_predict", counted)
        monkeypatch.setattr(_figures, "macs_of", lambda *_: macs)
        settings = run.recipe.calibrate.model_copy(update=asked)
        recipe = run.recipe.model_copy(update={"calibrate": settings})
        place, results = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(promises=None)
        context = SimpleNamespace(
            recipe=recipe, out=tmp_path, place=place, results=results, note=notes.append, warn=lambda line: None
        )
        opened = SimpleNamespace(data=data, inputs=run.data.train.inputs[:2])
        small = SimpleNamespace(model=run.model)
        promise_stage(context, opened, small)
        first = sum(drawn)
        drawn.clear()
        measure_promises(context, opened, small)
        monkeypatch.setattr(_calibrate, "mc_predict", real)
        return SimpleNamespace(drawn=first, measured=sum(drawn), notes=notes, promises=results.promises, data=data)

    return stage


def test_a_small_network_is_drawn_of_all_examples(staged, tmp_path):
    found = staged(1000)
    count = len(found.data.validation)
    assert found.drawn == 100 * count and found.measured == 0 and found.notes == []
    assert len(load_promises(tmp_path / KEPT, "samples").scores) == len(load_promises(tmp_path / KEPT, "mean").scores) == count


def test_a_large_one_is_drawn_little_unless_a_promise_is_asked_for(staged, tmp_path):
    macs = 2 * 10**8
    found = staged(macs)
    assert 0 < found.drawn * macs <= LATER_MACS and found.measured == 0
    count = len(found.data.validation)
    assert (
        len(load_promises(tmp_path / KEPT, "mean").scores)
        == count
        > 100
        == len(load_promises(tmp_path / KEPT, "samples").scores)
    )
    assert (
        len(found.notes) == 1
        and f"100 of {count} validation examples" in found.notes[0]
        and "calibrate.coverage" in found.notes[0]
    )
    asked = staged(macs, coverage=0.9, answer_above=0.5)
    assert 9 * found.drawn < asked.drawn <= MOST_MACS / macs
    assert asked.measured <= MOST_MACS / macs  # once for both promises, including the mean size of a set
    assert all("test" in promise for by in asked.promises.values() for promise in by.values())
    assert asked.promises["coverage"]["mean"]["examples"] == count
    draws = asked.promises["coverage"]["samples"]["samples"]
    assert load_promises(tmp_path / KEPT, "samples").samples == draws == asked.promises["answer_above"]["samples"]["samples"]
    assert asked.measured % draws == 0 and "samples" not in asked.promises["coverage"]["mean"]


def test_a_huge_one_is_not_drawn_and_that_is_said(staged, tmp_path, tiny_run):
    found = staged(10**10)
    assert found.drawn == 0 and "holds no data on draws" in found.notes[0] and "calibrate.answer_above" in found.notes[0]
    assert len(load_promises(tmp_path / KEPT, "mean").scores) == len(found.data.validation)
    with pytest.raises(CheckpointError, match=r"no results of 'samples'.*needs calibrate\.coverage"):
        load_promises(tmp_path / KEPT, "samples")


def test_who_asks_for_a_promise_gets_draws_whatever_they_cost():
    data, context = InMemory(torch.zeros(720, 2), torch.zeros(720).long()), SimpleNamespace(note=lambda line: None)
    known = {asked: _calibrate._known(context, data, 10**12, asked) for asked in (True, False)}
    assert {asked: sorted(found) for asked, found in known.items()} == {True: ["mean", "samples"], False: ["mean"]}
    assert len(known[True]["samples"][0]) == 100 and known[True]["samples"][1] == 10 and len(known[True]["mean"][0]) == 720
