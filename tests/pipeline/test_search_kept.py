"""The stored trials of a search: a sound file is taken as it is, and any other value is refused with its name."""

import json
import math
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest

from svdcompress.errors import CheckpointError
from svdcompress.files import sealed, unsealed
from svdcompress.pipeline._search_kept import Kept
from svdcompress.pipeline._search_schema import Pruned, Tried
from svdcompress.pipeline._search_trials import Trials
from svdcompress.prune import PruneGroup, PruneReport
from svdcompress.search import NOTHING, Trial

MIXTURE = {"chosen": "even", "usual": "global", "examples": 9, "candidates": [{"name": "even", "nll": None, "size": 20.0}]}
FIRST = Trial(
    number=1,
    pressure=-7.0,
    beta=0.001,
    ratio=1.7,
    natural=1.0,
    threshold=None,
    costs={"macs": 30, "latency": 0.25},
    metrics={"rmse": 1.1, "nll": 0.5, "r2": None},
    error=1.1,
    drop=-0.5,
    upper=None,
    allowed=1e9,
    met=True,
    seconds=3.5,
    mixture=MIXTURE,
    reconstruction={"layers": 3, "before": 0.2, "after": 0.1, "left": {"head": "the last one"}},
)
EMPTY = replace(FIRST, number=2, metrics={"error": 103.0, "nll": NOTHING}, mixture=None, reconstruction=None)
LAST = replace(FIRST, number=3, continues=1, recover_lr=1e-4, estimate=0.2, at_most=0.4, threshold=3.0)


def kept_in(folder):
    kept = Kept(folder / "trials.json", trials=[FIRST, EMPTY, LAST], seconds=12.5, least=75.0, doubted=["busy"])
    row = {"stage": "trial 1", "epoch": 1, "loss": 0.5, "kl": None, "val_r2": None, "lr": 1e-3}
    kept.epochs = {1: [row], 2: [], 3: [{**row, "epoch": 2}]}
    done = PruneReport(groups=[PruneGroup("1", 3, 5, "", ("1.weight",))], inputs_kept=[0, 2], inputs_dim=1).to_dict()
    kept.pruning = {1: done, 3: {**done, "round_to": 8, "rounded": True}}
    kept.dense = {"costs": {"macs": 1776, "latency": 0.75}, "measured": {"batches": [1, 128], "machine": "one"}}
    kept.said = {"warnings": [], "notes": ["it begins without pressure"]}
    kept.write()
    return kept


def changed(folder, path, value):
    """The stored state with one value replaced; ...: removed."""
    file = kept_in(folder).file
    content = unsealed(file.read_text())
    *above, last = path.split(".")
    place = content
    for name in above:
        place = place[int(name) if isinstance(place, list) else name]
    last = int(last) if isinstance(place, list) else last
    if value is ...:
        del place[last]
    else:
        place[last] = value
    file.write_text(sealed(content))
    return file


def test_a_digit_that_was_changed_by_accident_is_noticed(tmp_path):
    file = kept_in(tmp_path).file
    text = file.read_text()
    file.write_text(text.replace('"seconds": 12.5', '"seconds": 13.5'))
    assert file.read_text() != text
    with pytest.raises(CheckpointError, match=r"trials\.json: damaged \(ValueError: changed since it was written\); remove"):
        Kept(file).read("macs")


def test_a_state_of_an_earlier_version_has_no_digest(tmp_path):
    file = kept_in(tmp_path).file
    file.write_text(json.dumps(unsealed(file.read_text())))
    assert Kept(file).read("macs").seconds == 12.5


