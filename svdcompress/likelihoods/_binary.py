"""Yes-or-no questions: one logit each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from svdcompress.likelihoods._prediction import Prediction
from svdcompress.likelihoods._statistics import Statistics, entropy_of, file_outputs
from svdcompress.likelihoods._sums import Sums
from svdcompress.likelihoods._tempered import Tempered
from svdcompress.sources import like


class Binary(Tempered):
    """A logit for each question; targets are 0 and 1."""

    name = "binary"
    probabilities = True
    std_of = "epistemic"  # the label's variance says no more than the mean

    def moments(self, heads: Any) -> tuple[Tensor, Tensor]:
        """p and p (1 - p)."""
        p = heads.sigmoid()
        return p, p * (1 - p)

    def nll(self, output: Any, target: Tensor) -> Tensor:
        """The negative log likelihood of each question."""
        logits = self.heads(output).float()
        return F.binary_cross_entropy_with_logits(logits, like(target, logits).float(), reduction="none")

    def loss(self, output: Any, target: Tensor, *, class_weights: Tensor | None = None) -> Tensor:
        """The mean over the questions; class_weights: (1,), the weight of the positive class."""
        logit = self.heads(output)
        weight = None if class_weights is None else class_weights[-1].to(target.device)
        return F.binary_cross_entropy_with_logits(logit, like(target, logit).to(logit.dtype), pos_weight=weight)

    def figures(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For each question: whether the answer is wrong, its negative log likelihood, and 1, as all count."""
        logits, nll = self.heads(output), self.nll(output, target)
        return (logits > 0) != (like(target, logits).float() > 0.5), nll, torch.ones_like(nll)

    def answers(self, output: Any) -> Tensor:
        """Yes (1) where the logit is above 0."""
        return (self.heads(output) > 0).float()

    def blind(self, targets: Tensor, scale: float = 1.0) -> dict[str, float]:
        """Error of the more common answer to each question, and NLL of its frequency."""
        share = targets.double().mean(0)
        entropy = torch.special.entr(share) + torch.special.entr(1 - share)
        return {"error": 100 * float(torch.minimum(share, 1 - share).mean()), "nll": float(entropy.mean())}

    def sums(self, size: int, full: bool = False) -> Sums:
        """Running sums of probabilities and entropies, for `mc_predict`."""
        return BinarySums(self, size, full)

    def statistics(self, parts: bool = False) -> Statistics:
        """The same as parts of a graph."""
        return BinaryStatistics(self, parts)


class BinarySums(Sums):
    """One logit for each yes-or-no question, (B,) or (B, K): `1/T sum p_t (1 - p_t)` and `1/T sum (p_t - p)^2`."""

    def add(self, output: Any, start: int) -> None:
        logits = self._double(output)
        p = logits.sigmoid()
        self._sum("p", start, p.sum(0))
        self._sum_squares("pp", start, p)
        self._sum("label", start, (p * (1 - p)).sum(0))
        self._sum("entropy", start, (p * F.softplus(-logits) + (1 - p) * F.softplus(logits)).sum(0))

    def prediction(self, samples: int) -> Prediction:
        mean, squares = self.totals["p"] / samples, self.totals["pp"] / samples
        entropy = torch.special.entr(mean) + torch.special.entr(1 - mean)
        aleatoric = self._matrix(self.totals["label"] / samples)
        return self._prediction(
            samples, mean, aleatoric, self._spread(mean, squares), entropy, self.totals["entropy"] / samples
        )


class BinaryStatistics(Statistics):
    """One logit for each yes-or-no question: `1/T sum p_t (1 - p_t)` and `1/T sum (p_t - p)^2`, entropies in nats."""

    def of_draw(self, output: Any) -> tuple[Tensor, ...]:
        logits = self._heads(output)
        p = logits.sigmoid()
        # softplus(-z) = -log p and softplus(z) = -log(1 - p), finite for any z
        tail = torch.log1p(torch.exp(-logits.abs()))
        entropy = p * (tail + (-logits).clamp_min(0)) + (1 - p) * (tail + logits.clamp_min(0))
        return p, p * p, p * (1 - p), entropy

    def outputs(self, sums: tuple[Tensor, ...], samples: Tensor) -> dict[str, Tensor]:
        mean, squares, label, expected = (total / samples for total in sums)
        variances = self._variances(label, mean, squares)
        return file_outputs(mean, variances, self.parts, entropy_of(mean) + entropy_of(1 - mean), expected)
