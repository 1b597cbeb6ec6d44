"""Options of the search that would do nothing are refused."""

import pytest
from typer.testing import CliRunner

from svdcompress.cli import app
from svdcompress.cli._sparsify import _check_search
from svdcompress.errors import UsageError
from svdcompress.recipe import load_recipe

ALONE = [("--objective", "macs"), ("--latency-command", "./ask.sh"), ("--trials", "2"), ("--max-minutes", "5")]


def refused(*words):
    """What is said of options that would do nothing."""
    result = CliRunner().invoke(app, ["sparsify", "digits", *words], env={"COLUMNS": "200"})
    assert result.exit_code == UsageError.exit_code, result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize("option", ALONE, ids=lambda option: option[0])
def test_what_goes_with_a_search_alone(option):
    assert f"{option[0]} goes with --max-drop, --max-error or --goal" in refused(*option)


def test_several_of_them_are_told_at_once():
    assert "--objective, --trials and --max-minutes go with --max-drop" in refused(*ALONE[0], *ALONE[2], *ALONE[3])


@pytest.mark.parametrize("search", [("--goal", "macs=2x"), ("--max-drop", "1"), ("--max-drop", "1", "--objective", "bytes")])
def test_a_latency_command_goes_with_a_latency(search):
    assert "--latency-command goes with --goal latency=..." in refused("--latency-command", "./ask.sh", *search)


def test_what_goes_together_is_not_refused():
    latency = {"objective": None, "trials": 2, "max-minutes": 5.0, "latency-command": "./ask.sh"}
    for settings in (["search.goal='latency=2x'"], ["search.max_drop=1", "search.objective=latency"]):
        _check_search(load_recipe(None, settings), latency)
    _check_search(load_recipe(None), dict.fromkeys(latency))
