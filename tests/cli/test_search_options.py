"""Search options that would have no effect are refused."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from svdcompress.cli import app
from svdcompress.cli._settings import Settings
from svdcompress.cli._sparsify import _check_search
from svdcompress.errors import UsageError
from svdcompress.recipe import load_recipe

ALONE = [("--objective", "macs"), ("--latency-command", "./ask.sh"), ("--trials", "2"), ("--max-minutes", "5")]


def refused(*words):
    """The message for options that would have no effect."""
    result = CliRunner().invoke(app, ["sparsify", "digits", *words], env={"COLUMNS": "200"})
    assert result.exit_code == UsageError.exit_code, result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize("option", ALONE, ids=lambda option: option[0])
def test_what_goes_with_a_search_alone(option):
    assert f"{option[0]} needs --max-drop, --max-error or --goal" in refused(*option)


def test_several_of_them_are_told_at_once():
    assert "--objective, --trials and --max-minutes need --max-drop" in refused(*ALONE[0], *ALONE[2], *ALONE[3])


@pytest.mark.parametrize("search", [("--goal", "macs=2x"), ("--max-drop", "1"), ("--max-drop", "1", "--objective", "bytes")])
def test_a_latency_command_goes_with_a_latency(search):
    assert "--latency-command needs --goal latency=..." in refused("--latency-command", "./ask.sh", *search)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        (["--max-drop", "0.5"], "search.max_drop=2"),
        (["--max-drop", "0.5"], "search={max_drop: 2, levels: 3}"),
        (["--goal", "macs=2x"], "search.goal=macs=3x"),
        (["--dense-epochs", "3"], "dense.epochs=4"),
        (["--threshold", "1.0"], "convert.threshold=2"),
        (["--weights", "a.pt"], "weights.file=b.pt"),
        (["--untrained"], "weights.trained=true"),
        (["--no-calibrate"], "calibrate.posterior=laplace-diagonal"),
        (["--data-arg", "limit=3"], "data.args.limit=4"),
        (["--validation", "0.2"], "data.validation=0.1"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_set_does_not_silently_overrule_an_option(option, value):
    told = option[0] if len(option) == 1 else f"{option[0]} {option[1]}"
    assert f"error: {told} and --set {value} contradict each other" in refused(*option, "--set", value, "--dry-run")


def test_an_option_and_set_may_say_the_same():
    made = Settings("digits", weights="a.pt", validation="0.1", data_arg=["limit=3"], set_=["weights=a.pt"])
    set_ = ["search={max_drop: .5}", "data.validation=0.1", "data.args.limit=3", "relevance.candidates=[1, 2]"]
    found = replace(made, set_=[*made.set_, *set_]).resolved(search__max_drop=0.5, relevance__candidates=[])
    assert (found.search.max_drop, found.data.validation, found.relevance.candidates) == (0.5, 0.1, [1, 2])


def test_a_section_that_does_not_name_a_field_leaves_that_of_the_option():
    made = Settings("digits", data="digits", validation="0.1", set_=["search={levels: 3}", "data={limit: 200}"])
    found = made.resolved(search__max_drop=0.5)
    assert (found.search.levels, found.search.max_drop) == (3, 0.5)
    assert (found.data.name, found.data.validation, found.data.limit) == ("digits", 0.1, 200)


def test_what_goes_together_is_not_refused():
    latency = {"objective": None, "trials": 2, "max-minutes": 5.0, "latency-command": "./ask.sh"}
    for settings in (["search.goal='latency=2x'"], ["search.max_drop=1", "search.objective=latency"]):
        _check_search(load_recipe(None, settings), latency)
    _check_search(load_recipe(None), dict.fromkeys(latency))
