"""The report section for the results of `svdc evaluate`."""

import json
import re

import pytest

from svdcompress.report import render

METRICS = {"error": 2.0, "nll": 0.1, "brier": 0.05, "ece": 0.02}


def contender(name, low, high, **more):
    selective = {"share": [0.5, 1.0], "loss": [0.0, 0.02], "answered": [{"loss": 0.01, "share": 0.75, "threshold": 0.1}]}
    difference = {key: {"value": (low + high) / 2, "low": low, "high": high} for key in METRICS}
    return {"name": name, "about": "", "metrics": METRICS, "difference": difference, "selective": selective, **more}


@pytest.fixture
def found():
    points = [{"error": 2.0 + level, "nll": 0.1, "ece": 0.02} for level in range(6)]
    names = ["dense, temperature", "better", "worse", "the same"]
    return {
        "reference": names[0],
        "replicates": 1000,
        "samples": 100,
        "inputs": 359,
        "notes": ["left out: <b>laplace</b>"],
        "contenders": [
            contender(names[0], 0, 0),
            contender(names[1], -2, -1, about="how it was made"),
            contender(names[2], 1, 2),
            contender(names[3], -1, 1),
        ],
        "shift": {"inputs": 200, "kept": 80, "curves": {"blur": {name: points for name in names}}, "mean": {}},
    }


def page(folder, found):
    (folder / "evaluation").mkdir(exist_ok=True)
    text = found if isinstance(found, str) else json.dumps(found)
    (folder / "evaluation" / "evaluation.json").write_text(text)
    return render({"name": "run"}, folder)


def test_what_is_not_significant_has_no_colour(found, tmp_path):
    text = page(tmp_path, found)
    row = lambda name: re.search(rf'<td class="name">{name}</td>(.*?)</tr>', text).group(1)  # noqa: E731
    assert row("better").count('class="number good"') == 4 and "poor" not in row("better")
    assert row("worse").count('class="number poor"') == 4 and "good" not in row("worse")
    for name in ("the same", "dense, temperature"):
        assert "good" not in row(name) and "poor" not in row(name)
    assert "75.0%" in row("better") and "answered at 99%" in text
    assert "359 test inputs" in text and "better: how it was made." in text and "&lt;b&gt;laplace" in text


def test_headings_are_those_of_the_columns(found, tmp_path):
    heads = re.findall(r'<th scope="col" class="number">(.*?)</th>', page(tmp_path, found))
    assert heads == ["error %", "NLL", "Brier", "ECE", "answered at 99%"]


def test_reliability_and_inputs_from_elsewhere(found, tmp_path):
    for k, row in enumerate(found["contenders"]):
        row["reliability"] = {"confidence": [0.6, 0.95], "accuracy": [0.5, 0.9], "count": [20, 80]}
        row["ood"] = {"noise": {"entropy": 0.7 + 0.05 * k, "softmax": 0.6}, "<b>": {"entropy": 0.5}} if k else {}
    text = page(tmp_path, found)
    assert "Reliability" in text and "Inputs from elsewhere" in text and text.count("<svg") == 4
    assert "better: predictive entropy, noise: AUROC 0.750" in text and "better: confidence 0.950, accuracy 0.900" in text
    assert "<b>" not in re.sub(r"<b>[\d.]", "", text[text.index("Inputs from elsewhere") :])
    assert text.count('<button type="button" aria-pressed="true"') == 4
    del found["contenders"][0]["reliability"]
    assert "Reliability" not in page(tmp_path, found)  # its colors would not match the legend


def test_ticks_are_plain_numbers(found, tmp_path):
    assert "mathdefault" not in page(tmp_path, found)


def test_the_plots_are_there(found, tmp_path):
    text = page(tmp_path, found)
    assert "Error by share answered" in text and "Under shift" in text and text.count("<svg") == 2
    del found["shift"]
    assert "Under shift" not in page(tmp_path, found)


def test_a_run_that_was_not_evaluated_has_no_such_section(tmp_path):
    assert "Compared with other methods" not in render({"name": "run"}, tmp_path)
    assert "Compared with other methods" not in render({"name": "run"})


@pytest.mark.parametrize("text", ["{", "[]", '{"contenders": []}', '{"contenders": [{"metrics": {"error": "x"}}]}'])
def test_a_damaged_file_is_told_of(text, tmp_path):
    assert "cannot be shown" in page(tmp_path, text)
