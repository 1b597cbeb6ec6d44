"""With repeated inputs, many examples have exactly the limit as their score: rounding must not exclude their true class."""

import pytest
import torch

from svdcompress.calibrate import ConformalSets, conformal_sets
from svdcompress.calibrate._promise import measured
from svdcompress.likelihoods import likelihood_for
from svdcompress.uncertainty import mean_predict


def repeated(seed):
    """Data with six distinct inputs, like a table of categories: logits (6, 5), the input of each of 2,000 examples, labels."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 5, generator=generator) * 1.5
    cells = torch.randint(6, (2000,), generator=generator)
    return logits, cells, torch.multinomial(logits.softmax(1)[cells], 1, generator=generator).squeeze(1)


@pytest.mark.parametrize("seed", range(12))
def test_another_rounding_of_the_same_network_keeps_the_coverage(seed):
    logits, cells, y = repeated(seed)
    promise = conformal_sets(logits.double().softmax(1)[cells], y, 0.9)
    for p in (logits.softmax(1), logits.double().softmax(1) * (1 + 1e-7), logits.double().softmax(1) * (1 - 1e-7)):
        held = promise.sets(p[cells]).gather(1, y[:, None])
        assert float(held.double().mean()) >= 0.9


def test_what_is_measured_is_what_the_sets_hold():
    logits = torch.tensor([[0.7, 0.2, 0.1]]).log()
    x, y = logits.repeat(10, 1), torch.tensor([1] * 10)
    promise = ConformalSets(0.9, limit=0.7 - 1e-7, examples=10)  # an ulp below the probability before the second class
    own = likelihood_for("classification")
    found = measured(lambda inputs: mean_predict(torch.nn.Identity(), inputs, task=own), lambda: iter([(x, y)]), own, promise)
    assert found == {"coverage": 1.0, "size": 2.0}
    wrong = ConformalSets(0.9, limit=0.7 - 1e-3, examples=10)
    assert not bool(wrong.sets(logits.softmax(1))[0, 1])
