"""Posteriors of the kept weights: independent ones, which every layer and file can hold, and joint ones."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_map

from svdcompress.calibrate._curvature import Curvature
from svdcompress.calibrate._draws import CHUNK, Draws, collect
from svdcompress.calibrate._kept import AsFunction, Kept
from svdcompress.layers import set_posterior, variational_layers
from svdcompress.likelihoods import Likelihood
from svdcompress.sources import Examples, fitting

CERTAIN = -40.0
"""The log variance of a weight that is certain, in place of minus infinity."""


@dataclass(frozen=True)
class Joint:
    """A joint normal posterior of all kept weights, N(mean, factor factor^T), given by the product of noise with the factor.

    For each block of the precision Q (L + prior) Q^T the factor is Q (L + prior)^(-1/2): no matrix is inverted.
    """

    kept: Kept
    curvature: Curvature
    prior: float

    def perturb(self, noise: Tensor) -> Tensor:
        """Noise (S, K) -> deviations from the mean (S, K)."""
        found = torch.zeros_like(noise)
        for block in self.curvature.blocks:
            scaled = noise[:, block.where] * (block.values + self.prior).rsqrt().to(noise.dtype)
            found[:, block.where] = scaled if block.vectors is None else scaled @ block.vectors.T.to(noise.dtype)
        return found

    def variances(self) -> Tensor:
        """(K,) the marginal variance of each weight."""
        found = torch.zeros(len(self.kept), dtype=torch.float64)
        for block in self.curvature.blocks:
            spread = 1 / (block.values + self.prior)
            found[block.where] = spread if block.vectors is None else block.vectors.square() @ spread
        return found


def with_variances(model: nn.Module, kept: Kept, variances: Tensor) -> nn.Module:
    """A copy of the model whose kept weights have these variances (K,); all others, and those of 0, become certain."""
    model = copy.deepcopy(model)
    set_posterior(model, "independent")
    layers = dict(variational_layers(model))
    logs = kept.scatter(variances.double().clamp_min(1e-30).log().clamp_min(CERTAIN), CERTAIN)
    for name, log in logs.items():
        with torch.no_grad():
            layers[name].log_sigma2.copy_(log.to(layers[name].log_sigma2))
    return model


def joint_draws(
    model: nn.Module,
    posterior: Joint,
    examples: Examples,
    likelihood: Likelihood,
    samples: int,
    seed: int = 0,
    device: Any = "cpu",
    at_once: int = 8,
) -> Draws:
    """Draws of the heads under a joint posterior: each sample is one set of weights for all inputs.

    model: in `eval()` with its masks frozen. The same seed gives the same standard normal noise, whatever the posterior.
    """
    plain = likelihood.plain()
    function = AsFunction(model, posterior.kept, plain)
    mean = function.vector
    noise = torch.randn(samples, len(posterior.kept), generator=torch.Generator().manual_seed(seed))
    weights = mean + posterior.perturb(noise).to(mean)

    def heads(inputs: Any) -> Tensor:
        with torch.no_grad():
            parts = [vmap(function, (0, None))(some, inputs) for some in weights.split(at_once)]
        joined = tree_map(lambda *tensors: torch.cat(tensors), *parts)
        return joined if isinstance(joined, Tensor) else torch.stack(list(joined), -1)

    size = max(1, fitting(model, examples, CHUNK * at_once, device=device, draws=samples * at_once) // at_once)
    return collect(heads, examples, plain, device, size)


def low_rank(curvature: Curvature, rank: int, prior: float) -> tuple[Tensor, Tensor, Tensor]:
    """(diagonal (K,), vectors (K, r), shrinkages (r,)) of the posterior whose precision keeps the `rank` largest eigenpairs of
    the curvature, and the diagonal of the rest (Mishkin et al. 2018, SLANG, eq. 5).

    With D the diagonal, V the vectors and s the shrinkages, a draw is mean + D^(-1/2) (noise - V (s * (V^T noise))).
    """
    (block,) = curvature.blocks
    assert block.vectors is not None  # the curvature is a full matrix
    values, vectors = block.values[-rank:], block.vectors[:, -rank:]
    rest = block.vectors.square() @ block.values - vectors.square() @ values
    diagonal = rest.clamp_min(0) + prior
    scaled = vectors * values.sqrt() / diagonal.sqrt().unsqueeze(1)
    basis, singular, _ = torch.linalg.svd(scaled, full_matrices=False)
    return diagonal, basis, 1 - (1 + singular.square()).rsqrt()


@dataclass(frozen=True)
class LowRank:
    """A joint posterior whose precision is low rank plus diagonal: see `low_rank`."""

    kept: Kept
    diagonal: Tensor
    vectors: Tensor
    shrinkages: Tensor

    def perturb(self, noise: Tensor) -> Tensor:
        """As `Joint.perturb`."""
        noise64 = noise.double()
        shrunk = noise64 - (noise64 @ self.vectors * self.shrinkages) @ self.vectors.T
        return (shrunk * self.diagonal.rsqrt()).to(noise.dtype)