def test_a_sound_file_is_taken_as_it_is(tmp_path):
    kept = kept_in(tmp_path)
    before = kept.file.read_bytes()
    found = Kept(kept.file).read("macs")
    assert repr(found.trials) == repr(kept.trials) and found.dense == kept.dense
    found.write()
    assert kept.file.read_bytes() == before
    assert Kept(tmp_path / "none.json").read("macs") == Kept(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("trials", {}),
        ("trials.0", 3),
        ("trials.0.number", "1"),
        ("trials.0.number", 7),
        ("trials.0.number", True),
        ("trials.0.pressure", "a"),
        ("trials.0.beta", -1.0),
        ("trials.0.ratio", None),
        ("trials.0.natural", 0),
        ("trials.0.threshold", "3"),
        ("trials.0.costs", []),
        ("trials.0.costs.macs", "x"),
        ("trials.0.costs.macs", 0),
        ("trials.0.costs.macs", ...),
        ("trials.0.costs.latency", -1.0),
        ("trials.0.metrics", []),
        ("trials.0.metrics.nll", ...),
        ("trials.0.metrics.nll", None),
        ("trials.0.metrics.rmse", "low"),
        ("trials.0.error", "x"),
        ("trials.0.drop", None),
        ("trials.0.drop", ...),
        ("trials.0.upper", "high"),
        ("trials.0.upper", ...),
        ("trials.0.met", "no"),
        ("trials.0.seconds", -1),
        ("trials.0.estimate", "x"),
        ("trials.0.mixture", "global"),
        ("trials.0.mixture.candidates", 3),
        ("trials.0.mixture.candidates.0.nll", "x"),
        ("trials.0.reconstruction.layers", 0.5),
        ("trials.0.recover_lr", 0),
        ("trials.0.continues", 1),
        ("trials.2.continues", 9),
        ("trials.2.continues", "1"),
        ("trials.0.unheard_of", 1),
        ("epochs.1", 3),
        ("epochs.1.0", 1),
        ("epochs.1.0.loss", "x"),
        ("epochs.1.0.epoch", 1.5),
        ("epochs.4", []),
        ("epochs", ...),
        ("pruning.1", "x"),
        ("pruning.1.groups", ...),
        ("pruning.1.groups.0.kept", -1),
        ("pruning.1.inputs_kept", [0.5]),
        ("pruning.1.outputs_kept", {"1": "all"}),
        ("pruning.4", PruneReport().to_dict()),
        ("said", []),
        ("said.notes", 3),
        ("seconds", None),
        ("dense.costs.macs", 0),
        ("dense.costs.latency", "0.75"),
        ("dense.measured", 3),
        ("dense.measured.batches", 128),
        ("least", "a"),
        ("least", -1.0),
        ("doubted", [1]),
    ],
)
def test_another_value_is_refused_with_its_name(tmp_path, path, value):
    file = changed(tmp_path, path, value)
    with pytest.raises(CheckpointError) as error:
        Kept(file).read("macs")
    assert str(error.value).startswith(f"{file}: damaged ({path}") and error.value.resumable
    assert str(error.value).endswith(f"); remove {tmp_path} to search again")


@pytest.mark.parametrize(("path", "said"), [("pruning.1", "pruning: it should have trial 1 (got 3)"), ("epochs.3", "trial 3")])
def test_what_a_trial_needs_in_the_end_has_to_be_there(tmp_path, path, said):
    with pytest.raises(CheckpointError) as error:
        Kept(changed(tmp_path, path, ...)).read("macs")
    assert said in str(error.value)


def test_a_trial_continues_one_that_continues_none(tmp_path):
    kept = kept_in(tmp_path)
    kept.trials.append(replace(LAST, number=4, continues=3))
    kept.epochs[4], kept.pruning[4] = [], kept.pruning[3]
    kept.write()
    with pytest.raises(CheckpointError, match=r"\(trials\.3\.continues: it should be an earlier trial .*got 3"):
        Kept(kept.file).read("macs")


def test_states_of_earlier_versions_are_read(tmp_path):
    file = kept_in(tmp_path).file
    content = unsealed(file.read_text())
    for name in ("said", "dense", "least", "doubted"):
        del content[name]
    bare = content["trials"][0]
    for name in ("estimate", "at_most", "mixture", "reconstruction", "continues", "recover_lr"):
        del bare[name]
    content["trials"] = [bare]
    content["epochs"], done = {"1": content["epochs"]["1"]}, content["pruning"]["1"]
    for name in ("round_to", "parameters_unrounded", "outputs_kept"):
        del done[name]
    for name in ("units", "unit_parameters", "unit_macs", "kept_unrounded"):
        del done["groups"][0][name]
    content["pruning"] = {"1": done}
    file.write_text(json.dumps(content))
    found = Kept(file).read("macs")
    assert found.trials == [replace(FIRST, mixture=None, reconstruction=None)]
    assert (found.said, found.dense, found.least, found.doubted) == ({}, None, None, [])


def test_every_field_is_checked():
    assert set(Tried.model_fields) == {field.name for field in fields(Trial)}
    assert set(Pruned.model_fields) == {field.name for field in fields(PruneReport)}


@pytest.mark.parametrize(
    "found",
    [
        {"drop": math.nan, "error": math.nan},
        {"metrics": {"rmse": 1.0, "nll": math.inf}},
        {"estimate": math.nan, "at_most": math.nan},
    ],
)
def test_a_trial_that_is_not_finite_is_kept_as_one_of_which_nothing_is_left(tmp_path, found):
    """JSON holds no such number, and null is refused; the resumed search decides by the same trial."""
    said, kept = [], Kept(tmp_path / "trials.json")
    judged = SimpleNamespace(error=1.5, probabilities=False)
    search = SimpleNamespace(kept=kept, judged=judged, _spend=kept.write, _say=said.append)
    (tmp_path / "trial-1").mkdir()
    small = SimpleNamespace(pruning=PruneReport().to_dict())
    Trials._done(search, replace(FIRST, **found), small, [], tmp_path / "trial-1")  # type: ignore[arg-type]
    assert said == ["trial 1: answers that are not finite, so it counts as a trial of which nothing is left"]
    (trial,) = kept.trials
    assert trial.empty and trial.lost == math.inf and not trial.met and trial.error == 3.0
    assert Kept(kept.file).read("macs").trials == [trial]
