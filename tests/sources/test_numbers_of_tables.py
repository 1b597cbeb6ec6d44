"""Columns of numbers: what float32 loses of targets, and text among the numbers."""

import numpy as np
import pandas as pd
import pytest

from svdcompress.errors import DataError
from svdcompress.predict import read_inputs
from svdcompress.recipe import DataSection
from svdcompress.sources._tables import _separated, open_frame, read_table


def read(path, frame, target, task="regression"):
    frame.to_csv(path, index=False)
    return read_table(str(path), DataSection(name=f"csv:{path}", target=target), "csv", task)


def test_targets_whose_differences_float32_loses_are_told(tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=400), "t": 1.7e8 + rng.normal(0, 50, 400), "u": rng.normal(5, 1, 400)})
    (line,) = read(tmp_path / "x.csv", frame, "t").warnings
    assert line.startswith("data.target: column 't': of 400 different values ") and "subtract a common offset" in line
    assert (
        len(read(tmp_path / "x.csv", frame, "t, u").warnings) == 1
        and not read(tmp_path / "x.csv", frame[["a", "u"]], "u").warnings
    )


@pytest.mark.parametrize("target", ["t", "t, a"])
def test_a_text_among_numbers_is_named_with_its_row(tmp_path, target):
    frame = pd.DataFrame({"a": np.arange(20.0), "t": [f"{102.5 + row}" for row in range(20)]})
    frame.loc[7, "t"] = "n.d."
    with pytest.raises(DataError, match=r"data\.target: .*column 't' holds 'n\.d\.' in row 7, not numbers"):
        read(tmp_path / "x.csv", frame.assign(b=1.0), target)


def test_a_constant_column_has_nothing_to_lose(tmp_path):
    frame = pd.DataFrame({"a": np.arange(20.0), "same": 1.7e9 + 1, "t": np.arange(20.0)})
    assert read(tmp_path / "x.csv", frame, "t").warnings == []


PREPROCESSING = {"columns": ["a", "kind"], "categories": {"kind": ["big", "small"]}, "transform": []}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.csv", "a;kind\n1;big\n", "has no column 'a'; it has a;kind, apparently separated by ';'"),
        ("x.csv", "b,kind\n1,big\n", "has no column 'a'; it has b, kind"),
        ("x.csv", "a,kind\n1,tiny\n", "'tiny' does not occur in training \\(big, small do\\); leave such rows out"),
        (
            "x.csv",
            "a,kind\n1,big\n2,None\n",
            r"'kind': no value \(NaN\) in row 1 \(1 such rows; an empty cell, or a text such as NA",
        ),
        ("x.tsv", "a\tkind\n1\tbig\n", "trained on a table, and reads .csv, .parquet"),
    ],
)
def test_tables_to_predict_that_do_not_fit_are_told_with_what_to_do(tmp_path, name, content, said):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=said):
        read_inputs(tmp_path / name, PREPROCESSING)


@pytest.mark.parametrize("row", ["0.1,0.2,0,", "name,0.1,0.2,0", "{row},0.2,0,", "{row},0.1,0.2,0", "0.1,0.2,0,,"])
def test_rows_with_more_fields_than_the_header_are_refused(tmp_path, row):
    """pandas would take the first for names of rows, and shift all columns; names that count look like those of any table."""
    (tmp_path / "t.csv").write_text("a,b,y\n" + "".join(row.format(row=number) + "\n" for number in range(30)))
    with pytest.raises(DataError, match=r"t\.csv: rows have more fields than the header has columns \(a, b, y\)"):
        open_frame(tmp_path / "t.csv", "csv")
    (tmp_path / "t.csv").write_text("a,b,y\n" + "0.1,0.2,0\n" * 30)
    assert len(open_frame(tmp_path / "t.csv", "csv")) == 30


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_commas_in_numbers_of_files_with_another_separator_are_told(tmp_path, mark):
    rows = [["a", "b"], ["1,5", "2"], ["1,5", "2,5"]]
    (tmp_path / "t.csv").write_text("\n".join(map(mark.join, rows)))
    with pytest.raises(DataError) as caught:
        open_frame(tmp_path / "t.csv", "csv")
    assert f"apparently separated by {mark!r}: use commas, and points in numbers" in str(caught.value)


def test_other_encodings_are_told_what_to_do(tmp_path):
    (tmp_path / "t.csv").write_bytes("größe,label\n1,0\n2,1\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"t\.csv: not a readable csv file \(.*\); save it as UTF-8"):
        open_frame(tmp_path / "t.csv", "csv")


def test_a_file_that_cannot_be_read_has_no_separator(tmp_path):
    assert _separated(tmp_path / "gone.csv") == ""
