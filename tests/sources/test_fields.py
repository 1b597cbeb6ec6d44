"""Fields of the data section that would have no effect are refused, naming the sources that use them."""

import numpy as np
import pytest

from svdcompress.errors import DataError
from svdcompress.recipe import DataSection
from svdcompress.sources import READERS, open_data
from svdcompress.sources._readers import KNOWN


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        (
            "digits",
            {"args": {"nonsense": 3}},
            r"data\.args: digits does not know .*'nonsense': 3.*; hf, csv, parquet, factories do",
        ),
        ("digits", {"target": "foo"}, r"data\.target: digits does not know this field \('foo'\); hf, csv, parquet do"),
        ("digits", {"test": "npz:absent.npz"}, r"data\.test: digits .*; csv, parquet do"),
        ("digits", {"features": ["q"]}, r"data\.features: digits .*; hf, csv, parquet do"),
        ("digits", {"image_size": (4, 4)}, r"data\.image_size: digits .*; imagefolder, cifar10, cifar100, hf do"),
        ("npz:x.npz", {"root": "here"}, r"data\.root: npz .*; mnist, idx, cifar10, cifar100 do"),
        ("csv:x.csv", {"image_size": (4, 4)}, r"data\.image_size: csv "),
        ("mmist", {"target": "y"}, r"data\.name: unknown source 'mmist'"),
        (
            "data.pt",
            {},
            r"unknown source 'data\.pt'; save it as npz, with arrays x and y .*, or write a function .*: --data \./data",
        ),
        (None, {"target": "y"}, r"no data source is named"),
        ("mine.data:make", {"target": "y"}, r"data\.target: mine\.data:make does not know"),
        ("csv:x.csv", {"args": {"nonsense": 3}}, r"data\.args: tables know tokenizer, max_length, text, not 'nonsense'"),
        ("csv:x.csv", {"args": {"max_length": 3}}, r"data\.args\.max_length: applies to text only; also name its tokenizer"),
    ],
)
def test_a_field_that_would_do_nothing_is_refused(name, fields, said):
    with pytest.raises(DataError, match=said):
        open_data(DataSection(name=name, **fields), "classification")


def test_recipes_of_finished_runs_open_whatever_they_hold():
    section = DataSection(name="digits", target="foo", args={"nonsense": 3}, limit=20)
    assert len(open_data(section, "classification", strict=False).test) == 4


def test_a_recipe_with_all_defaults_written_out_opens():
    section = DataSection(**DataSection(name="digits", limit=20).model_dump())
    assert len(open_data(section, "classification").train) > 0


def test_every_kind_of_source_says_what_it_knows():
    assert set(KNOWN) == {*READERS, "csv", "parquet"}
    assert {field for fields in KNOWN.values() for field in fields} <= set(DataSection.model_fields)


def table(path, rows=20):
    rng = np.random.default_rng(0)
    lines = [",".join(f"{value:.4f}" for value in row) + f",{int(row[0] > 0)}" for row in rng.normal(size=(rows, 4))]
    path.write_text("\n".join(["a,b,u,v,w", *lines]) + "\n")
    return f"csv:{path}"


def test_several_columns_to_predict(tmp_path):
    pytest.importorskip("pandas")
    name = table(tmp_path / "t.csv")
    section = DataSection(name=name, target="u, v", test=table(tmp_path / "test.csv", 6))
    data = open_data(section, "regression")
    assert (data.outputs, data.train.targets.shape, data.test.targets.shape) == (2, (18, 2), (6, 2))
    assert data.preprocessing["columns"] == ["a", "b", "w"]
    assert data.train.inputs.shape[1] == 3
    with pytest.raises(DataError, match=r"data\.target: u, v: several columns need mse"):
        open_data(section, "classification")
    with pytest.raises(DataError, match=r"in row 0, position \[0\] \(train\) is neither"):
        open_data(section, "binary")
    with pytest.raises(DataError, match=r"data\.target: .* no column 'x'"):
        open_data(DataSection(name=name, target="u,x"), "regression")
    with pytest.raises(DataError, match=r"data\.test: .*absent\.csv: no such file"):
        open_data(DataSection(name=name, target="w", test=f"csv:{tmp_path}/absent.csv"), "classification")
