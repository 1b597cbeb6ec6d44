"""Stored draws of a model's heads for a whole set of examples, on which temperatures, scales and priors are fitted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.errors import DataError, UsageError
from svdcompress.likelihoods import Likelihood, Prediction, Sums
from svdcompress.sources import Examples
from svdcompress.uncertainty import mc_predict, mean_predict

CHUNK = 500
"""Examples per pass."""

MOST = 2 * 10**7
"""The most numbers in all draws together: samples times rows times classes."""


@dataclass(frozen=True)
class Draws:
    """Heads of a model for each target that counts.

    outputs: (S, R, C) logits, (S, R) for one logit or value each, (S, R, 2) means and log variances; float32, on the CPU.
        S draws (1 for the mean model), R targets.
    targets: (R,). owner: (R,), the example that each target belongs to.
    """

    outputs: Tensor
    targets: Tensor
    owner: Tensor

    @property
    def samples(self) -> int:
        """S, the number of draws."""
        return len(self.outputs)

    def __len__(self) -> int:
        return len(self.targets)


def draws_of(
    model: nn.Module, examples: Examples, likelihood: Likelihood, samples: int = 0, seed: int = 0, device: Any = "cpu"
) -> Draws:
    """Draw a model's heads; the same seed gives the same noise, whatever the posterior's variances (common random numbers).

    samples: 0 for the single output of the mean model. likelihood: its `dim` is used, but its temperature is not applied.
    Raises DataError if no target counts.
    """
    generator = torch.Generator().manual_seed(seed)
    plain = likelihood.plain()

    def heads(inputs: Any) -> Tensor:
        kept = _Kept(plain)
        if samples:
            mc_predict(model, inputs, samples, task=kept, generator=generator)
        else:
            mean_predict(model, inputs, task=kept)
        return kept.outputs()

    return collect(heads, examples, plain, device)


def collect(heads: Any, examples: Examples, likelihood: Likelihood, device: Any = "cpu") -> Draws:
    """Draws for all examples. heads: from a batch's inputs to heads, (S, B, ...), with two heads stacked last."""
    outputs, targets, owners, count = [], [], [], 0
    for inputs, target in examples.batches(CHUNK, device=device):
        target = target.detach().cpu()
        counts = likelihood.counts(target)
        owner = torch.arange(len(target)).view(-1, *[1] * (target.dim() - 1)).expand_as(target)
        outputs.append(rows(heads(inputs).cpu(), likelihood)[:, counts.flatten()])
        targets.append(target[counts])
        owners.append(owner[counts] + count)
        count += len(target)
    if not targets or not sum(len(target) for target in targets):
        raise DataError("data: there is no target to fit to")
    return Draws(torch.cat(outputs, 1), torch.cat(targets), torch.cat(owners))


def rows(outputs: Tensor, likelihood: Likelihood) -> Tensor:
    """Heads (S, B, ...) with one row for each target: (S, R, C) or (S, R); a stack of two heads stays last, (S, R, 2)."""
    if likelihood.classes:
        dim = likelihood.dim + 1 if likelihood.dim >= 0 else likelihood.dim
        return outputs.movedim(dim, -1).flatten(1, -2)
    return outputs.flatten(1, -2) if likelihood.name == "gaussian" else outputs.flatten(1)


def affordable(samples: int, count: int, classes: int) -> int:
    """`samples`, or fewer (at least 2) so that all draws fit in memory."""
    return max(2, min(samples, MOST // max(count * classes, 1)))


class _Kept(Likelihood):
    """A likelihood whose sums keep every draw of the heads. It has no name, so it is neither registered nor stored."""

    def __init__(self, inner: Likelihood) -> None:
        super().__init__(inner.dim)
        self.inner = inner
        self.sums_made: _KeptSums | None = None

    def settings(self) -> dict[str, Any]:
        return {"inner": self.inner}

    def heads(self, output: Any) -> Any:
        return self.inner.heads(output)

    def sums(self, size: int, full: bool = False) -> Sums:
        self.sums_made = _KeptSums(self, size)
        return self.sums_made

    def outputs(self) -> Tensor:
        """The heads of all passes, (S, B, ...); two heads are stacked last."""
        if self.sums_made is None:
            raise UsageError("no draws were made")
        return self.sums_made.together()


class _KeptSums(Sums):
    def __init__(self, likelihood: Any, size: int) -> None:
        super().__init__(likelihood, size)
        self.parts: dict[int, list[Tensor]] = {}

    def add(self, output: Any, start: int) -> None:
        heads = output if isinstance(output, Tensor) else torch.stack(list(output), -1)
        self.parts.setdefault(start, []).append(heads.detach().float().cpu())

    def together(self) -> Tensor:
        return torch.cat([torch.cat(self.parts[start]) for start in sorted(self.parts)], 1)

    def prediction(self, samples: int) -> Prediction:
        """Only tells whether the heads are numbers, by a mean of 0 or NaN; -inf counts as one for a class that is ruled out."""
        inner, heads, zero = self.likelihood.inner, self.together(), torch.zeros(())
        fine = heads.isfinite() | (heads.isneginf() if inner.classes else False)
        return Prediction(inner.name, samples, torch.where(fine, 0.0, torch.nan).mean(0), zero, zero, zero)
