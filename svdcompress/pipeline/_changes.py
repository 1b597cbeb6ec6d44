"""How compression changed the metrics on the test data, and how much of that may be chance."""

from __future__ import annotations

import math

from torch import Tensor

from svdcompress.likelihoods import likelihood_for
from svdcompress.pipeline._passes import Passes
from svdcompress.sources import Data
from svdcompress.uncertainty import paired_means, paired_parts, paired_rmse, paired_shares


def changes(dense: Passes, sparse: Passes, data: Data) -> dict[str, dict[str, float]]:
    """`changes` of the report: for each metric `low` and `high` of the 95% interval of sparse minus dense, paired on the same
    test examples; in points for the error, in the target's units for the rmse, in nats for the nll.

    The interval says what other test data could have given, not what other seeds of the training would have.
    """
    likelihood = likelihood_for(data.task, data.dim)
    found = [passes.test.each for passes in (dense, sparse)]
    some = found[0][2] > 0  # positions of class -100 do not count; an example may have no others
    found = [tuple(part[some] for part in one) for one in found]
    if len(found[0][0]) < 2:
        return {}
    numbers = found[0][2]
    weight = numbers / numbers.mean()  # examples may have several targets each, in different numbers
    first, second = ([one[index] / numbers for one in found] for index in (0, 1))
    if likelihood.probabilities:
        single = bool((numbers == 1).all())
        error = (
            paired_shares(first[0], first[1])
            if single
            else paired_parts((first[1] - first[0]) * weight, far=float(weight.max()))
        )
        return {"error": _interval(error, 100.0), "nll": _interval(paired_means((second[1] - second[0]) * weight))}
    scale = 1.0 if data.target_scale is None else data.target_scale[1]
    if likelihood.constant_noise:
        second = [_nll(squares, one.noise_precision) for squares, one in zip(second, (dense, sparse), strict=True)]
    rmse = paired_rmse(first[0] * weight, first[1] * weight)
    return {"rmse": _interval(rmse, scale), "nll": _interval(paired_means((second[1] - second[0]) * weight))}


def _nll(squares: Tensor, tau: float | None) -> Tensor:
    """Negative log likelihoods of a normal distribution with precision tau."""
    assert tau is not None  # known for a regression
    return 0.5 * (tau * squares + math.log(2 * math.pi / tau))


def _interval(bounds: tuple[float, float], scale: float = 1.0) -> dict[str, float]:
    return {"low": scale * bounds[0], "high": scale * bounds[1]}
