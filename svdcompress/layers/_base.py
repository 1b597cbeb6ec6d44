"""What all variational layers share: parameters, relevance, KL, modes of the forward pass, state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from svdcompress.layers import _kl
from svdcompress.layers._apart import kl_apart
from svdcompress.layers._cache import Cache
from svdcompress.layers._divergence import divergence
from svdcompress.layers._maps import Map, apply
from svdcompress.layers._positions import Shapes
from svdcompress.layers._precision import check_variance_dtype, variance_dtype
from svdcompress.layers._reparam import (
    TINY,
    Draw,
    autocast,
    draw,
    factor,
    moments,
    normal_like,
    variances,
    without_autocast,
)
from svdcompress.layers._rows import NotRows, Rows
from svdcompress.layers._sampling import Sampler, StochasticLayer, leaves_the_graph, outside_of_the_graph
from svdcompress.layers._share import REDUCED, Share, Threshold, canonical, check_prior, parse_share, parse_threshold

DEFAULT_LOG_SIGMA2 = -10.0
DEFAULT_THRESHOLD = 3.0

_unwatched: Any = torch._C.DisableTorchFunction  # whoever measures a pass's activations does not see weights


class VariationalLayer(StochasticLayer):
    """A linear map whose weights have the posterior N(weight, exp(log_sigma2)), independently.

    It stands before the torch.nn class of the same map in the bases of a concrete layer, so that a dense layer becomes
    variational by a change of class (`from_dense`) that keeps its parameters, hooks, mode and identity.

    Modes of `forward`:
        train(): a draw by local reparameterisation (Kingma et al. 2015, eq. 6).
        eval(): the mean, with irrelevant weights at 0.
        eval() under `sampling`: a draw, with irrelevant weights at 0, mean and variance.

    Attributes:
        weight: mean of the weights, as in torch.nn.
        log_sigma2: log variance of the weights, same shape.
        mask: which weights stay, a bool buffer of the same shape that holds in every mode, or None: log alpha decides in
            `eval()` and everything lives in `train()`.
        bias_sigma2: variance of the bias, a buffer of its shape, or None. Only pruning sets it: the noise of a removed
            unit's constant output goes there.
        prior: "ard" or "log-uniform".
        share: {name: part} of who shares a prior variance.
        threshold: {name: limit}; weights ("weight") or groups ("input" ...) of log alpha at or above it are irrelevant.
        variance_dtype: precision of the variance path: "float32", "bfloat16", or "auto" for bfloat16 where the chip is fast
            at it and the layer large enough to gain. A float64 layer computes all of it in float64.
    """

    dense_class: ClassVar[type[nn.Module]]
    transposed: ClassVar[bool] = False  # read where torch.nn's own layers have no such attribute (Linear)

    weight: Tensor
    bias: Tensor | None
    log_sigma2: Tensor
    mask: Tensor | None
    bias_sigma2: Tensor | None
    variance_dtype: str = "auto"

    def __init__(
        self,
        *args: Any,
        prior: str = "ard",
        share: Share = "weight",
        log_sigma2: float = DEFAULT_LOG_SIGMA2,
        threshold: Threshold = DEFAULT_THRESHOLD,
        variance_dtype: str = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._become_variational(prior, share, log_sigma2, threshold, variance_dtype)

    def _become_variational(
        self, prior: str, share: Share, log_sigma2: float | nn.Parameter, threshold: Threshold, variance_dtype: str
    ) -> None:
        self.prior = check_prior(prior)
        self.share = parse_share(share)
        self.threshold = parse_threshold(threshold)
        self.variance_dtype = check_variance_dtype(variance_dtype)
        if not isinstance(log_sigma2, nn.Parameter):
            start = torch.full_like(self.weight, float(log_sigma2), memory_format=torch.contiguous_format)
            log_sigma2 = nn.Parameter(start, requires_grad=self.weight.requires_grad)
        self.log_sigma2 = log_sigma2
        self._made_at = log_sigma2._version
        self.register_buffer("mask", None)
        self.register_buffer("bias_sigma2", None)

    @classmethod
    def from_dense(
        cls,
        layer: nn.Module,
        *,
        prior: str = "ard",
        share: Share = "weight",
        log_sigma2: float | nn.Parameter = DEFAULT_LOG_SIGMA2,
        threshold: Threshold = DEFAULT_THRESHOLD,
        variance_dtype: str = "auto",
    ) -> VariationalLayer:
        """Turn a dense layer into this variational one in place, weights kept bit for bit; returns the same object.

        log_sigma2: where every log variance starts, or a parameter to share with a tied layer.
        """
        if type(layer) is not cls.dense_class:
            raise TypeError(f"{cls.__name__}.from_dense takes a {cls.dense_class.__name__}, not a {type(layer).__name__}")
        changed: Any = layer
        changed.__class__ = cls
        try:
            changed._become_variational(prior, share, log_sigma2, threshold, variance_dtype)
        except BaseException:
            changed.__class__ = cls.dense_class
            raise
        return changed

    def to_dense(self) -> nn.Module:
        """Turn this layer back into its torch.nn class in place: the mean, with irrelevant weights at 0."""
        with torch.no_grad():
            self.weight.mul_(self.relevant())
        del self.log_sigma2, self.mask, self.bias_sigma2, self.prior, self.share, self.threshold, self.variance_dtype
        for name in ("_own", "_made_at"):
            self.__dict__.pop(name, None)
        changed: Any = self
        changed.__class__ = self.dense_class
        return self

    @property
    def variance_moved(self) -> bool:
        """Whether anything has written to `log_sigma2` since the layer was made: an optimizer, or a checkpoint."""
        return self.log_sigma2._version != self.__dict__.get("_made_at")

    # Relevance

    @property
    def _groups(self) -> int:
        return getattr(self, "groups", 1)

    def canonical(self, tensor: Tensor) -> Tensor:
        """A tensor of the weight's shape seen as (groups, outputs per group, inputs per group, kernel positions)."""
        return canonical(tensor, self._groups, self.transposed)

    def log_alpha(self, share: str = "weight") -> Tensor:
        """Log alpha of each weight (the weight's shape), or of each group of a share (shape of the canonical view, with
        the dimensions that the group spans kept at size 1). Groups are what a held mask leaves of them."""
        if share == "weight":
            return _kl.log_alpha(self.weight, self.log_sigma2)
        weight, log_sigma2 = self.canonical(self.weight), self.canonical(self.log_sigma2)
        if self.mask is not None:
            keep = self.canonical(self.mask)
            weight, log_sigma2 = weight * keep, log_sigma2.masked_fill(~keep, -torch.inf)
        alpha = _kl.group_log_alpha(weight, log_sigma2, REDUCED[share])
        return alpha.reshape([1 if d in REDUCED[share] else n for d, n in enumerate(weight.shape)])

    @torch.no_grad()
    def relevant(self, threshold: Threshold | None = None, ignoring: str | None = None) -> Tensor:
        """Which weights stay: bool, the weight's shape. A held `mask` counts before log alpha unless a threshold is given.

        A weight stays when log alpha is below the threshold for each of the shares that it belongs to, but for the share
        `ignoring`, which somebody else judges.
        """
        if threshold is None and self.mask is not None:
            return self.mask
        limit = self.threshold if threshold is None else parse_threshold(threshold)
        keep = torch.ones(self.weight.shape, dtype=torch.bool, device=self.weight.device)
        for name in self.share:
            if name == ignoring:
                continue
            if name == "weight":
                keep &= self.log_alpha() < limit[name]
            else:
                self.canonical(keep).logical_and_(self.log_alpha(name) < limit[name])
        if self.mask is not None:
            keep &= self.mask
        return keep

    # Objective

    @property
    def apart(self) -> bool:
        """Whether the KL is that of weights which each have an ARD prior of their own: what `kl_apart` takes."""
        plain = self.prior == "ard" and list(self.share) == ["weight"] and self.mask is None
        # The compiler fuses the other function's operations with others, but not these.
        return plain and self.weight.dtype in (torch.float32, torch.float64) and not torch.compiler.is_compiling()

    def kl(self) -> Tensor:
        """KL(posterior || prior) summed over the weights that a held mask leaves, in nats; a scalar with gradient."""
        if self.apart:
            return kl_apart([self.weight], [self.log_sigma2])
        layout = (self._groups, self.transposed)
        return divergence(self.weight, self.log_sigma2, self.mask, self.prior, self.share, layout)

    # Forward

    def _transform(self, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> Tensor:
        """The layer's linear map, as torch.nn computes it."""
        raise NotImplementedError

    def _as_map(self, x: Tensor, *args: Any) -> tuple[Tensor, Map]:
        """The same map as data, and its input: padded where the map cannot, and with a batch dimension."""
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
        noise = None if sampler is None else sampler.normal
        if torch.is_grad_enabled():
            keep = self.mask if self.training else self.relevant()
            y = Draw.apply(batch, self.weight, self.log_sigma2, self.bias, self.bias_sigma2, keep, map, dtype, noise)
        else:
            y = self._sample(batch, map, dtype, sampler)
        return y if batch.dim() == input.dim() else y.squeeze(0)

    def _sample(self, x: Tensor, map: Map, dtype: torch.dtype, sampler: Sampler | None) -> Tensor:
        """A draw without gradients: parameters from the cache, nothing in place (see `draw`)."""
        weight, sigma2 = self._posterior(dtype, sampler)
        weight = weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        bias_sigma2 = None if self.bias_sigma2 is None else self.bias_sigma2.to(dtype)
        with without_autocast(x.device.type):
            if isinstance(sampler, Rows):
                return sampler.draw(*moments(map, x, weight, sigma2, bias, bias_sigma2))
            mean = apply(map, x, weight, bias)
            variance = apply(map, x.to(dtype).square(), sigma2, bias_sigma2)
        return draw(mean, variance, normal_like(mean) if sampler is None else sampler.normal(mean))

    def _posterior(self, dtype: torch.dtype, sampler: Sampler | None) -> tuple[Tensor, Tensor]:
        """Mean and variance (of a dtype) of the weights that count in this mode: what does not stay is 0 in both."""

        def make() -> tuple[Tensor, Tensor]:
            keep = self.mask if self.training else self.relevant()
            weight, sigma2 = self.weight, variances(self.log_sigma2)
            if keep is not None:
                stays: Any = factor(keep, weight)
                weight, sigma2 = weight * stays, sigma2 * stays
            return weight, sigma2.to(dtype)

        if sampler is None:  # outside of `sampling` a change through `.data`, which no counter shows, has to count
            return make()
        key = (self.training, tuple(self.threshold.items()), tuple(self.share), dtype)
        cache = sampler.caches.setdefault(self, Cache())
        return cache.get((self.weight, self.log_sigma2, self.mask), key, make)

    def _member(self, sampler: Sampler) -> tuple[Tensor, Tensor | None]:
        """One draw of weight and bias, by noise that the sampler keeps until it resamples: tied layers have the same."""
        # float16 has no room for small variances.
        weight, sigma2 = self._posterior(torch.promote_types(self.weight.dtype, torch.float32), sampler)
        noise = sampler.kept(sampler.owner(self), lambda: sampler.normal(weight))
        weight = weight + (sigma2.clamp_min(TINY).sqrt() * noise).to(weight.dtype)
        if self.bias is None or self.bias_sigma2 is None:
            return weight, self.bias
        bias_sigma2 = self.bias_sigma2
        noise = sampler.kept((sampler.owner(self, "bias"), "bias"), lambda: sampler.normal(bias_sigma2))
        return weight, self.bias + bias_sigma2.sqrt() * noise

    # State

    def train(self, mode: bool = True) -> VariationalLayer:
        if self.sampler is not None:
            self.sampler.caches.pop(self, None)
        return super().train(mode)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        # A dense state_dict has no log_sigma2: where it starts is kept. Buffers that are None by default appear or go as
        # the state has them.
        state_dict.setdefault(prefix + "log_sigma2", self.log_sigma2.detach())
        for name, like in (("mask", self.weight), ("bias_sigma2", self.bias)):
            stored = state_dict.get(prefix + name)
            if stored is None:
                setattr(self, name, None)
            elif getattr(self, name) is None and like is not None:
                setattr(self, name, torch.empty_like(like, dtype=stored.dtype, requires_grad=False))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        share = "+".join(name if part == 1 else f"{part:.3g} {name}" for name, part in self.share.items())
        limits = ", ".join(f"{self.threshold[name]:g}" for name in self.share)
        return f"{super().extra_repr()}, prior={self.prior}, share={share}, threshold={limits}"


def variational_layers(model: nn.Module) -> Iterator[tuple[str, VariationalLayer]]:
    """Name and layer of each variational layer, each object once."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, VariationalLayer))
