"""Stored draws of a model's heads for a whole set of examples, on which temperatures, scales and priors are fitted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.calibrate._part import Part
from svdcompress.errors import DataError, UsageError
from svdcompress.likelihoods import Likelihood, Prediction, Sums
from svdcompress.sources import Examples, fitting
from svdcompress.uncertainty import mc_predict, mean_predict

CHUNK = 500
"""Examples per pass, or fewer if they or their draws are large."""

MOST = 2 * 10**7
"""The most numbers in all draws together: samples times rows times classes."""

TARGETS = 100_000
"""The most targets that are kept: cross-validation has a table of some 40 numbers for each. Of more (pixels, tokens) a fixed
random part is kept."""

FEWEST, FEWEST_SAMPLES = 1000, 10
"""Targets that are kept in any case, and draws, where their number is cut so that MOST numbers are enough."""


@dataclass(frozen=True)
class Draws:
    """Heads of a model for each target that counts.

    outputs: (S, R, C) logits, (S, R) for one logit or value each, (S, R, 2) means and log variances; float32, on the CPU.
        S draws (1 for the mean model), R targets.
    targets: (R,). owner: (R,), the example that each target belongs to. left_out: targets that count, but were not kept.
    """

    outputs: Tensor
    targets: Tensor
    owner: Tensor
    left_out: int = 0

    @property
    def samples(self) -> int:
        """S, the number of draws."""
        return len(self.outputs)

    @property
    def total(self) -> int:
        """The number of targets that count, including those left out."""
        return len(self.targets) + self.left_out

    @property
    def part(self) -> str:
        """What was kept, for the user."""
        return f"{len(self):,} of {self.total:,} targets (a fixed random part of each example's, as all take too much memory)"

    @property
    def classes(self) -> int:
        """C, the numbers that a draw has for each target."""
        return self.outputs[0, 0].numel()

    def __len__(self) -> int:
        return len(self.targets)


def draws_of(
    model: nn.Module,
    examples: Examples,
    likelihood: Likelihood,
    samples: int = 0,
    seed: int = 0,
    device: Any = "cpu",
    most: int | None = None,
) -> Draws:
    """Draw a model's heads; the same seed gives the same noise, whatever the posterior's variances (common random numbers).

    samples: 0 for the single output of the mean model. likelihood: its `dim` is used, but its temperature is not applied.
    most: the most targets to keep; None: 100,000, or fewer so that all draws have about 2e7 numbers (but at least 1,000). Of
        more targets a fixed random part is kept, the same for all models: each example keeps its share (`Draws.left_out`).
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

    size = fitting(model, examples, CHUNK, device=device, draws=max(samples, 1))
    return collect(heads, examples, plain, device, size, most)


def collect(
    heads: Any, examples: Examples, likelihood: Likelihood, device: Any = "cpu", size: int = CHUNK, most: int | None = None
) -> Draws:
    """Draws for all examples. heads: from a batch's inputs to heads, (S, B, ...), with two heads stacked last. size: of the
    batches. most: as for `draws_of`."""
    part: Part | None = None
    for inputs, target in examples.batches(size, device=device):
        target = target.detach().cpu()
        counts = likelihood.counts(target)
        found = rows(heads(inputs).cpu(), likelihood)
        if part is None:
            part = Part(most_targets(len(found), found[0, :1].numel()) if most is None else most)
        part.add(found, target, counts)
    if part is None or not part.total:
        raise DataError("data: there is no target to fit to")
    outputs, targets, owner = part.kept()
    return Draws(outputs, targets, owner, part.total - len(targets))


def rows(outputs: Tensor, likelihood: Likelihood) -> Tensor:
    """Heads (S, B, ...) with one row for each target: (S, R, C) or (S, R); a stack of two heads stays last, (S, R, 2)."""
    if likelihood.classes:
        dim = likelihood.dim + 1 if likelihood.dim >= 0 else likelihood.dim
        return outputs.movedim(dim, -1).flatten(1, -2)
    return outputs.flatten(1, -2) if likelihood.name == "gaussian" else outputs.flatten(1)


def most_targets(samples: int, classes: int) -> int:
    """The most targets that are kept of this many draws."""
    return min(TARGETS, max(FEWEST, MOST // (max(samples, 1) * max(classes, 1))))


def affordable(samples: int, examples: int, targets: float, classes: int) -> int:
    """`samples`, or fewer (at least 2) so that all draws fit in memory. targets: of an example, on average.

    If 2 draws of all targets do not fit, a part of the targets is kept (`most_targets`), and as many draws as fit then:
    FEWEST_SAMPLES at least, if that leaves FEWEST targets.
    """
    numbers, count = examples * max(1, math.ceil(targets * classes)), max(1, int(examples * targets))
    if count <= TARGETS and 2 * numbers <= MOST:
        return max(2, min(samples, MOST // max(numbers, 1)))
    least = max(2, min(samples, FEWEST_SAMPLES, MOST // (FEWEST * classes)))
    return max(least, min(samples, MOST // (min(count, TARGETS) * classes)))


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
