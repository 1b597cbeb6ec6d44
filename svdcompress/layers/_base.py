"""What all variational layers share: parameters, relevance, KL, modes of the forward pass, state."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from svdcompress.layers import _kl
from svdcompress.layers._reparam import TINY, draw, normal_like
from svdcompress.layers._sampling import StochasticLayer
from svdcompress.layers._share import REDUCED, Share, Threshold, canonical, check_prior, parse_share, parse_threshold

DEFAULT_LOG_SIGMA2 = -10.0
DEFAULT_THRESHOLD = 3.0


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
    """

    dense_class: ClassVar[type[nn.Module]]
    transposed: ClassVar[bool] = False  # read where torch.nn's own layers have no such attribute (Linear)

    weight: Tensor
    bias: Tensor | None
    log_sigma2: Tensor
    mask: Tensor | None
    bias_sigma2: Tensor | None

    def __init__(
        self,
        *args: Any,
        prior: str = "ard",
        share: Share = "weight",
        log_sigma2: float = DEFAULT_LOG_SIGMA2,
        threshold: Threshold = DEFAULT_THRESHOLD,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._become_variational(prior, share, log_sigma2, threshold)

    def _become_variational(self, prior: str, share: Share, log_sigma2: float | nn.Parameter, threshold: Threshold) -> None:
        self.prior = check_prior(prior)
        self.share = parse_share(share)
        self.threshold = parse_threshold(threshold)
        if not isinstance(log_sigma2, nn.Parameter):
            start = torch.full_like(self.weight, float(log_sigma2), memory_format=torch.contiguous_format)
            log_sigma2 = nn.Parameter(start, requires_grad=self.weight.requires_grad)
        self.log_sigma2 = log_sigma2
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
    ) -> VariationalLayer:
        """Turn a dense layer into this variational one in place, weights kept bit for bit; returns the same object.

        log_sigma2: where every log variance starts, or a parameter to share with a tied layer.
        """
        if type(layer) is not cls.dense_class:
            raise TypeError(f"{cls.__name__}.from_dense takes a {cls.dense_class.__name__}, not a {type(layer).__name__}")
        layer.__class__ = cls
        try:
            layer._become_variational(prior, share, log_sigma2, threshold)
        except BaseException:
            layer.__class__ = cls.dense_class
            raise
        return layer

    def to_dense(self) -> nn.Module:
        """Turn this layer back into its torch.nn class in place: the mean, with irrelevant weights at 0."""
        with torch.no_grad():
            self.weight.mul_(self.relevant())
        del self.log_sigma2, self.mask, self.bias_sigma2, self.prior, self.share, self.threshold
        self.__dict__.pop("sampler", None)
        self.__class__ = self.dense_class
        return self

    # Relevance

    @property
    def _groups(self) -> int:
        return getattr(self, "groups", 1)

    def canonical(self, tensor: Tensor) -> Tensor:
        """A tensor of the weight's shape seen as (groups, outputs per group, inputs per group, kernel positions)."""
        return canonical(tensor, self._groups, self.transposed)

    def log_alpha(self, share: str = "weight") -> Tensor:
        """Log alpha of each weight (the weight's shape), or of each group of a share (shape of the canonical view, with
        the dimensions that the group spans kept at size 1)."""
        if share == "weight":
            return _kl.log_alpha(self.weight, self.log_sigma2)
        alpha = _kl.group_log_alpha(self.canonical(self.weight), self.canonical(self.log_sigma2), REDUCED[share])
        return alpha.reshape([1 if d in REDUCED[share] else n for d, n in enumerate(self.canonical(self.weight).shape)])

    @torch.no_grad()
    def relevant(self, threshold: Threshold | None = None) -> Tensor:
        """Which weights stay: bool, the weight's shape. A held `mask` counts before log alpha unless a threshold is given.

        A weight stays when log alpha is below the threshold for each of the shares that it belongs to.
        """
        if threshold is None and self.mask is not None:
            return self.mask
        limit = self.threshold if threshold is None else parse_threshold(threshold)
        keep = torch.ones(self.weight.shape, dtype=torch.bool, device=self.weight.device)
        for name in self.share:
            if name == "weight":
                keep &= self.log_alpha() < limit[name]
            else:
                self.canonical(keep).logical_and_(self.log_alpha(name) < limit[name])
        if self.mask is not None:
            keep &= self.mask
        return keep

    # Objective

    def kl(self) -> Tensor:
        """KL(posterior || prior) summed over the weights that a held mask leaves, in nats; a scalar with gradient."""
        weight, log_sigma2 = self.weight.float(), self.log_sigma2.float()
        if self.weight.dtype == torch.float64:
            weight, log_sigma2 = self.weight, self.log_sigma2
        return sum((part * self._kl_of(name, weight, log_sigma2) for name, part in self.share.items()), weight.new_zeros(()))

    def _kl_of(self, share: str, weight: Tensor, log_sigma2: Tensor) -> Tensor:
        if share == "weight":
            alpha = _kl.log_alpha(weight, log_sigma2)
            if self.mask is not None:
                alpha = alpha[self.mask]
            return _kl.kl_ard(alpha) if self.prior == "ard" else _kl.kl_log_uniform(alpha)
        dims = REDUCED[share]
        weight, log_sigma2 = self.canonical(weight), self.canonical(log_sigma2)
        if self.prior == "ard":
            return _kl.kl_group_ard(weight, log_sigma2, dims)
        alpha = _kl.group_log_alpha(weight, log_sigma2, dims)
        return _kl.kl_log_uniform(alpha) * (weight.numel() / alpha.numel())

    # Forward

    def _transform(self, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> Tensor:
        """The layer's linear map."""
        raise NotImplementedError

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        if not self.draws:
            return self._transform(x, self.weight * self.relevant(), self.bias, *args)
        keep = self.mask if self.training else self.relevant()
        weight = self.weight if keep is None else self.weight * keep
        variance = self.log_sigma2.exp() if keep is None else self.log_sigma2.exp() * keep
        if self.sampler is not None and self.sampler.members:
            weight, bias = self._member(weight, variance)
            return self._transform(x, weight, bias, *args)
        mean = self._transform(x, weight, self.bias, *args)
        spread = self._transform(x * x, variance, self.bias_sigma2, *args)
        return draw(mean, spread, normal_like(mean) if self.sampler is None else self.sampler.normal(mean))

    def _member(self, weight: Tensor, variance: Tensor) -> tuple[Tensor, Tensor | None]:
        """One draw of weight and bias, kept by the sampler until it resamples."""
        sampler = self.sampler
        if self not in sampler.draws:
            noise = None if self.bias_sigma2 is None else sampler.normal(self.bias_sigma2)
            sampler.draws[self] = (sampler.normal(weight), noise)
        noise, bias_noise = sampler.draws[self]
        weight = weight + variance.clamp_min(TINY).sqrt() * noise
        if bias_noise is None:
            return weight, self.bias
        return weight, self.bias + self.bias_sigma2.sqrt() * bias_noise

    # State

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
