"""The choice of a mixture in a run: how it is reported, a stop after it, and a search without it."""

import json
from dataclasses import replace

import pytest
from test_search import same_tensors, searching

from svdcompress.errors import CheckpointError, Interrupted, RecipeError
from svdcompress.pipeline import _choose_masks, _trainer, run
from svdcompress.pipeline._search_kept import keep, known_way
from svdcompress.pipeline._search_words import told_mixture
from svdcompress.recipe import dump_recipe, load_recipe
from svdcompress.report import Results
from svdcompress.search import Trial

HARD = ("search.goal='nonzero=12x'", "search.trials=1", "search.levels=1")
"""A goal that so little pressure does not reach by itself."""


@pytest.fixture(scope="module")
def found(tiny_recipe, tmp_path_factory):
    out = tmp_path_factory.mktemp("mixtures") / "run"
    return out, run(searching(tiny_recipe, *HARD, "search.mixture=auto"), out)


def test_the_report_tells_the_candidates(found):
    out, results = found
    (trial,) = results["search"]["trials"]
    mixture = trial["mixture"]
    names = [one["name"] for one in mixture["candidates"]]
    assert names[0] == mixture["usual"] == "weights" and set(names) <= {"weights", "units-25%", "units-50%", "units-100%"}
    assert len(names) > 1 and mixture["chosen"] in names
    by_name = {one["name"]: one for one in mixture["candidates"]}
    assert by_name[mixture["chosen"]]["nll"] <= by_name["weights"]["nll"]
    assert all(one["size"] <= by_name["weights"]["size"] for one in mixture["candidates"])
    assert trial["costs"]["nonzero"] == pytest.approx(by_name[mixture["chosen"]]["size"], rel=0.02)  # biases continue to learn
    stored = json.loads((out / "report.json").read_text())
    assert stored["search"]["trials"][0]["mixture"] == mixture
    known = Results.model_validate(stored).search
    assert known is not None and known.trials[0].mixture is not None and known.trials[0].mixture.chosen == mixture["chosen"]


def test_off_and_on_differ_by_the_choice_alone(found, tiny_recipe, tmp_path):
    out, results = found
    plain = run(searching(tiny_recipe, *HARD, "search.mixture=off"), tmp_path / "run")
    (with_choice,), (without,) = results["search"]["trials"], plain["search"]["trials"]
    assert without["mixture"] is None
    assert with_choice["pressure"] == without["pressure"] and with_choice["natural"] == without["natural"]
    assert same_tensors(out, tmp_path / "run") == (with_choice["mixture"]["chosen"] == "weights")


def test_a_stop_after_the_choice_keeps_it(found, tiny_recipe, tmp_path, monkeypatch):
    out, _ = found
    recipe = searching(tiny_recipe, *HARD, "search.mixture=auto")

    def stop(self, row):
        if row["stage"] == "trial 1":
            self.context.stop.signal = "SIGTERM"

    with monkeypatch.context() as patched:
        patched.setattr(_trainer.Trainer, "_log", stop)
        with pytest.raises(Interrupted):
            run(recipe, tmp_path / "run")
    assert (tmp_path / "run" / "state" / "search" / "trial-1" / "way.json").is_file()
    monkeypatch.setattr(_choose_masks, "chosen", None)  # the choice is not made again
    again = run(recipe, tmp_path / "run", resume=True)
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "run" / "model.safetensors").read_bytes()
    assert again["search"]["trials"][0]["mixture"] == found[1]["search"]["trials"][0]["mixture"]


def test_sizes_of_shapes_choose_among_ranks(tiny_recipe, tmp_path):
    two_layers = ("model.args={sizes: [64, 24, 16, 10]}", "search.goal='parameters=4x'", "search.trials=1", "search.levels=1")
    results = run(searching(tiny_recipe, *two_layers, "search.mixture=auto"), tmp_path / "run")
    (trial,) = results["search"]["trials"]
    assert results["search"]["reached"] is True
    told = {one["name"]: one for one in trial["mixture"]["candidates"]}
    assert set(told) <= {"global", "half-even", "mostly-even", "even"} and len(told) > 1
    assert told[trial["mixture"]["chosen"]]["size"] == trial["costs"]["parameters"]


def test_the_line_of_a_trial_names_another_mixture_than_the_usual():
    common = {
        "number": 1,
        "pressure": 1.0,
        "beta": 0.1,
        "ratio": 1.0,
        "natural": 1.0,
        "threshold": 3.0,
        "costs": {},
        "metrics": {},
    }
    trial = Trial(**common, error=2.0, drop=0.0, upper=0.0, allowed=1.0, met=True, seconds=1.0)
    assert told_mixture(trial) == ""
    usual = {"chosen": "global", "usual": "global", "examples": 9, "candidates": []}
    assert told_mixture(replace(trial, mixture=usual)) == ""
    assert told_mixture(replace(trial, mixture={**usual, "chosen": "even"})) == " (mixture even)"
    assert Trial.of(json.loads(json.dumps(replace(trial, mixture=usual).to_dict()))).mixture == usual


def test_the_setting_is_auto_or_off():
    for text, value in (("off", "off"), ("'off'", "off"), ("auto", "auto")):
        recipe = load_recipe(None, [f"search.mixture={text}"])
        assert recipe.search.mixture == value and f"mixture: {value}" in dump_recipe(recipe).replace("'", "")
    for wrong in ("best", "on", "1"):
        with pytest.raises(RecipeError, match=r"search\.mixture"):
            load_recipe(None, [f"search.mixture={wrong}"])


def test_a_damaged_choice_is_said(tmp_path):
    file = tmp_path / "way.json"
    assert known_way(file) is None
    keep(file, {"way": "even", "asked": None, "count": 12.5, "mixture": None})
    assert known_way(file) == {"way": "even", "asked": None, "count": 12.5, "mixture": None}
    for damage in ("{", "[]", '{"way": "even"}'):
        file.write_text(damage)
        with pytest.raises(CheckpointError, match=r"way.json: damaged .*remove .* to make the trial again") as error:
            known_way(file)
        assert error.value.resumable
