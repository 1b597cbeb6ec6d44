"""One tiny run from start to end, shared by the tests that look at it."""

import pytest

from svdcompress.recipe import load_recipe

TINY = [
    "model.args={sizes: [64, 24, 10]}",
    "data.limit=300",
    "dense.epochs=3",
    "dense.lr=0.01",
    "train.epochs=4",
    "train.lr=0.01",
    "train.beta={start: 0, stop: 2, final: 0.02}",
    "recover.epochs=2",
    "recover.beta=0.02",
    "uncertainty.samples=5",
    "device=cpu",
]


@pytest.fixture(scope="session")
def tiny_recipe():
    return load_recipe("digits", TINY)


@pytest.fixture(scope="session")
def tiny_run(tiny_recipe, tmp_path_factory):
    """(folder, results) of a whole run."""
    from svdcompress.pipeline import run

    folder = tmp_path_factory.mktemp("runs") / "tiny"
    return folder, run(tiny_recipe, folder)
