"""Values with noise that depends on the input: means and log variances."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from svdcompress.likelihoods._heads import gaussian_heads, is_pair
from svdcompress.likelihoods._sums import MomentSums, Sums
from svdcompress.likelihoods._tempered import Tempered
from svdcompress.sources import like


class Gaussian(Tempered):
    """Means and log variances (Kendall & Gal 2017, eq. 9): a pair of equal tensors, or one with the means in its first half.

    Aleatoric is `1/T sum sigma_t^2`, epistemic the variance of the means. A temperature multiplies every sigma_t^2: a normal
    density to the power of 1 / temperature is, up to a constant, one with `temperature` times the variance.
    """

    name = "gaussian"

    def heads(self, output: Any) -> tuple[Tensor, Tensor]:
        """Mean and log variance, the latter plus the log of the temperature."""
        mean, log_variance = gaussian_heads(output, self.dim)
        return mean, log_variance if self.temperature == 1 else log_variance + math.log(self.temperature)

    def head_variances(self, variances: Any) -> tuple[Tensor, Tensor]:
        """Variances of mean and log variance; a temperature changes neither."""
        return gaussian_heads(variances, self.dim)

    def tempered(self, output: Any) -> Any:
        """A pair if the model gives one, else a single tensor."""
        return self._together(output, *self.heads(output))

    def moments(self, heads: Any) -> tuple[Tensor, Tensor]:
        """Mean and variance."""
        mean, log_variance = heads
        return mean, log_variance.exp()

    def nll(self, output: Any, target: Tensor) -> Tensor:
        """The negative log likelihood of each value, float64."""
        return self.figures(output, target)[1]

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """-log N(target; mean, exp(log variance)) up to a constant."""
        mean, log_variance = self.heads(output)
        target = like(target, mean)
        return 0.5 * (log_variance + (target - mean).square() * torch.exp(-log_variance)).mean()

    def figures(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For each value: its squared error, its negative log likelihood, and 1, as all count."""
        mean, log_variance = self.heads(output)
        square = (like(target, mean) - mean).double().square()
        nll = 0.5 * (log_variance.double() + square * torch.exp(-log_variance.double()) + math.log(2 * math.pi))
        return square, nll, torch.ones_like(square)

    def in_units(self, output: Any, shift: float, scale: float) -> Any:
        """Means and log variances in the targets' own units."""
        mean, log_variance = gaussian_heads(output, self.dim)  # the temperature is applied when the result is read
        return self._together(output, mean * scale + shift, log_variance + 2 * math.log(scale))

    def sums(self, size: int, full: bool = False) -> Sums:
        """Running sums of means and variances, for `mc_predict`."""
        return GaussianSums(self, size, full)

    def _together(self, output: Any, mean: Tensor, log_variance: Tensor) -> Any:
        return (mean, log_variance) if is_pair(output) else torch.cat([mean, log_variance], self.dim)


class GaussianSums(MomentSums):
    """Sums that also take the moments of normally distributed heads."""

    follows_moments = True

    def add_moments(self, mean: Any, variance: Any, start: int) -> None:
        (values, log_variance), (spread, spread_of_log) = (map(self._double, heads) for heads in (mean, variance))
        self._one_moment(values[0], spread[0], start)
        # The mean of a log-normal variable.
        self._sum("noise", start, (log_variance[0] + 0.5 * spread_of_log[0]).exp())
