"""Columns of codes such as 01 are text in each file of a run, whatever the other rows of that file hold."""

import pytest
import torch

from svdcompress.errors import DataError
from svdcompress.predict import read_inputs
from svdcompress.recipe import DataSection
from svdcompress.sources import text_columns
from svdcompress.sources._tables import open_frame, read_table

TRAIN = "code,x,label\n01,0.5,007\n1,0.25,A\n02,1.5,007\nA1,2.5,A\n"


def trained(path, task="classification", **more):
    (path / "train.csv").write_text(TRAIN)
    return read_table(str(path / "train.csv"), DataSection(name=f"csv:{path}", target="label", **more), "csv", task)


def inputs_of(path, rows, preprocessing):
    (path / "new.csv").write_text("x,code\n" + rows)
    return read_inputs(path / "new.csv", preprocessing)[0]


def test_a_row_is_read_the_same_whatever_is_beside_it(tmp_path):
    preprocessing = trained(tmp_path).preprocessing
    assert preprocessing["categories"] == {"code": ["01", "02", "1", "A1"]}
    wanted = torch.tensor([[1.0, 0, 0, 0, 0.5]])
    alone, together = (inputs_of(tmp_path, rows, preprocessing) for rows in ("0.5,01\n", "0.5,01\n2.5,A1\n"))
    assert torch.equal(alone, wanted) and torch.equal(together[:1], wanted)
    assert torch.equal(inputs_of(tmp_path, "1.5,02\n", preprocessing), torch.tensor([[0.0, 1, 0, 0, 1.5]]))
    assert torch.equal(inputs_of(tmp_path, "1,1\n", preprocessing), torch.tensor([[0.0, 0, 1, 0, 1]]))  # x stays a number
    with pytest.raises(DataError, match=r"'001' does not occur in training \(01, 02, 1, A1 do\)"):
        inputs_of(tmp_path, "1,001\n", preprocessing)


def test_test_data_have_the_codes_and_classes_of_the_training_data(tmp_path):
    (tmp_path / "test.csv").write_text("label,x,code\n007,0.5,01\n007,0.75,1\n")
    raw = trained(tmp_path, test=f"csv:{tmp_path / 'test.csv'}")
    assert raw.classes == ["007", "A"] and raw.test.targets.tolist() == [0, 0]
    assert torch.equal(raw.test.inputs, torch.tensor([[1.0, 0, 0, 0, 0.5], [0.0, 0, 1, 0, 0.75]]))


def test_a_code_far_below_many_numbers_leaves_them_as_they_are_written(tmp_path):
    """pandas reads long files in parts, each with types of its own."""
    rows = 400_000
    (tmp_path / "long.csv").write_text("code,y\n" + "01,1\n" * rows + "A1,2\n")
    section = DataSection(name="csv:long.csv", target="y")
    raw = read_table(str(tmp_path / "long.csv"), section, "csv", "regression")
    assert raw.preprocessing["categories"] == {"code": ["01", "A1"]}


def test_the_text_of_a_language_model_is_text():
    assert text_columns({"tokenizer": "bert", "text": "said", "columns": ["said"], "categories": {}}) == ["said"]
    assert text_columns({"columns": ["a", "b"], "categories": {"b": ["x"]}}) == ["b"]


def test_columns_that_are_not_there_are_no_matter(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n01,02\n")
    frame = open_frame(tmp_path / "x.csv", "csv", texts=["b", "missing"])
    assert frame["a"].tolist() == [1] and frame["b"].tolist() == ["02"]
