"""The generalized Gauss-Newton matrix of a network's likelihood over the kept weights: full, diagonal, or of the last layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.batch import for_gradients
from svdcompress.calibrate._jacobians import Jacobians
from svdcompress.calibrate._kept import Kept
from svdcompress.errors import ModelError
from svdcompress.likelihoods import Likelihood
from svdcompress.sources import Examples

NUMBERS = 10**7
"""The most numbers in the Jacobians of a batch."""

PASSES = 20_000
"""The most heads of all examples together if each takes a pass of its own: a minute or two for a small network."""

MOST_WEIGHTS = 6000
"""The most weights of which a full matrix is made: 288 MB, and a few minutes for its eigenvectors."""


def check_fits(weights: int) -> None:
    """Raises ModelError if these are too many weights for a full matrix."""
    if weights > MOST_WEIGHTS:
        raise ModelError(
            f"a joint posterior over {weights:,} weights needs a matrix of {8 * weights**2 / 2**30:.1f} GiB; at most "
            f"{MOST_WEIGHTS:,} weights are possible: the diagonal, or the last layer, needs less"
        )


def some(examples: Examples, most: int | None, seed: int) -> Examples:
    """At most `most` of the examples, drawn with a seed."""
    if most is None or most >= len(examples):
        return examples
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed))
    return examples.subset(order[:most].sort().values)


@dataclass(frozen=True)
class Block:
    """A block of the curvature: the weights `where` of the vector, eigenvalues (n,), and eigenvectors (n, n) as columns.

    vectors: None for a diagonal, which has one eigenvalue for each weight.
    """

    where: slice
    values: Tensor
    vectors: Tensor | None = None


@dataclass(frozen=True)
class Curvature:
    """The sum over N examples of the Gauss-Newton matrix, by blocks; weights in no block are taken as certain.

    structure: "diagonal", "kronecker", "full", "last-layer". examples: the number of training examples it was computed from
    (and scaled up to all of them).
    """

    structure: str
    blocks: tuple[Block, ...]
    weights: int
    examples: int


def noise_root(likelihood: Likelihood, heads: Any, tau: float = 1.0) -> Tensor:
    """(B, H, H): for each example a matrix L such that L L^T is the Hessian of the NLL with respect to its heads (where that
    depends on the target its expectation, the Fisher matrix), the heads flattened to H = positions times classes.

    softmax: L = diag(sqrt p) - p sqrt(p)^T, as L L^T = diag(p) - p p^T; sigmoid: sqrt(p (1 - p)); values: sqrt(tau); means and
    log variances: 1 / sigma and sqrt(1/2). See Martens 2020 (JMLR 21:146), sec. 9.2.
    """
    if likelihood.classes:
        dim = likelihood.dim
        z = heads.movedim(dim, -1)
        count = z.shape[-1]
        p = z.flatten(1, -2).softmax(-1) if z.dim() > 2 else z.softmax(-1).unsqueeze(1)
        root = torch.diag_embed(p.sqrt()) - p.unsqueeze(-1) * p.sqrt().unsqueeze(-2)
        size, places = p.shape[:2]
        whole = root.new_zeros(size, places, count, places, count)
        index = torch.arange(places)
        whole[:, index, :, index, :] = root.movedim(1, 0)
        return whole.flatten(3).flatten(1, 2)
    if likelihood.name == "binary":
        p = heads.flatten(1) if heads.dim() > 1 else heads.unsqueeze(1)
        p = p.sigmoid()
        return torch.diag_embed((p * (1 - p)).sqrt())
    if likelihood.name == "regression":
        values = heads.flatten(1) if heads.dim() > 1 else heads.unsqueeze(1)
        return torch.diag_embed(torch.full_like(values, tau**0.5))
    if likelihood.name == "gaussian":
        log_variance = heads[1].reshape(len(heads[1]), -1)
        return torch.diag_embed(torch.cat([torch.exp(-0.5 * log_variance), torch.full_like(log_variance, 0.5**0.5)], 1))
    raise ModelError(f"task {likelihood.name!r} has no known curvature")


def counted(root: Tensor, likelihood: Likelihood, targets: Tensor) -> Tensor:
    """(B, H, H) of `noise_root`, 0 for the heads of positions that do not count."""
    counts = likelihood.counts(targets).reshape(len(root), -1)
    if bool(counts.all()):
        return root
    return root * counts.repeat_interleave(root.shape[1] // counts.shape[1], 1).unsqueeze(-1)


def roots(jacobians: Jacobians, examples: Examples, likelihood: Likelihood, tau: float, batch: int, device: Any) -> Any:
    """For each batch of examples the rows B = L^T J, (rows, K), such that B^T B is the Gauss-Newton matrix of the batch."""
    plain = likelihood.plain()
    for inputs, targets in examples.batches(batch, device=device):
        heads, jacobian = jacobians(inputs)
        with torch.no_grad():
            root = counted(noise_root(plain, heads, tau), plain, targets)
            yield torch.einsum("bhg,bhk->bgk", root, jacobian).flatten(0, 1)


def gauss_newton(
    model: nn.Module,
    kept: Kept,
    examples: Examples,
    likelihood: Likelihood,
    structure: str = "full",
    *,
    tau: float = 1.0,
    most: int | None = None,
    seed: int = 0,
    device: Any = "cpu",
) -> Curvature:
    """The Gauss-Newton matrix of the NLL summed over the examples (Martens 2020, eq. 6; Daxberger et al. 2021, sec. 2).

    model: in `eval()` with its masks frozen (`held`). structure: "full", "diagonal", "last-layer" (full, of the last layer).
    tau: noise precision of a regression. most: the most examples to use, drawn with the seed; the sum is scaled up to all. For
    a model that vmap refuses they are fewer, with PASSES heads in total. Raises ModelError for a model without Jacobians of
    single examples, and if the matrix is too large.
    """
    count, size = len(examples), len(kept)
    part = kept.slices[-1] if structure == "last-layer" else slice(0, size)
    if structure != "diagonal":
        check_fits(part.stop - part.start)
    total = torch.zeros(size if structure == "diagonal" else (part.stop - part.start,) * 2, dtype=torch.float64)
    examples = some(examples, most, seed)
    jacobians = Jacobians(model, kept, likelihood.plain())
    with for_gradients(model):
        heads = _heads(jacobians, examples, device)
        if not jacobians.together:
            examples = some(examples, max(1, PASSES // heads), seed)
        batch = max(1, min(250, NUMBERS // (heads * sum(torch.Size(shape).numel() for shape in kept.shapes))))
        for rows in roots(jacobians, examples, likelihood, tau, batch, device):
            if structure == "diagonal":
                total += rows.square().sum(0).double().cpu()
            else:
                rows = rows[:, part]
                total += (rows.T @ rows).double().cpu()
    total *= count / len(examples)
    if structure == "diagonal":
        return Curvature(structure, (Block(slice(0, size), total),), size, len(examples))
    values, vectors = torch.linalg.eigh(total)
    return Curvature(structure, (Block(part, values.clamp_min(0), vectors),), size, len(examples))


def _heads(jacobians: Jacobians, examples: Examples, device: Any) -> int:
    """The number of heads of an example; also finds out whether vmap takes the model (`jacobians.together`)."""
    inputs, _ = next(iter(examples.batches(1, device=device)))
    return jacobians(inputs)[1].shape[1]
