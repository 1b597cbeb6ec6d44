"""The objective: mean NLL + beta KL / N, and the schedules of beta."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from svdcompress.convert import PAST_CURE, warn_of_half_precision
from svdcompress.errors import UsageError
from svdcompress.layers import VariationalLayer, check_whole, kl_apart, variational_layers

if TYPE_CHECKING:
    from svdcompress.recipe import BetaSchedule


class Schedule(Protocol):
    """beta as a function of the epoch; fractions of an epoch are allowed."""

    def __call__(self, epoch: float) -> float: ...


@dataclass(frozen=True)
class Constant:
    """The same beta throughout. Raises UsageError if it is negative or not finite."""

    final: float = 1.0

    def __post_init__(self) -> None:
        _check_betas(final=self.final)

    def __call__(self, epoch: float) -> float:
        return self.final


@dataclass(frozen=True)
class LinearWarmup:
    """0 up to epoch `start`, then linear to `final` at epoch `stop` (the schedule of Molchanov et al.'s code: 5, 20).

    Raises UsageError if `stop` comes before `start`, or if `final` is negative or not finite.

    Example:
        >>> svdc.LinearWarmup(start=5, stop=20)(12.5)
        0.5
    """

    start: float = 5
    stop: float = 20
    final: float = 1.0

    def __post_init__(self) -> None:
        _check_order(self.start, self.stop)
        _check_betas(final=self.final)

    def __call__(self, epoch: float) -> float:
        return self.final * _progress(epoch, self.start, self.stop)


@dataclass(frozen=True)
class CosineWarmup:
    """0 up to epoch `start`, then half a cosine to `final` at epoch `stop`: slow at both ends.

    Raises UsageError as `LinearWarmup` does.
    """

    start: float = 5
    stop: float = 20
    final: float = 1.0

    def __post_init__(self) -> None:
        _check_order(self.start, self.stop)
        _check_betas(final=self.final)

    def __call__(self, epoch: float) -> float:
        return self.final * 0.5 * (1 - math.cos(math.pi * _progress(epoch, self.start, self.stop)))


@dataclass(frozen=True)
class AdditiveWarmup:
    """Adds `step` in each epoch, from the first on, up to `final`: +0.02 up to 1 in Mittov's lecture.

    Raises UsageError if one of them is negative or not finite.
    """

    step: float = 0.02
    final: float = 1.0

    def __post_init__(self) -> None:
        _check_betas(step=self.step, final=self.final)

    def __call__(self, epoch: float) -> float:
        return min(self.step * (math.floor(epoch) + 1), self.final)


def _warmup(kind: Callable[..., Schedule]) -> Callable[[BetaSchedule, int, float], Schedule]:
    def make(beta: BetaSchedule, epochs: int, final: float) -> Schedule:
        from svdcompress.recipe import in_epochs  # imported here, as training by hand reads no recipe

        start = in_epochs(beta.start, epochs)
        # If one is in percent and the other in epochs, their order depends on the number of epochs.
        return kind(start, max(start, in_epochs(beta.stop, epochs)), final)

    return make


SCHEDULES: dict[str, Callable[[BetaSchedule, int, float], Schedule]] = {
    "constant": lambda beta, epochs, final: Constant(final),
    "linear": _warmup(LinearWarmup),
    "cosine": _warmup(CosineWarmup),
    "additive": lambda beta, epochs, final: AdditiveWarmup(beta.step, final),
}
"""Schedules by their name in a recipe's `train.beta`, made from the settings there, the epochs of training and the last
beta."""


def _check_order(start: float, stop: float) -> None:
    if not start <= stop:
        raise UsageError(f"stop: epoch {stop} is before start, epoch {start}")


def _check_betas(**betas: float) -> None:
    for name, beta in betas.items():
        if not 0 <= beta < math.inf:
            raise UsageError(f"{name}: {beta} is not a finite number of at least 0")


def _real(value: Any) -> float | None:
    """A number as a float, also one of numpy or in a tensor; None if the value is not a number."""
    return float(value) if isinstance(value, Real) or getattr(value, "ndim", None) == 0 else None


def _as_schedule(schedule: Schedule | float) -> Schedule:
    beta = _real(schedule)
    if beta is not None:
        _check_betas(schedule=beta)
        return Constant(beta)
    if not callable(schedule):
        raise UsageError(f"schedule: {schedule!r} is neither a number nor a function of the epoch")
    return schedule


def _progress(epoch: float, start: float, stop: float) -> float:
    if epoch < start:
        return 0.0
    return 1.0 if epoch >= stop else (epoch - start) / (stop - start)


NOT_CONVERTED = "the model has no variational layer; call svdcompress.convert(model) first"

SMALL = 2**20
"""Most weights in all the layers whose KL is computed together, so that the memory this needs meanwhile stays small."""


def kl_divergence(model: nn.Module) -> Tensor:
    """KL(posterior || prior) in nats, summed over all variational layers, each posterior once; a scalar with gradient.

    Layers that share weight and variances count once, with the weights in the mask of at least one of them. Raises UsageError
    if the model has no variational layer.

    Example:
        >>> svdc.kl_divergence(svdc.convert(model)).backward()
    """
    tied: dict[Any, list[VariationalLayer]] = defaultdict(list)
    for _, layer in variational_layers(model):
        tied[_posterior_of(layer)].append(layer)
    if not tied:
        raise UsageError(NOT_CONVERTED)
    terms: list[Tensor] = []
    small: dict[Any, list[VariationalLayer]] = defaultdict(list)
    room = SMALL
    for layer, *others in tied.values():
        if others and layer.mask is not None:
            masks = [each.mask for each in (layer, *others)]
            left = None if any(mask is None for mask in masks) else torch.stack(masks).any(0)  # type: ignore[arg-type]
            terms.append(layer.kl_of(left))
        elif layer.apart and layer.weight.numel() <= room and type(layer).kl is VariationalLayer.kl:
            small[layer.weight.device, layer.weight.dtype].append(layer)
            room -= layer.weight.numel()
        else:
            terms.append(layer.kl())
    for ones in small.values():
        terms.append(kl_apart([layer.weight for layer in ones], [layer.log_sigma2 for layer in ones]))
    return terms[0] if len(terms) == 1 else torch.stack([term.to(terms[0].device) for term in terms]).sum()


def _posterior_of(layer: VariationalLayer) -> tuple[int, ...]:
    """What layers of one posterior have in common: their weight and their variances. A weight that a parametrization computes
    at each access is a new tensor each time, and does not count."""
    variances = tuple(map(id, layer.variance_parameters().values()))
    weight = layer._parameters.get("weight")
    return (id(weight), *variances) if weight is not None else (variances or (id(layer),))


@torch.no_grad()
def sums(nll: Callable[..., Any], value: float, *args: Any, **kwargs: Any) -> str | None:
    """What is wrong with a loss that sums over the batch, whose value doubles if the batch is repeated; None for other losses.

    value: the loss of the arguments. Random states, and running statistics of the loss, are not changed.
    """
    twice: Any = lambda leaf: torch.cat([leaf.detach()] * 2)  # noqa: E731
    repeat = partial(tree_map_only, Tensor, twice)
    places = [leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_cuda]
    with _buffers_kept([nll] if isinstance(nll, nn.Module) else []), torch.random.fork_rng(devices=places):
        try:
            doubled = float(nll(*repeat(args), **repeat(kwargs)))
        except Exception:  # a loss for a single batch size cannot be checked
            return None
    if not value or not math.isclose(doubled, 2 * value, rel_tol=1e-3):
        return None
    return (
        f"it sums over the batch ({value:.4g}, and {doubled:.4g} for the batch repeated); it must average, as with "
        "reduction='mean': otherwise the KL counts too little by a factor of the batch size, and almost nothing is pruned"
    )


class ELBO(nn.Module):
    """The negative evidence lower bound per example: `nll + beta * KL / N`, to be minimized.

    model: the converted model whose KL is taken.
    nll: a loss that averages over the batch (mean negative log likelihood), called with the arguments of `forward`. One that
        sums (`reduction="sum"`, or whose value doubles when the first batch is repeated) is refused: it would weight the data
        too much by a factor of the batch size, so that almost nothing is pruned.
    num_examples: N, the number of training examples (not of batches).
    schedule: beta by epoch, or a constant.

    Raises UsageError for invalid arguments and, at the first call, for a loss that is not one number, or a model with no
    variational layers or divided ones (FSDP). The first call warns of log variances in half precision, which cannot be trained.

    After each call `last_nll` and `last_kl` hold the detached terms.

    Example:
        >>> elbo = svdc.ELBO(svdc.convert(model), torch.nn.CrossEntropyLoss(), num_examples=60_000)
        >>> elbo(model(x), y).backward()
    """

    model: nn.Module

    def __init__(
        self, model: nn.Module, nll: Callable[..., Tensor], num_examples: int, schedule: Schedule | float = 1.0
    ) -> None:
        super().__init__()
        count = _real(num_examples)
        if count is None or not 1 <= count < math.inf:
            raise UsageError(f"num_examples: {num_examples!r} is not a number of training examples")
        if getattr(nll, "reduction", "mean") == "sum":
            raise UsageError("nll: it sums; it must average over the batch: reduction='mean'")
        # Not a submodule: the model's parameters are not this module's.
        object.__setattr__(self, "model", model)
        self.nll = nll
        self.num_examples = num_examples
        self.schedule = _as_schedule(schedule)
        self.beta = self.schedule(0)
        self.divergence: Callable[[nn.Module], Tensor] = kl_divergence  # or its compiled version
        self.last_nll: Tensor | None = None
        self.last_kl: Tensor | None = None
        self._checked = False  # whether nll was found to average, or cannot be checked
        self._heard = False
        self._found = self.schedule == Constant(0.0)  # whether the model was found to have a KL, or needs none
        # Examples seen before `set_epoch` was first called; None: no call is needed any more.
        self._waiting = None if isinstance(self.schedule, Constant) else 0

    def set_epoch(self, epoch: float) -> float:
        """Set beta to the schedule's value at an epoch (counted from 0; fractions allowed); returns it."""
        self.beta = self.schedule(epoch)
        self._waiting = None
        return self.beta

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a batch; the arguments go to `nll`, as in `elbo(model(x), y)`."""
        nll = self.nll(*args, **kwargs)
        if not isinstance(nll, Tensor):
            raise UsageError(
                f"nll: returned {type(nll).__name__}; it must return a tensor of one number, the mean over the batch"
            )
        if nll.dim():
            raise UsageError(f"nll: returned shape {tuple(nll.shape)}; it must average over the batch and return one number")
        if not self._checked and not torch.compiler.is_compiling():
            self._check_average(nll, args, kwargs)
        if not self._heard and nll.requires_grad and not torch.compiler.is_compiling():
            check_whole(self.model)
            self._heard = True
            warn_of_half_precision(list(variational_layers(self.model)), stacklevel=5)
            self._tell_unheard(nll)
        if self._waiting is not None and nll.requires_grad and not torch.compiler.is_compiling():
            self._tell_waiting((args, kwargs))
        if self.beta == 0:
            if not self._found and not torch.compiler.is_compiling():
                self._find_layers()
            self.last_nll, self.last_kl = nll.detach(), None
            return nll
        kl = self.divergence(self.model)
        self.last_nll, self.last_kl = nll.detach(), kl.detach()
        return nll + (self.beta / self.num_examples) * kl.to(nll.device)

    def _find_layers(self) -> None:
        """Raise UsageError for a model without variational layers at once, and not only when beta begins to rise."""
        self._found = True
        if not any(True for _ in variational_layers(self.model)):
            raise UsageError(NOT_CONVERTED)

    @torch.no_grad()
    def _check_average(self, nll: Tensor, args: tuple, kwargs: dict[str, Any]) -> None:
        """Raise UsageError if the loss of a batch doubles when the batch is repeated: it sums."""
        self._checked = True
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        lengths = {leaf.shape[0] if leaf.dim() else None for leaf in tensors}
        if len(lengths) != 1 or None in lengths:
            return  # there is no batch that could be repeated
        value = float(nll)
        if value == 0 or not math.isfinite(value):
            self._checked = False  # its double says nothing; the next batch may
            return
        with _buffers_kept([self.model] if isinstance(self.model, nn.Module) else []):
            if why := sums(self.nll, value, *args, **kwargs):
                raise UsageError(f"nll: {why}")

    def _tell_waiting(self, batch: Any) -> None:
        """Warn once if the schedule has no effect: all examples were seen, and `set_epoch` was never called."""
        assert self._waiting is not None
        self._waiting += min(
            (leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), default=1
        )
        if self._waiting > self.num_examples:
            self._waiting = None
            otherwise = "stays at that weight" if self.beta else "never counts and nothing is pruned"
            warnings.warn(
                f"beta is still {self.beta:g}, the start of its schedule, after a pass over all examples: call "
                f"elbo.set_epoch(epoch) in each epoch; without it the KL {otherwise}",
                stacklevel=5,
            )

    def _tell_unheard(self, nll: Tensor) -> None:
        """Warn of a loss of another model, and of layers for which the loss depends on the weight but not on its variances:
        other code reads the weight past the layer."""
        found = _leaves(nll)
        heard = {id(leaf) for leaf in found}
        own = {id(parameter) for parameter in self.model.parameters()}
        trained = any(layer.weight.requires_grad for _, layer in variational_layers(self.model))
        if trained and own.isdisjoint(heard) and any(isinstance(leaf, nn.Parameter) for leaf in found):
            warnings.warn(
                "the loss depends on parameters, but on none of ELBO's model: its KL has no effect on what is trained. Was "
                "the model copied, averaged or pruned meanwhile? Create svdcompress.ELBO with the model that is trained",
                stacklevel=5,
            )
        names = [
            name
            for name, layer in variational_layers(self.model)
            if layer.draws
            and id(layer.weight) in heard
            and all(own.requires_grad and id(own) not in heard for own in layer.variance_parameters().values())
        ]
        if names:
            warnings.warn(
                f"weights are read directly, bypassing the noise and masks of their layers: {', '.join(names[:6])}"
                f"{' ...' if len(names) > 6 else ''}. {PAST_CURE}",
                stacklevel=4,
            )


@contextmanager
def _buffers_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore buffers, such as running statistics, afterwards."""
    buffers = [(part, dict(part._buffers)) for module in modules for part in module.modules()]
    values = [(buffer, buffer.clone()) for _, own in buffers for buffer in own.values() if buffer is not None]
    try:
        yield
    finally:
        for part, own in buffers:
            part._buffers.update(own)
        for buffer, value in values:
            with suppress(RuntimeError):  # an expanded tensor cannot be written to, nor was it
                buffer.data.copy_(value)  # bypasses autograd: a backward pass may still need this tensor


def _leaves(tensor: Tensor) -> list[Tensor]:
    """The parameters that a result depends on."""
    found, seen, open_nodes = [], set(), [tensor.grad_fn]
    while open_nodes:
        node: Any = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        open_nodes += [following for following, _ in node.next_functions]
    return found
