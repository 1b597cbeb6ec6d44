"""Running sums over samples: bounded memory, in float64.

Each takes outputs of shape (S, b, ...) for some of the inputs (S draws of b inputs) as they come, and in the end gives the
Prediction. In float32 a small mutual information would be off by several percent after many samples.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from svdcompress.errors import ModelError
from svdcompress.likelihoods._heads import class_axis
from svdcompress.likelihoods._prediction import Prediction

LEAST_LOG = -1000.0  # e to it is 0 in float64: keeps 0 * log 0 at 0 for classes that a model masks with -inf


class Sums:
    """Base class: sums are allocated when the first outputs show their shape; rows of the batch may be filled in any order.

    likelihood: the one whose heads are added; its `dim` is their class dimension, counted with the batch at 0.
    size: B, the number of inputs. full: covariance matrices over the class dimension instead of variances.
    """

    follows_moments: ClassVar[bool] = False
    """Whether `add_moments` takes mean and variance of normally distributed heads; else draws of them are added."""

    def __init__(self, likelihood: Any, size: int, full: bool = False) -> None:
        self.likelihood, self.size, self.full, self.dim = likelihood, size, full, likelihood.dim
        self.flat = False  # whether the model gives one number for each input, without a class dimension
        self.totals: dict[str, Tensor] = {}

    def add(self, output: Any, start: int) -> None:
        """Add S draws of the inputs from `start` on; output: heads (S, b, ...), as `Likelihood.heads` returns them."""
        raise NotImplementedError

    def add_moments(self, mean: Any, variance: Any, start: int) -> None:
        """Add mean and variance of the heads, (1, b, ...), in place of draws; call `prediction(1)` at the end."""
        raise NotImplementedError

    def prediction(self, samples: int) -> Prediction:
        """The prediction from the sums after `samples` draws of every input."""
        raise NotImplementedError

    def _double(self, output: Any) -> Tensor:
        """A model's output in float64, at least (S, b, C), with the class dimension last."""
        if not isinstance(output, Tensor):
            raise ModelError(f"task {self.likelihood.name!r} reads one tensor, but the model gives a {type(output).__name__}")
        if output.device.type == "mps":  # which has no float64
            output = output.cpu()
        self.flat = output.dim() == 2
        if self.flat:
            return output.double().unsqueeze(-1)
        class_axis(output.dim() - 1, self.dim)
        return output.double().movedim(self.dim + 1 if self.dim >= 0 else self.dim, -1)

    def _sum(self, name: str, start: int, value: Tensor) -> None:
        if name not in self.totals:
            self.totals[name] = value.new_zeros((self.size, *value.shape[1:]))
        self.totals[name][start : start + value.shape[0]] += value

    def _sum_squares(self, name: str, start: int, value: Tensor) -> None:
        """Second moments over the draws: squares, or outer products over the last dimension."""
        outer = torch.einsum("s...i,s...j->...ij", value, value) if self.full else value.square().sum(0)
        self._sum(name, start, outer)

    def _back(self, tensor: Tensor, matrices: bool = False) -> Tensor:
        """Move the class dimension back to where the model has it; matrices stay last."""
        if matrices:
            return tensor
        return tensor.squeeze(-1) if self.flat else tensor.movedim(-1, self.dim)

    def _spread(self, mean: Tensor, squares: Tensor) -> Tensor:
        """Variance over the draws, from the mean and the mean square; clamped, as rounding may make it negative."""
        if not self.full:
            return (squares - mean.square()).clamp_min(0)
        matrices = squares - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        matrices.diagonal(dim1=-2, dim2=-1).clamp_min_(0)
        return matrices

    def _matrix(self, diagonal: Tensor) -> Tensor:
        return torch.diag_embed(diagonal) if self.full else diagonal

    def _prediction(
        self,
        samples: int,
        mean: Tensor,
        aleatoric: Tensor,
        epistemic: Tensor,
        entropy: Tensor | None = None,
        expected: Tensor | None = None,
    ) -> Prediction:
        information = None if entropy is None or expected is None else (entropy - expected).clamp_min(0)
        classes = self.likelihood.classes  # their entropies have no class dimension
        return Prediction(
            task=self.likelihood.name,
            samples=samples,
            mean=self._back(mean),
            variance=self._back(aleatoric + epistemic, self.full),
            aleatoric=self._back(aleatoric, self.full),
            epistemic=self._back(epistemic, self.full),
            entropy=entropy if classes or entropy is None else self._back(entropy),
            expected_entropy=expected if classes or expected is None else self._back(expected),
            mutual_information=information if classes or information is None else self._back(information),
            full=self.full,
        )


class ValueSums(Sums):
    """Base class for observations that are values: the mean of each draw, and the variance of the means."""

    def _values(self, values: Tensor, start: int) -> None:
        # Sums of deviations from the first draw: the variance of large values would drown in rounding otherwise.
        rows = slice(start, start + values.shape[1])
        if "centre" not in self.totals:
            self.totals["centre"] = values.new_zeros((self.size, *values.shape[2:]))
            self.seen = torch.zeros(self.size, dtype=torch.bool)  # on the CPU, so that a GPU need not be waited for
        if not bool(self.seen[rows].all()):
            self._start(values[0], rows)
        deviation = values - self.totals["centre"][rows]
        self._sum("d", start, deviation.sum(0))
        self._sum_squares("dd", start, deviation)

    def _start(self, first: Tensor, rows: slice) -> None:
        """Set the centres of rows that come for the first time. Passes may be cut differently from draw to draw, as those of an
        ensemble's models of several widths, so that some of a pass's rows may have sums already."""
        new = ~self.seen[rows]
        self.totals["centre"][rows][new] = first[new]
        self.seen[rows] = True

    def _one_moment(self, mean: Tensor, variance: Tensor, start: int) -> None:
        self._sum("centre", start, mean)
        self._sum("d", start, torch.zeros_like(mean))
        self._sum("dd", start, self._matrix(variance))

    def _observation_variance(self, mean: Tensor, samples: int) -> Tensor:
        """The variance of an observation around the mean of its draw."""
        raise NotImplementedError

    def prediction(self, samples: int) -> Prediction:
        deviation, squares = self.totals["d"] / samples, self.totals["dd"] / samples
        mean = self.totals["centre"] + deviation
        observed = self._matrix(self._observation_variance(mean, samples))
        return self._prediction(samples, mean, observed, self._spread(deviation, squares))


class MomentSums(ValueSums):
    """Any likelihood's `moments`: `1/T sum variance_t` and the variance of the means."""

    def add(self, output: Any, start: int) -> None:
        mean, variance = self.likelihood.moments(tree_map(self._double, output))
        self._values(mean, start)
        self._sum("noise", start, variance.sum(0))

    def _observation_variance(self, mean: Tensor, samples: int) -> Tensor:
        return self.totals["noise"] / samples
