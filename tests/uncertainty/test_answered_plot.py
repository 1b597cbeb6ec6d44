"""The curve of answered inputs: a scale that shows small classification errors, and a linear one for other tasks."""

import pytest

from svdcompress.uncertainty import _plots


def contender(loss):
    return {"name": "dense", "selective": {"share": [0.5, 1.0], "loss": loss, "answered": []}}


@pytest.mark.parametrize(
    ("task", "loss", "scale", "drawn"),
    [
        ("classification", [0.0, 0.02], "symlog", [0, 2]),
        ("classification", [0.0, 0.0], "linear", [0, 0]),  # no errors, so there is no smallest one to start from
        ("regression", [0.0, 4.0], "linear", [0, 2]),
    ],
)
def test_the_scale_is_that_of_what_is_drawn(task, loss, scale, drawn):
    (axis,) = _plots._answered([contender(loss)], task).axes
    assert axis.get_yscale() == scale
    assert axis.lines[0].get_ydata().tolist() == pytest.approx(drawn) and axis.lines[0].get_xdata().tolist() == [50, 100]
