"""The seconds of a stage include all sessions, wherever one ended."""

import pytest

from svdcompress.errors import Interrupted
from svdcompress.files import sealed, unsealed
from svdcompress.pipeline import _context, _trainer, run
from svdcompress.recipe import load_recipe


def on_disk(out):
    return unsealed((out / "state" / "run.json").read_text())


@pytest.fixture
def recipe():
    few = ["dense.epochs=1", "train.epochs=2", "recover.epochs=0", "uncertainty.samples=0"]
    sets = ["model.args={sizes: [64, 24, 10]}", "data.limit=300", "report.html=false", "export.onnx=false", "device=cpu"]
    return load_recipe("digits", [*few, *sets])


def stopped_in_training(recipe, out, monkeypatch, at_epoch=lambda: None):
    log = _trainer.Trainer._log

    def stop(self, row):
        log(self, row)
        if row["stage"] == "train":
            at_epoch()
            self.context.stop.signal = "SIGTERM"

    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(_trainer.Trainer, "_log", stop)
        run(recipe, out)


def test_those_before_a_stop_count(recipe, tmp_path, monkeypatch):
    out = tmp_path / "run"
    stopped_in_training(recipe, out, monkeypatch)
    facts = on_disk(out)
    assert set(facts["unfinished"]) == {"train"} and 0 < facts["unfinished"]["train"] < 60
    assert "train" not in facts["seconds"] and 0 < facts["seconds"]["dense"] < 60
    (out / "state" / "run.json").write_text(sealed(facts | {"unfinished": {"train": 1000.0}}))
    seconds = run(recipe, out, resume=True)["seconds"]
    assert 1000 < seconds["train"] < 1060 and seconds["dense"] < 60
    assert sum(seconds.values()) < 1120


def test_those_before_a_kill_count_up_to_the_last_epoch(recipe, tmp_path, monkeypatch):
    """A killed process cannot write at the end, so the count is stored during training."""
    out, seen = tmp_path / "run", []
    for every in (0.0, 1e9):
        monkeypatch.setattr(_context.Context.beat, "__defaults__", (every,))
        stopped_in_training(recipe, out / str(every), monkeypatch, lambda every=every: seen.append(on_disk(out / str(every))))
    often, never = seen
    assert often["unfinished"]["train"] > 0 and not never["unfinished"]
