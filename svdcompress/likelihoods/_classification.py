"""One of several classes: logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from svdcompress.errors import ExportError, ModelError
from svdcompress.likelihoods._prediction import Prediction
from svdcompress.likelihoods._statistics import Statistics, entropy_of, file_outputs
from svdcompress.likelihoods._sums import LEAST_LOG, Sums
from svdcompress.likelihoods._tempered import Tempered
from svdcompress.sources import IGNORED, classes_second


class Classification(Tempered):
    """Logits of classes, along `dim`; targets are indices of classes, and positions of the class -100 do not count."""

    name = "classification"
    probabilities = True
    classes = True

    def nll(self, output: Any, target: Tensor) -> Tensor:
        """The negative log likelihood of each target, 0 where it does not count."""
        return F.cross_entropy(self._logits(output).float(), target, reduction="none", ignore_index=IGNORED)

    def loss(self, output: Any, target: Tensor, *, class_weights: Tensor | None = None, label_smoothing: float = 0.0) -> Tensor:
        """The mean over the targets that count; class_weights: (C,)."""
        weight = None if class_weights is None else class_weights.to(target.device)
        logits = self._logits(output)
        if target.dim() > 1 and bool((target == IGNORED).all()):
            return logits.sum() * 0  # the mean over nothing
        return F.cross_entropy(logits, target, weight=weight, label_smoothing=label_smoothing, ignore_index=IGNORED)

    def soft_loss(self, loss: Any, output: Any, teacher: Any, temperature: float) -> Tensor:
        """The KL divergence from the teacher's soft targets at a temperature, averaged over all positions, times the square
        of the temperature, so that gradients keep their size (Hinton et al. 2015, arXiv 1503.02531)."""
        own, soft = (F.log_softmax(self._positions(each) / temperature, 1) for each in (output, teacher))
        return temperature**2 * F.kl_div(own, soft, reduction="batchmean", log_target=True)

    def answers(self, output: Any) -> Tensor:
        """The class of the largest output, int64."""
        return self._logits(output).argmax(1)

    def counts(self, target: Tensor) -> Tensor:
        """All targets but those of the class -100."""
        return target != IGNORED

    def figures(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For each target: whether the answer is wrong, its negative log likelihood, and whether it counts."""
        logits, counts = self._logits(output).float(), self.counts(target)
        return (logits.argmax(1) != target) & counts, self.nll(output, target), counts

    def blind(self, targets: Tensor, scale: float = 1.0) -> dict[str, float]:
        """Error of the most common class, and NLL of the class frequencies."""
        labels = targets[self.counts(targets)].long()
        share = torch.bincount(labels).double() / len(labels)
        return {"error": 100 * (1 - float(share.max())), "nll": float(torch.special.entr(share).sum())}

    def sums(self, size: int, full: bool = False) -> Sums:
        """Running sums of probabilities and entropies, for `mc_predict`."""
        return ClassificationSums(self, size, full)

    def statistics(self, parts: bool = False) -> Statistics:
        """The same as parts of a graph."""
        return ClassificationStatistics(self, parts)

    def _logits(self, output: Any) -> Tensor:
        return classes_second(self.heads(output), self.dim)

    def _positions(self, output: Any) -> Tensor:
        return self._logits(output).movedim(1, -1).flatten(0, -2)


class ClassificationSums(Sums):
    """Logits (B, C): Kwon et al. 2018, `1/T sum diag(p_t) - p_t p_t^T` and `1/T sum (p_t - p)(p_t - p)^T`; entropies."""

    def add(self, output: Any, start: int) -> None:
        logits = self._double(output)
        if logits.shape[-1] < 2:
            raise ModelError("classification needs two logits or more for each input; for one logit use task='binary'")
        # With the classes first in memory, all of it runs over whole vectors of draws: 6 times faster for 10 classes. With
        # z = logits - max and s = sum exp(z): p = exp(z) / s, and the entropy is log s - sum p z.
        z = logits.movedim(-1, 0).contiguous()
        z = (z - z.amax(0)).clamp_min_(LEAST_LOG)
        p = z.exp()
        total = p.sum(0)
        p.div_(total)
        self._sum("entropy", start, total.log_().sub_(z.mul_(p).sum(0)).sum(0))
        self._sum("p", start, p.sum(1).movedim(0, -1))
        if self.full:
            self._sum_squares("pp", start, p.movedim(0, -1))
        else:
            self._sum("pp", start, p.square_().sum(1).movedim(0, -1))

    def prediction(self, samples: int) -> Prediction:
        mean, squares = self.totals["p"] / samples, self.totals["pp"] / samples
        aleatoric = self._matrix(mean) - squares if self.full else (mean - squares).clamp_min(0)
        epistemic = self._spread(mean, squares)
        entropy = torch.special.entr(mean).sum(-1)
        expected = self.totals["entropy"] / samples
        return self._prediction(samples, mean, aleatoric, epistemic, entropy, expected)


class ClassificationStatistics(Statistics):
    """Kwon et al. 2018: `1/T sum p_t - p_t^2` and `1/T sum (p_t - p)^2`, which add up to `p - p^2`; entropies in nats."""

    def of_draw(self, output: Any) -> tuple[Tensor, ...]:
        logits = self._heads(output)
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
        return file_outputs(mean, variances, self.parts, entropy_of(mean).sum(self.dim), -p_log_p.sum(self.dim))
