"""Tables of predictions with many positions: a row for each, and no table if there would be too many."""

import numpy as np
import pytest

from svdcompress.errors import UsageError
from svdcompress.predict._write import columns


@pytest.mark.parametrize("dim", [1, -1])
def test_a_table_of_positions_has_a_row_for_each(dim):
    rng = np.random.default_rng(0)
    mean = rng.dirichlet(np.ones(3), (2, 4, 5))  # (N, rows, columns, classes)
    arrays = {"mean": np.moveaxis(mean, -1, dim), "variance": np.moveaxis(mean * 0.1, -1, dim), "entropy": mean.sum(-1)}
    table = columns(arrays, ["a", "b"], "classification", ["x", "y", "z"], dim)
    assert len(table["name"]) == 40 and table["name"][19:21] == ["a", "b"] and table["position"][27] == "1,2"
    assert table["label"][27] == "xyz"[mean[1, 1, 2].argmax()]
    assert table["mean_y"][27] == mean[1, 1, 2, 1] and table["variance_z"][27] == 0.1 * mean[1, 1, 2, 2]


def test_a_mask_has_a_row_for_each_pixel_and_a_large_one_no_table():
    mean = np.random.default_rng(0).random((2, 1, 4, 5))
    table = columns({"mean": mean, "variance": mean, "epistemic": mean}, ["a", "b"], "binary")
    assert (
        table["mean"][27] == mean[1, 0, 1, 2] and table["position"][27] == "1,2" and table["std"][27] == mean[1, 0, 1, 2] ** 0.5
    )
    large = np.zeros((3, 1, 1000, 1000), dtype=np.float32)
    with pytest.raises(UsageError, match=r"1,000,000 positions of 3 inputs are too many for a table; write them as \.npz"):
        columns({"mean": large, "variance": large}, ["a", "b", "c"], "regression")


def test_the_deviation_of_a_binary_probability_is_left_out_where_a_file_does_not_know_it():
    mean = np.array([[0.2], [0.7]])
    arrays = {"mean": mean, "variance": mean * (1 - mean)}  # the label's; tells no more than the mean
    assert "std" not in columns(arrays, ["a", "b"], "binary")
    assert columns({**arrays, "epistemic": mean * 0.1}, ["a", "b"], "binary")["std"].tolist() == pytest.approx(
        [0.02**0.5, 0.07**0.5]
    )
