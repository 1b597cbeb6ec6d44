"""What all variational layers share: parameters, relevance, KL, modes of the forward pass, state."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from svdcompress.layers._cache import Cache
from svdcompress.layers._maps import Map, apply, outputs, windows
from svdcompress.layers._moments import Moments, Weights, moments
from svdcompress.layers._positions import Shapes
from svdcompress.layers._precision import check_variance_dtype, variance_dtype
from svdcompress.layers._reparam import (
    LocalReparameterization,
    Noise,
    as_ones,
    autocast,
    deviation,
    draw,
    normal_like,
    variances,
    without_autocast,
)
from svdcompress.layers._rows import NotRows, Rows
from svdcompress.layers._sampling import Sampler, leaves_the_graph, outside_of_the_graph
from svdcompress.layers._share import REDUCED, Share, Threshold, parse_share, parse_threshold
from svdcompress.layers._strict import loads_strictly
from svdcompress.layers._variances import Start, Weighted
from svdcompress.layers.posteriors import Posterior, check_posterior
from svdcompress.layers.priors import ARD, Prior, check_prior, kl_apart

DEFAULT_THRESHOLD = 3.0

_unwatched: Any = torch._C.DisableTorchFunction  # keeps weights out of measurements of a pass's activations


class VariationalLayer(Weighted):
    """A linear map whose weights are independent, with the posterior N(weight, exp(log_sigma2)).

    The posterior (`posteriors/`) defines the parameters of the variances, the prior (`priors/`) the KL and log alpha.

    A concrete layer lists it before the torch.nn class of the same map in its bases, so that a dense layer becomes
    variational by a change of class (`from_dense`) that keeps its parameters, hooks, mode and identity.

    Modes of `forward`:
        train(): a draw by local reparameterization (Kingma et al. 2015, eq. 6).
        eval(): the mean, with irrelevant weights at 0.
        eval() under `sampling`: a draw, with mean and variance of irrelevant weights at 0.

    Attributes:
        weight: mean of the weights, as in torch.nn.
        log_sigma2: log variance of the weights, same shape: a parameter under the posterior "independent"; other posteriors
            compute it from their own parameters at each access (to change it, write to those).
        mask: the frozen mask, a bool buffer of the same shape that applies in every mode, or None: then log alpha decides in
            `eval()`, and all weights count in `train()`.
        bias_sigma2: variance of the bias, a buffer of its shape, or None. Only pruning sets it, to the noise of the constant
            outputs of removed units.
        prior, posterior: a `Prior` and a `Posterior`, which equal their names, as in `layer.prior == "ard"`.
        share: {name: part}, the kinds of prior group, with their parts in the KL; the parts add up to 1.
        threshold: {name: limit}; weights ("weight") or prior groups ("input" ...) with log alpha at or above it are irrelevant.
        variance_dtype: precision of the variance path: "float32", "bfloat16", or "auto" for bfloat16 where the chip is fast
            at it and the layer large enough to gain. A float64 layer computes all of it in float64.
    """

    dense_class: ClassVar[type[nn.Module]]

    weight: Tensor
    bias: Tensor | None
    mask: Tensor | None
    bias_sigma2: Tensor | None
    variance_dtype: str = "auto"

    def __init__(
        self,
        *args: Any,
        prior: str | Prior = "ard",
        share: Share = "weight",
        log_sigma2: float | None = None,
        threshold: Threshold = DEFAULT_THRESHOLD,
        variance_dtype: str = "auto",
        posterior: str | Posterior = "independent",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._become_variational(prior, share, log_sigma2, threshold, variance_dtype, posterior)

    def _become_variational(
        self, prior: Any, share: Share, log_sigma2: Start, threshold: Threshold, variance_dtype: str, posterior: Any
    ) -> None:
        share, prior, posterior = parse_share(share), check_prior(prior), check_posterior(posterior)
        prior.check_share(share)
        self.share = share
        self.threshold = parse_threshold(threshold)
        self.variance_dtype = check_variance_dtype(variance_dtype)
        self._start(prior, posterior, log_sigma2)
        self.register_buffer("mask", None)
        self.register_buffer("bias_sigma2", None)

    @classmethod
    def from_dense(
        cls,
        layer: nn.Module,
        *,
        prior: str | Prior = "ard",
        share: Share = "weight",
        log_sigma2: Start = None,
        threshold: Threshold = DEFAULT_THRESHOLD,
        variance_dtype: str = "auto",
        posterior: str | Posterior = "independent",
    ) -> VariationalLayer:
        """Turn a dense layer into this variational one in place, without changing its weights; returns the same object.

        log_sigma2: the initial value of all log variances (None: the prior's), or the parameters to share with a tied layer
        (its `variance_parameters()`).
        """
        if type(layer) is not cls.dense_class:
            raise TypeError(f"{cls.__name__}.from_dense takes a {cls.dense_class.__name__}, not a {type(layer).__name__}")
        changed: Any = layer
        changed.__class__ = cls
        try:
            changed._become_variational(prior, share, log_sigma2, threshold, variance_dtype, posterior)
        except BaseException:
            changed.__class__ = cls.dense_class
            raise
        return changed

    def to_dense(self) -> nn.Module:
        """Turn this layer back into its torch.nn class in place; weights are the means, with irrelevant weights at 0."""
        with torch.no_grad():
            self.weight.mul_(self.relevant())
        for name in (*self.posterior.parameters, "mask", "bias_sigma2", "share", "threshold", "variance_dtype"):
            delattr(self, name)
        for name in ("_own", "_made_at", "_loaded", "_heard", "_level", "_empty_at", "_prior", "_posterior"):
            self.__dict__.pop(name, None)
        changed: Any = self
        changed.__class__ = self.dense_class
        return self

    # Relevance

    def log_alpha(self, share: str = "weight") -> Tensor:
        """Log alpha of each weight (the weight's shape), or of each group of a share (shape of the canonical view, with
        the dimensions that the group spans kept at size 1). A frozen mask limits groups to the weights inside it."""
        if share == "weight":
            return self.prior.log_alpha(self.weight, self.log_sigma2)
        weight, log_sigma2 = self.canonical(self.weight), self.canonical(self.log_sigma2)
        if self.mask is not None:
            mask = self.canonical(self.mask)
            weight, log_sigma2 = weight * mask, log_sigma2.masked_fill(~mask, -torch.inf)
        alpha = self.prior.log_alpha(weight, log_sigma2, REDUCED[share])
        return alpha.reshape([1 if d in REDUCED[share] else n for d, n in enumerate(weight.shape)])

    def limits(self, threshold: Threshold | None = None) -> dict[str, float]:
        """The limit on log alpha of each share, from a threshold as `relevant` takes it: names that it lacks have the
        layer's own limits."""
        return self.threshold if threshold is None else parse_threshold(threshold, self.threshold)

    @torch.no_grad()
    def relevant(self, threshold: Threshold | None = None, ignoring: str | None = None) -> Tensor:
        """Which weights are relevant: bool, the weight's shape. Without a threshold, a frozen `mask` is returned unchanged.

        A weight is relevant if it is inside the frozen mask, if any, and log alpha is below the threshold in all prior
        groups that it belongs to, except those of the share `ignoring`, which the caller judges.
        """
        if threshold is None and self.mask is not None:
            return self.mask
        limit = self.limits(threshold)
        mask = torch.ones(self.weight.shape, dtype=torch.bool, device=self.weight.device)
        for name in self.share:
            if name == ignoring:
                continue
            if name == "weight":
                mask = mask & (self.log_alpha() < limit[name])  # not in place, so that vmap can batch it
            else:
                groups = self.canonical(mask) & (self.log_alpha(name) < limit[name])
                mask = self.as_weight(groups)
        if self.mask is not None:
            mask = mask & self.mask
        return mask

    # Objective

    @property
    def apart(self) -> bool:
        """Whether `kl_apart` can compute the KL: each weight has its own ARD prior, and no mask is frozen."""
        own = "log_sigma2" in self._parameters
        plain = own and type(self.prior) is ARD and list(self.share) == ["weight"] and self.mask is None
        # The compiler fuses the operations of `Prior.kl` with others, but not those of `kl_apart`.
        return plain and self.weight.dtype in (torch.float32, torch.float64) and not torch.compiler.is_compiling()

    def kl(self) -> Tensor:
        """KL(posterior || prior) in nats, summed over the weights inside the frozen mask, if any; a scalar with gradient."""
        return kl_apart([self.weight], [self.log_sigma2]) if self.apart else self.kl_of(self.mask)

    def kl_of(self, mask: Tensor | None) -> Tensor:
        """The same, summed over the weights inside a mask of the weight's shape; None: over all."""
        short = self.posterior.kl(self, self.prior, self.share) if mask is None else None
        if short is not None:
            return short
        return self.prior.kl(self.weight, self.log_sigma2, mask, self.share, (self._groups, self.transposed))

    # Forward

    def _transform(self, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> Tensor:
        """The layer's linear map, as torch.nn computes it."""
        raise NotImplementedError

    def _as_map(self, x: Tensor, *args: Any) -> tuple[Tensor, Map]:
        """The input, with a batch dimension and with padding that the map cannot express, and the same map as data."""
        raise NotImplementedError

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if leaves_the_graph():
            return outside_of_the_graph(VariationalLayer.forward, self, input, *args, **kwargs)
        sampler = self.sampler
        if isinstance(sampler, Shapes) or (sampler is None and not self.training):
            with _unwatched() if isinstance(sampler, Shapes) else nullcontext():
                weight = self.weight * self.relevant()
            output = self._transform(input, weight, self.bias, *args, **kwargs)
            if isinstance(sampler, Shapes):
                sampler.saw(self, output)
            return output
        if sampler is not None and sampler.draws_weights(self):
            return self._transform(input, *self._member(sampler), *args, **kwargs)
        batch, map = self._as_map(autocast(input), *args, **kwargs)
        if isinstance(sampler, Rows) and batch.dim() != input.dim():
            raise NotRows("one input without a batch")
        dtype = variance_dtype(self.variance_dtype, map, batch, self.weight)
        if torch.is_grad_enabled():
            if sampler is not None:
                sampler.caches.pop(self, None)  # a step may follow, and fused optimizers do not raise version counters
            y = self._train(batch, map, dtype, None if sampler is None else sampler.normal)
        else:
            y = self._sample(batch, map, dtype, sampler)
        if sampler is not None:
            sampler.saw(self, y)
        return y if batch.dim() == input.dim() else y.squeeze(0)

    def moments(self, x: Tensor, *args: Any, variance: Tensor | None = None, **kwargs: Any) -> Moments:
        """Mean and variance of each element of the output, in the layer's mode, without drawing.

        x: as for `forward`. variance: the variances of independent inputs whose means are x, of x's shape; None: x is exact.
        Both results have the output's shape, the variance in float32 at least. They are exact, except for a variance
        together with padding by copies ("reflect", "replicate"), which count as independent of their originals.
        """

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return self._transform(x, weight, bias, *args, **kwargs)

        return moments(linear, x, self._weights(torch.promote_types(self.weight.dtype, torch.float32)), variance)

    def rows(self, y: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """An output as (rows, outputs), one row for each position of each example. y: `forward`'s output for the input x."""
        batch, map = self._as_map(x, *args, **kwargs)
        return outputs(map, y if batch.dim() == x.dim() else y.unsqueeze(0))

    def windows(self, x: Tensor, at: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The inputs of some of these rows, (rows, groups, inputs per group, kernel positions): multiplied by the
        `canonical` view of the weight, summed over the last two dimensions, and with the bias added, they give the row.

        x: as for `forward`. at: (rows,), indices of the rows. Transposed convolutions are not supported.
        """
        batch, map = self._as_map(x, *args, **kwargs)
        return windows(map, batch, getattr(self, "kernel_size", ()), at)

    def _train(self, x: Tensor, map: Map, dtype: torch.dtype, noise: Noise | None) -> Tensor:
        """A draw with gradients."""
        mask = self.mask if self.training else self.relevant()
        spread = self.posterior.spread(self, mask)
        if spread is None:  # each weight has its own variance: use the autograd function
            own = self.weight, self.log_sigma2, self.bias, self.bias_sigma2
            return LocalReparameterization.apply(x, *own, mask, map, dtype, noise)
        ones = as_ones(mask, self.weight)
        mean = self.weight if ones is None else self.weight * ones
        with without_autocast(x.device.type):
            found = self._moments(x, map, Weights(mean, _cast(spread, dtype), self.bias, self.bias_sigma2))
            return draw(found, (noise or normal_like)(found.mean))

    def _sample(self, x: Tensor, map: Map, dtype: torch.dtype, sampler: Sampler | None) -> Tensor:
        """A draw without gradients: parameters from the cache, nothing in place (see `draw`)."""
        weights = self._weights(dtype, sampler)
        with without_autocast(x.device.type):
            found = self._moments(x, map, weights)
            if isinstance(sampler, Rows):
                return sampler.draw(found.mean, deviation(found))
        return draw(found, normal_like(found.mean) if sampler is None else sampler.normal(found.mean))

    def _moments(self, x: Tensor, map: Map, weights: Weights) -> Moments:
        """The output's moments: the mean in the dtype of x, the variance in that of the weights' variances."""
        mean, sigma2, bias, bias_sigma2 = weights
        bias = None if bias is None else bias.to(x.dtype)
        bias_sigma2 = None if bias_sigma2 is None else bias_sigma2.to(sigma2.dtype)
        return moments(partial(apply, map), x, Weights(mean.to(x.dtype), sigma2, bias, bias_sigma2))

    def _weights(self, dtype: torch.dtype, sampler: Sampler | None = None, dense: bool = False) -> Weights:
        """The parameters as they count in this mode, variances in `dtype`. dense: as a tensor of the weight's shape."""

        def make() -> tuple[Tensor, Any]:
            mask = self.mask if self.training else self.relevant()
            spread = None if dense else self.posterior.spread(self, mask)
            ones = as_ones(mask, self.weight)
            weight = self.weight if ones is None else self.weight * ones
            if spread is None:
                sigma2 = variances(self.log_sigma2)
                spread = sigma2 if ones is None else sigma2 * ones
            return weight, _cast(spread, dtype)

        if sampler is None:  # outside of `sampling` changes through `.data`, which no counter shows, have to count
            mean, sigma2 = make()
        else:
            key = (self.training, tuple(self.threshold.items()), tuple(self.share), dtype, dense)
            sources = (self.weight, self.mask, *self.variance_parameters().values())
            mean, sigma2 = sampler.caches.setdefault(self, Cache()).get(sources, key, make)
        return Weights(mean, sigma2, self.bias, self.bias_sigma2)

    def _member(self, sampler: Sampler) -> tuple[Tensor, Tensor | None]:
        """One draw of weight and bias, from noise that the sampler keeps until it resamples; tied layers share it."""
        # The range of float16 is too small for the variances.
        weight, sigma2, bias, bias_sigma2 = self._weights(
            torch.promote_types(self.weight.dtype, torch.float32), sampler, dense=True
        )
        noise = sampler.kept(sampler.owner(self), lambda: sampler.normal(weight))
        weight = self.posterior.draw(weight, sigma2, noise)
        if bias is None or bias_sigma2 is None:
            return weight, bias
        noise = sampler.kept((sampler.owner(self, "bias"), "bias"), lambda: sampler.normal(bias_sigma2))
        return weight, bias + bias_sigma2.sqrt() * noise

    # State

    def train(self, mode: bool = True) -> VariationalLayer:
        if self.sampler is not None:
            self.sampler.caches.pop(self, None)
        return super().train(mode)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        # A dense state_dict has no variances: the layer keeps its own. Buffers that are None by default appear or go to
        # match the state, but stay where it may be partial (an average of the parameters, one layer's weights).
        lacking = [name for name in self.posterior.parameters if prefix + name not in state_dict]
        fresh = self._first_values(state_dict.get(prefix + "weight")) if lacking and self.variance_empty else {}
        state_dict.update({prefix + name: fresh[name] for name in lacking if fresh})
        for name, like in (("mask", self.weight), ("bias_sigma2", self.bias)):
            stored = state_dict.get(prefix + name)
            if stored is None:
                if getattr(self, name) is not None and loads_strictly():
                    setattr(self, name, None)
                    told = f"the state has no {name}, so the layer's own was removed; load with strict=False to keep it"
                    warnings.warn(told, stacklevel=2)
            elif getattr(self, name) is None and like is not None:
                setattr(self, name, torch.empty_like(like, dtype=stored.dtype, requires_grad=False))
        super()._load_from_state_dict(state_dict, prefix, *args)
        if len(fresh) == len(lacking) > 0:
            self._note_variances()
        elif not self.variance_empty:
            missing = args[2]
            missing[:] = [key for key in missing if key not in {prefix + name for name in lacking}]

    def extra_repr(self) -> str:
        share = "+".join(name if part == 1 else f"{part:.3g} {name}" for name, part in self.share.items())
        limits = ", ".join(f"{self.threshold[name]:g}" for name in self.share)
        posterior = "" if self.posterior == "independent" else f", posterior={self.posterior}"
        return f"{super().extra_repr()}, prior={self.prior}, share={share}, threshold={limits}{posterior}"


def variational_layers(model: nn.Module) -> Iterator[tuple[str, VariationalLayer]]:
    """Name and layer of each variational layer, each object once."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, VariationalLayer))


def variance_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that define the variances of a model's weights, each once."""
    found = {id(own): own for _, layer in variational_layers(model) for own in layer.variance_parameters().values()}
    return list(found.values())


def _cast(spread: Any, dtype: torch.dtype) -> Any:
    """Cast variances, a tensor or a tuple of tensors, to a dtype."""
    return spread.to(dtype) if isinstance(spread, Tensor) else type(spread)(*(part.to(dtype) for part in spread))
