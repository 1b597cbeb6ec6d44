"""Values with constant noise."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from svdcompress.errors import UsageError
from svdcompress.likelihoods._base import Likelihood
from svdcompress.likelihoods._statistics import Statistics, file_outputs
from svdcompress.likelihoods._sums import Sums, ValueSums
from svdcompress.sources import like


class Regression(Likelihood):
    """Values, with normal noise of one precision for all inputs.

    tau: that precision (1 over the noise's variance) in the units of the output, a number or one for each output. None:
    unknown; predictions then have no noise, the loss is that of precision 1, and metrics use the precision that fits best.
    mean_tau: the same for the mean model, whose errors include the variance that draws show themselves; None: as for draws.
    """

    name = "regression"
    constant_noise = True

    def __init__(
        self,
        dim: int = 1,
        tau: float | Tensor | list[float] | None = None,
        mean_tau: float | Tensor | list[float] | None = None,
    ) -> None:
        super().__init__(dim)
        self.tau, self.mean_tau = check_tau(tau), check_tau(mean_tau)

    def settings(self) -> dict[str, Any]:
        """`dim` and `tau`, and a `mean_tau` where there is one."""
        tau, mean_tau = (one.tolist() if isinstance(one, Tensor) else one for one in (self.tau, self.mean_tau))
        return {**super().settings(), "tau": tau, **({} if mean_tau is None else {"mean_tau": mean_tau})}

    def of_mean(self) -> Regression:
        """The likelihood with the mean model's own noise."""
        return self if self.mean_tau is None else self._with(tau=self.mean_tau, mean_tau=self.mean_tau)

    def plain(self) -> Regression:
        """The likelihood with unknown noise."""
        return self._with(tau=None, mean_tau=None)

    def rescaled(self, scale: float) -> Regression:
        """The likelihood with its precisions divided by the square of the scale."""
        own = None if self.mean_tau is None else self.mean_tau / scale**2
        return self._with(tau=None if self.tau is None else self.tau / scale**2, mean_tau=own)

    def moments(self, heads: Any) -> tuple[Tensor, Tensor]:
        """The value and 1 / tau (0 without one); one tau for all outputs."""
        return heads, torch.full_like(heads, 1 / self._one_tau(math.inf))

    def nll(self, output: Any, target: Tensor) -> Tensor:
        """The negative log likelihood of each value; tau has to be one number (if unknown, 1)."""
        square = self.figures(output, target)[0]
        tau = self._one_tau(1.0)
        return 0.5 * (tau * square + math.log(2 * math.pi / tau))

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """tau / 2 * MSE, the negative log likelihood up to a constant."""
        mean = self.heads(output)
        return 0.5 * self._one_tau(1.0) * F.mse_loss(mean, like(target, mean))

    def _one_tau(self, unknown: float) -> float:
        """The precision of all outputs. unknown: its value if tau is None. Raises UsageError if each output has its own."""
        if isinstance(self.tau, Tensor) and self.tau.numel() > 1:
            raise UsageError("tau: the loss and its metrics need a single number for all outputs")
        return unknown if self.tau is None else float(self.tau)

    def soft_loss(self, loss: Any, output: Any, teacher: Any, temperature: float) -> Tensor:
        """The loss against the teacher's values."""
        return loss(output, self.heads(teacher))

    def figures(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For each value: its squared error, the same again (`metrics` knows the noise), and 1, as all count."""
        mean = self.heads(output)
        square = (like(target, mean) - mean).double().square()
        return square, square, torch.ones_like(square)

    def metrics(self, first: float, second: float, count: float, scale: float = 1.0) -> dict[str, float]:
        """RMSE, and NLL with tau or with the precision that fits these values best."""
        mean_square = first / count
        precision = self._one_tau(1 / max(mean_square, 1e-12))
        nll = 0.5 * (precision * mean_square + math.log(2 * math.pi / precision))
        return {"rmse": scale * math.sqrt(mean_square), "nll": nll + math.log(scale)}

    def sums(self, size: int, full: bool = False) -> Sums:
        """Running sums of values, for `mc_predict`."""
        return RegressionSums(self, size, full)

    def statistics(self, parts: bool = False) -> Statistics:
        """The same as parts of a graph."""
        return RegressionStatistics(self, parts)


class RegressionSums(ValueSums):
    """Values (B, D) with constant noise: `1/tau I` and the variance of the values (Gal & Ghahramani 2016, eq. 8)."""

    likelihood: Regression
    follows_moments = True

    def add(self, output: Any, start: int) -> None:
        self._values(self._double(output), start)

    def add_moments(self, mean: Any, variance: Any, start: int) -> None:
        """Add mean and variance of the output, (1, b, ...), in place of draws; call `prediction(1)` at the end."""
        self._one_moment(self._double(mean)[0], self._double(variance)[0], start)

    def _observation_variance(self, mean: Tensor, samples: int) -> Tensor:
        tau = self.likelihood.tau
        if tau is None:
            return torch.zeros_like(mean)
        noise = 1 / torch.as_tensor(tau, dtype=mean.dtype, device=mean.device)
        try:
            return noise.expand_as(mean)
        except RuntimeError:
            shape, outputs = tuple(noise.shape), mean.shape[-1]
            raise UsageError(f"tau: its shape is {shape}; a number is needed, or one for each of {outputs} outputs") from None


class RegressionStatistics(Statistics):
    """Values with constant noise: `1/tau` and the variance of the values (Gal & Ghahramani 2016, eq. 8)."""

    likelihood: Regression

    def of_draw(self, output: Any) -> tuple[Tensor, ...]:
        values = self._heads(output)
        return values, values * values

    def outputs(self, sums: tuple[Tensor, ...], samples: Tensor) -> dict[str, Tensor]:
        mean, squares = (total / samples for total in sums)
        tau = self.likelihood.tau
        noise = torch.full_like(mean, 0.0 if tau is None else 1 / float(tau))
        return file_outputs(mean, self._variances(noise, mean, squares), True)


def check_tau(tau: float | Tensor | list[float] | None) -> float | Tensor | None:
    """The precision itself, as a number or a tensor with one for each output. Raises UsageError unless positive and finite."""
    if tau is None:
        return None
    tau = torch.tensor(tau) if isinstance(tau, list) else tau
    try:
        values = torch.as_tensor(tau)
        fits = bool((values > 0).all() and values.isfinite().all())
    except (TypeError, ValueError, RuntimeError):
        fits = False
    if not fits:
        raise UsageError(f"tau: {tau!r} is not a precision; it is 1 over the noise's variance, above 0")
    return values if values.dim() else float(tau)
