"""A recovery that clearly makes a network worse is undone and reported; any other is kept."""

import pytest
import torch
from test_search import searching

from svdcompress.pipeline import open_run, run
from svdcompress.search import Losses, surely_worse

AT_ONCE = ("search.goal='parameters=1.5x'", "search.trials=1", "search.levels=1", "train.epochs=0", "dense.epochs=8")
WILD = ("recover.epochs=2", "recover.lr=3", "recover.noise=false", "recover.clip=null")


def tensors(out):
    return {name: value for name, value in open_run(out).model.state_dict().items() if "log_sigma2" not in name}


def worse(results):
    return [line for line in results["warnings"] if "made the network worse" in line]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def untrained(tiny_recipe, tmp_path_factory):
    """A network that was cut and never trained again."""
    out = tmp_path_factory.mktemp("cut") / "run"
    results = run(searching(tiny_recipe, *AT_ONCE, "recover.epochs=0"), out)
    assert not worse(results)
    return tensors(out), results


def test_steps_that_are_too_large_are_undone_in_a_search(tiny_recipe, tmp_path, untrained):
    results = run(searching(tiny_recipe, *AT_ONCE, *WILD), tmp_path / "run")
    (line,) = worse(results)
    assert line.startswith("trial 1: 2 epochs of recovery") and "--set recover.lr=0.3 (it was 3)" in line
    assert f"{untrained[1]['search']['trials'][0]['error']:.4g}% before them" in line
    assert results["search"]["trials"][0]["error"] == untrained[1]["search"]["trials"][0]["error"]
    assert same(tensors(tmp_path / "run"), untrained[0])
    assert [row["epoch"] for row in results["history"] if row["stage"] == "trial 1"] == [1, 2]  # discarded epochs stay recorded


def test_a_recovery_that_helps_is_kept(tiny_recipe, tmp_path, untrained):
    results = run(searching(tiny_recipe, *AT_ONCE, "recover.epochs=2", "recover.lr=0.001"), tmp_path / "run")
    assert not worse(results) and not same(tensors(tmp_path / "run"), untrained[0])


def test_a_run_without_a_search_has_it_too(tiny_recipe, tmp_path):
    found = {}
    for name, settings in {"none": ("recover.epochs=0",), "wild": WILD}.items():
        recipe = searching(tiny_recipe, "train.epochs=3", "dense.epochs=8", *settings)
        recipe = recipe.model_copy(update={"search": tiny_recipe.search})
        found[name] = run(recipe, tmp_path / name), tensors(tmp_path / name)
    (line,) = worse(found["wild"][0])
    assert line.startswith("recover: 2 epochs") and same(found["wild"][1], found["none"][1])


def test_what_chance_explains_is_not_worse():
    def losses(wrong, count=500):
        return Losses(torch.arange(count) < wrong, torch.ones(count), True)

    assert not surely_worse(losses(30), losses(30)) and not surely_worse(losses(30), losses(31))
    assert not surely_worse(losses(30), losses(20)) and surely_worse(losses(30), losses(57))


def test_squares_are_compared_by_pairs():
    squares = torch.rand(400, generator=torch.Generator().manual_seed(0)) ** 2
    one = torch.ones(400)
    before = Losses(squares, one, False)
    assert not surely_worse(before, before) and surely_worse(before, Losses(1.05 * squares, one, False))
    assert not surely_worse(before, Losses(squares.flip(0), one, False)) and not surely_worse(
        before, Losses(0.9 * squares, one, False)
    )
