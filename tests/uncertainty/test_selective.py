"""Risk and coverage against trying every threshold in turn."""

import pytest
import torch

from svdcompress.errors import DataError
from svdcompress.uncertainty import selective


def by_thresholds(score, loss):
    """(share answered, mean loss) for each threshold on the score, slowly."""
    found = []
    for threshold in sorted(set(score.tolist())):
        kept = [float(part) for part, doubt in zip(loss, score, strict=True) if doubt <= threshold]
        found.append((len(kept) / len(score), sum(kept) / len(kept), threshold))
    return found


@pytest.mark.parametrize("ties", [False, True])
def test_the_largest_share_that_keeps_a_loss(ties):
    generator = torch.Generator().manual_seed(0)
    score = torch.rand(300, generator=generator).double()
    score = (score * 20).round() / 20 if ties else score
    loss = (torch.rand(300, generator=generator) < 0.5 * score).double()
    found = selective(score, loss, targets=(0.01, 0.05, 0.1, 0.5))
    for entry in found["answered"]:
        fitting = [(share, threshold) for share, mean, threshold in by_thresholds(score, loss) if mean <= entry["loss"]]
        share, threshold = max(fitting, default=(0.0, None))
        assert entry["share"] == pytest.approx(share) and entry["threshold"] == threshold
    curve = dict(zip(found["share"], found["loss"], strict=True))
    for share, mean, _ in by_thresholds(score, loss):
        if share in curve:  # true for all inputs, at least
            assert curve[share] == pytest.approx(mean)
    assert curve[1.0] == pytest.approx(float(loss.mean()))


def test_equals_are_answered_in_any_order():
    score = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    loss = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 0])
    found = selective(score, loss, steps=8)
    generator = torch.Generator().manual_seed(0)
    runs = []
    for _ in range(4000):
        order = torch.cat([torch.randperm(4, generator=generator), 4 + torch.randperm(4, generator=generator)])
        runs.append(loss[order].cumsum(0) / torch.arange(1, 9))
    assert found["loss"] == pytest.approx(torch.stack(runs).mean(0).tolist(), abs=0.02)
    assert found["area"] == pytest.approx(float(torch.stack(runs).mean()), abs=0.02)


def test_no_share_does():
    found = selective(torch.tensor([0.1, 0.2]), torch.tensor([1.0, 0.0]), targets=(0.3,))
    assert found["answered"] == [{"loss": 0.3, "share": 0.0, "threshold": None}]
    with pytest.raises(DataError, match="no inputs"):
        selective(torch.zeros(0), torch.zeros(0))
