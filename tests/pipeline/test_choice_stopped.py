"""The choice of what to remove, and the judging of a model, take minutes for a large one, and can be stopped midway."""

from unittest.mock import MagicMock, Mock

import pytest
import torch
from test_ways import data_of, half_useful, ways_of

from svdcompress.errors import Interrupted
from svdcompress.pipeline._choose_masks import chosen
from svdcompress.pipeline._judged import on_validation
from svdcompress.pipeline._measure import Measure
from svdcompress.sources import Data


def test_between_two_ways_that_are_judged() -> None:
    data, x, _ = data_of(model := half_useful(), 12)
    (to_size := ways_of(model, x, "nonzero", 40)).context.check = Mock(side_effect=[None, Interrupted()])  # type: ignore
    with pytest.raises(Interrupted):
        chosen(to_size, data, "auto", "cpu")


def test_between_two_batches_of_a_way() -> None:
    data, x, _ = data_of(model := half_useful(), 12, 3000)
    to_size = ways_of(model, x, "nonzero", 40)
    seen: list[int] = []
    to_size.model.register_forward_hook(lambda layer, given, output: seen.append(len(output)))

    checks = 0

    def check(where: str) -> None:
        nonlocal checks
        checks += 1
        if checks == 3:
            raise Interrupted
        seen.clear()  # the first way comes next, then its first batch

    to_size.context.check = check  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        chosen(to_size, data, "auto", "cpu")
    assert len(seen) == 1 and seen[0] < 3000


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


def test_while_a_model_is_judged() -> None:
    found, _, _ = data_of(model := half_useful(), 12, 3000)
    data, batches = Data(found.train, found.train, found.train, "classification", 3), []
    model.register_forward_hook(lambda layer, given, output: batches.append(len(output)))
    context = Mock(check=Mock(side_effect=[None, Interrupted()]))
    context.place.device = torch.device("cpu")
    with pytest.raises(Interrupted):
        on_validation(context, data, model)
    assert len(batches) == 1 and batches[0] < 3000


def test_ahead_of_a_way_that_is_reconstructed() -> None:
    data, x, _ = data_of(model := half_useful(), 12)
    to_size, reconstructor = ways_of(model, x, "nonzero", 40), MagicMock()
    to_size.context.check = Mock(side_effect=Interrupted())  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        chosen(to_size, data, "auto", "cpu", reconstructor=reconstructor)
    assert not reconstructor.trying.called
