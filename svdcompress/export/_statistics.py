"""What is summed over the draws, and what the sums say: the formulas of `mc_predict`, as parts of a graph.

Sums are float64. In float32 a small mutual information would be off by percents after many samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from svdcompress.errors import ExportError, UsageError
from svdcompress.sources import main_output

LEAST_LOG = -1000.0  # e to it is 0 in float64: keeps 0 * log 0 at 0 for classes that a model masks with -inf


class Statistics:
    """Base. tau: precision of the observations for regression. dim: class dimension of the model's output.

    parts: aleatoric and epistemic variances as further outputs.
    """

    def __init__(self, tau: float | None, dim: int, parts: bool) -> None:
        self.tau, self.dim, self.parts = tau, dim, parts

    def of_draw(self, output: Any) -> tuple[Tensor, ...]:
        """What one draw adds to the sums."""
        raise NotImplementedError

    def outputs(self, sums: tuple[Tensor, ...], samples: Tensor) -> dict[str, Tensor]:
        """The file's outputs, float32, after `samples` draws (a scalar)."""
        raise NotImplementedError

    def _along(self, output: Tensor) -> int:
        """The class dimension, counted from the front. Raises UsageError where the output has no such one."""
        rank = output.dim()
        dim = self.dim + rank if self.dim < 0 else self.dim
        if not 1 <= dim < rank:
            raise UsageError(f"dim: {self.dim}; the class dimension of an output with {rank} dimensions is 1 to {rank - 1}")
        return dim

    def _variances(self, aleatoric: Tensor, mean: Tensor, squares: Tensor) -> dict[str, Tensor]:
        epistemic = (squares - mean * mean).clamp_min(0)
        return {"variance": aleatoric + epistemic, "aleatoric": aleatoric, "epistemic": epistemic}


class Classification(Statistics):
    """Kwon et al. 2018: `1/T sum p_t - p_t^2` and `1/T sum (p_t - p)^2`, which add up to `p - p^2`; entropies in nats."""

    def of_draw(self, output: Any) -> tuple[Tensor, ...]:
        logits = main_output(output).double()
        if logits.dim() < 2 or logits.shape[self._along(logits)] < 2:
            raise ExportError("task 'classification' needs two logits or more for each input; for one logit use task='binary'")
        log_p = F.log_softmax(logits, self.dim).clamp_min(LEAST_LOG)
        p = log_p.exp()
        return (p, p * log_p, p * p) if self.parts else (p, p * log_p)

    def outputs(self, sums: tuple[Tensor, ...], samples: Tensor) -> dict[str, Tensor]:
        mean, p_log_p, *squares = (total / samples for total in sums)
        variances = {"variance": (mean - mean * mean).clamp_min(0)}
        if self.parts:
            variances = self._variances((mean - squares[0]).clamp_min(0), mean, squares[0])
        return _file_outputs(mean, variances, self.parts, _entropy(mean).sum(self.dim), -p_log_p.sum(self.dim))


class Binary(Statistics):
    """One logit for each yes-or-no question: `1/T sum p_t (1 - p_t)` and `1/T sum (p_t - p)^2`, entropies in nats."""

    def of_draw(self, output: Any) -> tuple[Tensor, ...]:
        logits = main_output(output).double()
        p = logits.sigmoid()
        # softplus(-z) = -log p and softplus(z) = -log(1 - p), finite for any z
        tail = torch.log1p(torch.exp(-logits.abs()))
        entropy = p * (tail + (-logits).clamp_min(0)) + (1 - p) * (tail + logits.clamp_min(0))
        return p, p * p, p * (1 - p), entropy

    def outputs(self, sums: tuple[Tensor, ...], samples: Tensor) -> dict[str, Tensor]:
        mean, squares, label, expected = (total / samples for total in sums)
        variances = self._variances(label, mean, squares)
        return _file_outputs(mean, variances, self.parts, _entropy(mean) + _entropy(1 - mean), expected)


class Regression(Statistics):
    """Values with constant noise: `1/tau` and the variance of the values (Gal & Ghahramani 2016, eq. 8)."""

    def of_draw(self, output: Any) -> tuple[Tensor, ...]:
        values = main_output(output).double()
        return values, values * values

    def outputs(self, sums: tuple[Tensor, ...], samples: Tensor) -> dict[str, Tensor]:
        mean, squares = (total / samples for total in sums)
        noise = torch.full_like(mean, 0.0 if self.tau is None else 1 / self.tau)
        return _file_outputs(mean, self._variances(noise, mean, squares), True)


class Gaussian(Statistics):
    """Means and log variances (Kendall & Gal 2017, eq. 9): a pair of equal tensors, or one with the means in its first half."""

    def of_draw(self, output: Any) -> tuple[Tensor, ...]:
        mean, log_variance = self._heads(output)
        return mean, mean * mean, log_variance.exp()

    def _heads(self, output: Any) -> tuple[Tensor, Tensor]:
        if isinstance(output, tuple | list) and len(output) == 2 and output[0].shape == output[1].shape:
            return output[0].double(), output[1].double()
        values = main_output(output).double()
        count = values.shape[self._along(values)] if values.dim() > 1 else 1
        if count % 2:
            raise ExportError(f"task 'gaussian' needs means and log variances: an even number of outputs, not {count}")
        mean, log_variance = values.chunk(2, self._along(values))
        return mean, log_variance

    def outputs(self, sums: tuple[Tensor, ...], samples: Tensor) -> dict[str, Tensor]:
        mean, squares, noise = (total / samples for total in sums)
        return _file_outputs(mean, self._variances(noise, mean, squares), True)


TASKS: dict[str, Callable[[float | None, int, bool], Statistics]] = {
    "classification": Classification,
    "binary": Binary,
    "regression": Regression,
    "gaussian": Gaussian,
}


def _entropy(p: Tensor) -> Tensor:
    return -p * p.clamp_min(1e-30).log()


def _file_outputs(
    mean: Tensor, variances: dict[str, Tensor], parts: bool, entropy: Tensor | None = None, expected: Tensor | None = None
) -> dict[str, Tensor]:
    outputs = {"mean": mean, "variance": variances["variance"]}
    if entropy is not None and expected is not None:
        outputs["predictive_entropy"] = entropy
        outputs["expected_entropy"] = expected
        outputs["mutual_information"] = (entropy - expected).clamp_min(0)
    if parts:
        outputs |= {name: variances[name] for name in ("aleatoric", "epistemic")}
    return {name: value.float() for name, value in outputs.items()}
