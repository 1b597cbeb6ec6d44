"""The choice of what to remove, which takes minutes for a large model, can be stopped midway."""

from unittest.mock import Mock

import pytest
from test_ways import data_of, half_useful, ways_of

from svdcompress.errors import Interrupted
from svdcompress.pipeline._choose_masks import chosen
from svdcompress.pipeline._measure import Measure


def test_between_two_ways_that_are_judged() -> None:
    data, x, _ = data_of(model := half_useful(), 12)
    (to_size := ways_of(model, x, "nonzero", 40)).context.check = Mock(side_effect=[None, Interrupted()])  # type: ignore
    with pytest.raises(Interrupted):
        chosen(to_size, data, "auto", "cpu")


def test_ahead_of_each_size_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the size is a latency, several files are written and timed before the first way is judged."""
    _, x, _ = data_of(model := half_useful(), 12)
    to_size, measured = ways_of(model, x, "latency", 0.01), []

    def of_small(measure: Measure, small: object, dense: object) -> dict[str, float]:
        measured.append(small)
        return {"macs": 100.0 / len(measured), "parameters": 100.0 / len(measured), "latency": 1.0 / len(measured)}

    monkeypatch.setattr(Measure, "of_small", of_small)
    to_size.context.check = Mock(side_effect=[None, None, Interrupted()])  # type: ignore
    with pytest.raises(Interrupted):
        to_size.usual()
    assert len(measured) == 2
