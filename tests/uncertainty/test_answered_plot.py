"""The curve of what is answered: a scale that shows small errors of classification, and a plain one elsewhere."""

import pytest

from svdcompress.uncertainty import _plots


def contender(loss):
    return {"name": "dense", "selective": {"share": [0.5, 1.0], "loss": loss, "answered": []}}


@pytest.mark.parametrize(
    ("task", "loss", "scale", "drawn"),
    [
        ("classification", [0.0, 0.02], "symlog", [0, 2]),
        ("classification", [0.0, 0.0], "linear", [0, 0]),  # nothing is wrong: there is no smallest error to start from
        ("regression", [0.0, 4.0], "linear", [0, 2]),
    ],
)
def test_the_scale_is_that_of_what_is_drawn(task, loss, scale, drawn):
    (axis,) = _plots._answered([contender(loss)], task).axes
    assert axis.get_yscale() == scale
    assert axis.lines[0].get_ydata().tolist() == pytest.approx(drawn) and axis.lines[0].get_xdata().tolist() == [50, 100]
