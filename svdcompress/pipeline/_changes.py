"""What compression did to the figures on the test data, and how much of that may be chance."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from svdcompress.likelihoods import likelihood_for, own_likelihood
from svdcompress.pipeline._figures import noise_precision
from svdcompress.sources import Data
from svdcompress.train import losses
from svdcompress.uncertainty import paired_means, paired_rmse, paired_shares


def changes(dense: nn.Module, sparse: nn.Module, data: Data, device: torch.device | str = "cpu") -> dict[str, dict[str, float]]:
    """`changes` of the report: for each metric `low` and `high` of the 95% interval of sparse less dense, paired on the same
    test examples; in points for the error, for the rmse in the target's units, for the nll in nats.

    It says what other test data could have given, not what other seeds of the training would have. device: of both models.
    """
    likelihood = likelihood_for(data.task, data.dim)
    own = [own_likelihood(model, likelihood).of_mean() for model in (dense, sparse)]
    found = [losses(model, data.test, its, device=device) for model, its in zip((dense, sparse), own, strict=True)]
    some = found[0][2] > 0  # positions of the class -100 do not count, and they may be all that an example has
    found = [tuple(part[some] for part in one) for one in found]
    if len(found[0][0]) < 2:
        return {}
    numbers = found[0][2]
    weight = numbers / numbers.mean()  # examples may have several numbers each, and not equally many
    first, second = ([one[index] / numbers for one in found] for index in (0, 1))
    if likelihood.probabilities:
        single = bool((numbers == 1).all())
        error = paired_shares(first[0], first[1]) if single else paired_means((first[1] - first[0]) * weight)
        return {"error": _interval(error, 100.0), "nll": _interval(paired_means((second[1] - second[0]) * weight))}
    scale = 1.0 if data.target_scale is None else data.target_scale[1]
    if likelihood.constant_noise:
        taus = [noise_precision(model, data) for model in (dense, sparse)]
        second = [_nll(squares, tau) for squares, tau in zip(second, taus, strict=True)]
    rmse = paired_rmse(first[0] * weight, first[1] * weight)
    return {"rmse": _interval(rmse, scale), "nll": _interval(paired_means((second[1] - second[0]) * weight))}


def _nll(squares: Tensor, tau: float | None) -> Tensor:
    """Negative log likelihoods of a normal distribution with precision tau."""
    assert tau is not None  # of a regression it is known
    return 0.5 * (tau * squares + math.log(2 * math.pi / tau))


def _interval(bounds: tuple[float, float], scale: float = 1.0) -> dict[str, float]:
    return {"low": scale * bounds[0], "high": scale * bounds[1]}
