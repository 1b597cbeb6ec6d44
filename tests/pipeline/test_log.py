"""Optional TensorBoard logs: the scalars of each epoch, and the error if the package is missing."""

import sys

import pytest

from svdcompress.errors import DependencyError
from svdcompress.pipeline import run
from svdcompress.pipeline._log import log_row


def test_the_event_files_hold_the_figures_of_each_epoch(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for epoch in (1, 2):
        log_row(tmp_path, {"stage": "train", "epoch": epoch, "nll": 0.5 / epoch, "beta": None, "sparsity": 0.1 * epoch})
    files = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    files.Reload()
    assert sorted(files.Tags()["scalars"]) == ["train/nll", "train/sparsity"]
    assert [(event.step, event.value) for event in files.Scalars("train/nll")] == [(1, 0.5), (2, 0.25)]


def test_a_missing_package_is_said_before_anything_is_trained(tiny_recipe, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    recipe = tiny_recipe.model_copy(deep=True)
    recipe.report.tensorboard = True
    with pytest.raises(DependencyError, match=r"report\.tensorboard needs the package tensorboard"):
        run(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()
