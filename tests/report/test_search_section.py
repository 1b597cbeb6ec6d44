"""The report section on a search: its trials, and what they cost."""

import copy
import io
import re

import pytest
from rich.console import Console

from svdcompress.report._tradeoff import run_point, search, trials_table

MIXTURE = {"chosen": "half-even", "usual": "global", "examples": 9, "candidates": []}


@pytest.fixture
def results():
    def trial(number, macs, error, mixture):
        costs = {"macs": macs, "parameters": macs, "nonzero": macs}
        told = {"number": number, "beta": 0.5 * number, "costs": costs, "error": error, "drop": error - 2, "upper": error - 1.5}
        return told | {"met": True, "seconds": 7.0, "mixture": mixture}

    found = {
        "objective": "macs",
        "goal": "macs=4x",
        "confidence": 0.9,
        "validation_examples": 500,
        "dense": {"error": 2.0, "costs": {"macs": 1000}},
        "trials": [trial(1, 250, 3.0, None), trial(2, 248, 2.5, MIXTURE)],
        "chosen": 2,
        "met": None,
        "epochs": {"search": 330, "one_run": 120},
    }
    return {"task": "classification", "search": found}


def cells(page):
    """The table's text, row by row."""
    rows = re.findall(r"<tr>(.*?)</tr>", page.partition("<table>")[2])
    return [[re.sub("<.*?>", "", cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", row)] for row in rows]


def test_the_table_tells_mixtures_where_there_are_any(results):
    head, first, second = cells(search(results, None))
    assert head[-2:] == ["time", "mixture"] and len(head) == len(first) == len(second)
    assert first[-2:] == ["7 s", ""] and second[0] == "2 (chosen)" and second[-1] == "half-even"
    without = copy.deepcopy(results)
    without["search"]["trials"][1]["mixture"] = None
    head, first, _ = cells(search(without, None))
    assert head[-1] == "time" and len(head) == len(first)


def test_a_budget_is_told_of_where_there_is_one(results):
    page = search(results, None)
    assert "within budget" not in cells(page)[0] and "lose too much" not in page and "The large one was chosen." in page
    results["search"]["met"], results["search"]["trials"][0]["met"] = True, False
    for trial in results["search"]["trials"]:
        trial["allowed"] = 2.0
    page = search(results, None)
    head, first, second = cells(page)
    at = head.index("within budget")
    assert (first[at], second[at]) == ("no", "yes") and len(head) == len(first)
    assert "Open points lose too much; the large one was chosen." in page


def test_sizes_are_fewer_and_times_faster(results):
    assert cells(search(results, None))[0][1] == "fewer multiply-accumulates"
    found = results["search"]
    for costs in (found["dense"]["costs"], *(trial["costs"] for trial in found["trials"])):
        costs["latency"] = costs["macs"] / 100
    page = search({"task": "classification", "search": {**found, "objective": "latency"}}, None)
    assert cells(page)[0][1] == "faster" and "milliseconds" not in page


def test_warnings_that_the_page_begins_with_are_not_said_twice(results):
    results["search"]["notes"] = ["the first", "the second"]
    results["warnings"] = ["the first"]
    page = search(results, None)
    assert "the second" in page and "the first" not in page


def test_a_trial_of_a_single_example_has_no_bound(results):
    for trial in results["search"]["trials"]:
        trial["upper"] = None
    head, first, _ = cells(search(results, None))
    assert first[head.index("at most")] == ""
    out = io.StringIO()
    Console(file=out, width=100).print(trials_table(results))
    assert "1" in out.getvalue()
    results["search"]["met"], results["search"]["trials"][0]["allowed"] = True, 1.0
    assert "the measured drop alone decided" in search(results, None)


def test_what_it_took_is_said(results):
    assert "The path and all trials trained 330 epochs, 2.8 times those of one run." in search(results, None)
    for none in (None, {"search": 3, "one_run": 0}):
        assert "epochs" not in search(results | {"search": {**results["search"], "epochs": none}}, None)


def test_a_trial_that_recovered_on_is_called_so(results):
    results["search"]["trials"][1]["continues"] = 1
    assert [row[0] for row in cells(search(results, None))[1:]] == ["1", "2, 1 recovered further (chosen)"]


def test_the_terminal_names_each_trial_within_80_columns(results):
    results["search"]["trials"][1]["continues"] = 1
    screen = Console(width=80, record=True, file=io.StringIO())
    screen.print(trials_table(results))
    lines = screen.export_text().splitlines()
    assert [line.partition("│")[0].strip() for line in lines if "x │" in line] == ["1", "2, of 1"]
    assert len(lines) == 6 and lines[-1].rstrip().endswith("chosen")  # title, two-line header and its rule, one line per trial


def judged_by_nll(results, met=True):
    for trial, (estimate, at_most) in zip(results["search"]["trials"], [(0.9, 1.4), (0.2, 0.3)], strict=True):
        trial |= {"estimate": estimate, "at_most": at_most, "allowed": 0.5, "met": at_most <= 0.5}
    results["search"]["met"] = met
    return results


def test_where_the_nll_decided_its_bounds_are_told(results):
    """The second trial's counted bound exceeds what is allowed, but it still keeps the budget."""
    page = search(judged_by_nll(results), None)
    head, first, second = cells(page)
    at = head.index("by the NLL")
    assert head[at - 2 : at + 3] == ["lost", "at most", "by the NLL", "at most, by it", "within budget"]
    assert first[at : at + 3] == ["+0.90", "+1.40", "no"] and second[at : at + 3] == ["+0.20", "+0.30", "yes"]
    assert "500 examples are too few for counted errors to tell: the bound on the drop estimated from the NLL" in page
    assert "decided which trial lost least" in search(judged_by_nll(results, met=None), None)


def test_where_counted_errors_decided_there_is_no_word_of_the_nll(results):
    for trial in results["search"]["trials"]:
        trial |= {"allowed": 2.0, "estimate": None, "at_most": None}
    results["search"]["met"] = True
    page = search(results, None)
    assert "NLL" not in page and "too few" not in page and "by the NLL" not in cells(page)[0]
    results["search"]["trials"][0]["allowed"] = 1.0  # at most 1.5, yet within the budget: the drop itself decided
    assert "500 examples are too few for counted errors to tell: the measured drop alone decided" in search(results, None)


def test_the_terminal_tells_the_bound_that_decided(results):
    screen = Console(width=80, record=True, file=io.StringIO())
    screen.print(trials_table(judged_by_nll(results)))
    text = screen.export_text()
    assert [line.split("│")[4].strip() for line in text.splitlines() if "x │" in line] == [
        "3.4",
        "2.3",
    ]
    assert "decided which trials are within the budget" in " ".join(text.split()) and max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("high", [None, 0.5])
def test_a_run_whose_interval_has_no_upper_end_is_drawn_without_it(high):
    """For example with a single test example, whose spread is unknown."""
    sides = {side: {"metrics": {"rmse": rmse}} for side, rmse in (("dense", 1.0), ("sparse", 1.25))}
    found = run_point({**sides, "compression": {"macs": 2.0}, "changes": {"rmse": {"low": None, "high": high}}}, "macs")
    assert found is not None
    point, dense = found
    assert (point.ratio, point.error, point.upper, dense) == (2.0, 1.25, None if high is None else 1.5, 1.0)


@pytest.mark.parametrize(
    ("task", "unit"), [("classification", " points"), ("regression", "% of the RMSE"), ("gaussian", "% of the RMSE")]
)
def test_a_budget_is_told_with_its_unit(results, task, unit):
    found = results | {"task": task, "search": results["search"] | {"goal": None, "max_drop": 3.0, "met": True}}
    assert f"Asked for: at most 3{unit} lost." in search(found, None)
