"""Columns of text, which become an input for each of their values: a run lists them, and warns of numbers among them."""

import pytest

from svdcompress.errors import DataError
from svdcompress.recipe import DataSection
from svdcompress.sources import open_data
from svdcompress.sources._categories import note, with_comma


def opened(path, values, task="classification", target="y"):
    rows = "".join(f'"{value}",{row},{row % 2}\n' for row, value in enumerate(values))
    path.write_text("value,n,y\n" + rows)
    return open_data(DataSection(name=f"csv:{path}", target=target), task)


def test_text_columns_are_listed_with_their_numbers_of_values(tmp_path):
    data = opened(tmp_path / "a.csv", [f"2024-01-{day:02}" for day in range(1, 31)])
    assert "a.csv that hold text become one input of 0 or 1 for each value: value (30 values)" in data.notes[0]
    assert data.warnings == []
    plain = opened(tmp_path / "b.csv", range(30))
    assert not any("hold text" in line for line in plain.notes)


def test_of_many_text_columns_those_with_most_values_are_named():
    (line,) = note({f"c{count}": [str(value) for value in range(count)] for count in range(1, 15)}, "a.csv")
    assert line.endswith(" and 4 more") and ": c14 (14 values), c13" in line and "c4 (" not in line
    assert "c (1 value)" in note({"c": ["a"]}, "a.csv")[0]


@pytest.mark.parametrize("form", ["{0},{0}0", "{0},000", "1.{0}00,5", "-{0},5e3", "{0},5%"])
def test_numbers_with_commas_are_warned_of(tmp_path, form):
    data = opened(tmp_path / "a.csv", [form.format(row % 9 + 1) for row in range(30)])
    (line,) = data.warnings
    assert "column 'value' is read as text, with an input for each of its 9 values, but they look like numbers" in line


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (["1", "2", "1,5"], "1,5"),
        (["unknown", "0,5", "1,5"], "0,5"),
        (["12", "1,234", "1,234,567.5"], "1,234"),
        (["a", "b, c", "1,5"], None),
        (["x", "1", "2,3"], None),
        (["1", "1,2,3", "2,4,6"], None),
        (["01", "1", "A1"], None),
        (["1.2.2024", "3.4.2025"], None),
    ],
)
def test_nearly_all_values_must_be_numbers(values, found):
    assert with_comma(values) == found


def test_many_values_and_targets_with_commas_are_refused_with_what_to_do(tmp_path):
    values = [f"{row},5" for row in range(120)]
    with pytest.raises(DataError, match=r"120 distinct values, which look like numbers with a comma \(0,5\): write"):
        opened(tmp_path / "a.csv", values)
    with pytest.raises(DataError, match=r"holds '0,5' in row 0, not numbers; write numbers with a point"):
        opened(tmp_path / "a.csv", values, "regression", "value")
