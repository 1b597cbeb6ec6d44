"""Likelihoods with a temperature: what calibration fits, kept with the likelihood."""

from __future__ import annotations

from typing import Any

from svdcompress.batch import main_output
from svdcompress.errors import UsageError
from svdcompress.likelihoods._base import Likelihood


class Tempered(Likelihood):
    """Base class of likelihoods whose logarithm is divided by a temperature; its own methods are for logits.

    temperature: what the logits of each draw are divided by before anything else is computed (Guo et al. 2017, eq. 9).
    mean_temperature: the same for the one output of the mean model; None: as for draws.
    """

    def __init__(self, dim: int = 1, temperature: float = 1.0, mean_temperature: float | None = None) -> None:
        super().__init__(dim)
        self.temperature = check_temperature(temperature)
        own = None if mean_temperature is None else check_temperature(mean_temperature)
        self.mean_temperature = None if own == self.temperature else own

    def settings(self) -> dict[str, Any]:
        """`dim`, and temperatures other than 1."""
        found = super().settings()
        if self.temperature != 1:
            found["temperature"] = self.temperature
        if self.mean_temperature is not None:
            found["mean_temperature"] = self.mean_temperature
        return found

    def of_mean(self) -> Likelihood:
        """The likelihood with the mean model's own temperature in place of that of draws."""
        own = self.mean_temperature
        return self if own is None else self._with(temperature=own, mean_temperature=None)

    def plain(self) -> Likelihood:
        """The likelihood at temperature 1."""
        if self.temperature == 1 and self.mean_temperature is None:
            return self
        return self._with(temperature=None, mean_temperature=None)

    def heads(self, output: Any) -> Any:
        """The logits, divided by the temperature."""
        logits = main_output(output)
        return logits if self.temperature == 1 else logits / self.temperature

    def head_variances(self, variances: Any) -> Any:
        """The variances of the logits, divided by the square of the temperature."""
        found = main_output(variances)
        return found if self.temperature == 1 else found / self.temperature**2


def check_temperature(value: Any) -> float:
    """The temperature itself. Raises UsageError unless it is positive and finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UsageError(f"temperature: {value!r}; a number above 0 is needed")
    return float(value)
