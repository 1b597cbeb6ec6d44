"""A model whose noise is an input: the stochastic layers read it from a source, in the order in which they are called.

The noise of one draw is one vector of standard normal numbers, with the parts for all calls one after the other: noise for a
layer's output, flattened, or for a parameter that is drawn whole. Dropout uses the same kind of noise: a unit is kept where
its number is below the normal quantile of the rate at which units are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from svdcompress.errors import ExportError
from svdcompress.export._posterior import DrawnWhole, Posterior, posteriors
from svdcompress.layers import Sampler, StochasticLayer, VariationalLayer, Weights, moments


@dataclass(frozen=True)
class Call:
    """One request for noise in a pass: for one call of a layer, or for a parameter that is drawn whole.

    layer: its name. of: what is drawn, "output", "weight" or "bias". shape: of the noise, with None for the batch. per_row,
    fixed: how many numbers it takes per batch row, and apart from these. posterior: of the parameter (None for "output").
    """

    layer: str
    of: str
    shape: tuple[int | None, ...]
    per_row: int
    fixed: int
    posterior: Posterior | None

    def size(self, batch: Any) -> Any:
        """How many numbers of noise it takes at a batch size (an int, or symbolic)."""
        return self.per_row * batch + self.fixed

    def to_dict(self) -> dict[str, Any]:
        """As a dict, for the metadata. "kept": only relevant weights are drawn, in the weight's order."""
        kept = {"kept": True} if self.posterior is not None and self.posterior.mask is not None else {}
        return {"layer": self.layer, "shape": list(self.shape), "of": self.of, **kept}


Asked = tuple[str, str, tuple[int, ...], Posterior | None]
"""`layer`, `of`, shape of the noise, and `posterior`, as in `Call`."""


class Source:
    """The source from which the layers of one copy of a model get their noise.

    placed: drawn parameters are given, instead of noise for them.
    """

    def __init__(self, placed: bool = False) -> None:
        self.placed = placed
        self.record: list[Asked] = []
        self._chunks: Iterator[Tensor] | None = None
        self._drawn: dict[Posterior, Tensor] = {}

    def give(self, chunks: Sequence[Tensor]) -> None:
        """Set the noise of the next forward pass, a vector for each call; if `placed`, the drawn parameters themselves."""
        self._chunks, self._drawn = iter(chunks), {}

    def listen(self) -> None:
        """Record the requests of the next forward pass, which gets zeros as noise."""
        self._chunks, self._drawn, self.record = None, {}, []

    def take(self, layer: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """Noise of a given shape for a layer; until noise is given, zeros, and the request is recorded."""
        return self._next((layer, "output", tuple(shape), None), like).reshape(shape)

    def parameter(self, posterior: Posterior) -> Tensor:
        """A draw of a parameter, the same for all requests in a pass."""
        if posterior not in self._drawn:
            chunk = self._next((posterior.layer, posterior.of, posterior.noise_shape, posterior), posterior.mean)
            placed = self.placed and self._chunks is not None
            self._drawn[posterior] = chunk if placed else posterior.at(chunk)
        return self._drawn[posterior]

    def _next(self, asked: Asked, like: Tensor) -> Tensor:
        if self._chunks is None:
            self.record.append(asked)
            return torch.zeros(asked[2], dtype=like.dtype)
        return next(self._chunks)


class _FromSource(Sampler):
    """A sampler that makes a layer's own forward pass read its noise from the source."""

    def __init__(self, source: Source, layer: str) -> None:
        super().__init__()
        self.source, self.layer = source, layer

    def normal(self, like: Tensor) -> Tensor:
        return self.source.take(self.layer, like.shape, like)

    def bernoulli(self, shape: Sequence[int], rate: float, like: Tensor) -> Tensor:
        return (self.source.take(self.layer, shape, like) < NormalDist().inv_cdf(rate)).to(like.dtype)


def active_layers(model: nn.Module) -> list[str]:
    """Names of the layers that draw in `eval()`: dropout at a rate above 0, variational layers with any variance left.

    Raises ExportError if there are none.
    """
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, StochasticLayer)]
    active = [name for name, layer in layers if _is_active(layer)]
    if active:
        return active
    if layers:
        raise ExportError(
            f"monte_carlo: no weight of {type(model).__name__}'s variational layers is relevant (or its dropout rates are 0): "
            "there is no uncertainty to sample; export without monte_carlo"
        )
    raise ExportError(
        f"monte_carlo: {type(model).__name__} has no variational layer and no MC dropout, so there is no uncertainty to "
        "sample; call convert (or convert_dropout) first, or export a deterministic file without monte_carlo"
    )


def _is_active(layer: StochasticLayer) -> bool:
    if isinstance(layer, VariationalLayer):
        return bool(layer.relevant().any()) or (layer.bias_sigma2 is not None and bool(layer.bias_sigma2.any()))
    return getattr(layer, "p", 1) > 0


def listen(model: nn.Module, active: Sequence[str], whole: Sequence[str]) -> Source:
    """Make the active layers of a copy draw from a source; the file is compared with this copy.

    whole: names of the layers whose weights are drawn; the others have noise on their output, in their own forward pass.
    """
    source = Source()
    drawn = posteriors([(name, _variational(model, name)) for name in active if name in whole])
    for name in active:
        layer: Any = model.get_submodule(name)
        if name in drawn:
            layer.forward = _from_draws(layer, drawn[name], source)
        else:
            layer.sampler = _FromSource(source, name)
    return source


def freeze(model: nn.Module, active: Sequence[str] = (), whole: Sequence[str] = ()) -> Source:
    """As `listen`, for the copy to be traced: masks and variances are computed here and not in the graph."""
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, VariationalLayer)]
    # all masks before any change: layers may share a weight, but keep different parts of it
    masks = [layer.relevant() for _, layer in layers]
    source = listen(model, active, whole)
    source.placed = True
    for (name, layer), mask in zip(layers, masks, strict=True):
        if name not in active or name not in whole:
            layer.forward = _frozen(layer, mask, name in active)
    return source


def _variational(model: nn.Module, name: str) -> VariationalLayer:
    layer = model.get_submodule(name)
    assert isinstance(layer, VariationalLayer)
    return layer


def _from_draws(layer: VariationalLayer, drawn: DrawnWhole, source: Source) -> Callable[..., Tensor]:
    """The forward pass of a layer, with the weights that a source draws."""

    def forward(x: Tensor, *args: Any) -> Tensor:
        weight = source.parameter(drawn.weight)
        weight = weight if drawn.part is None else weight * drawn.part
        bias = layer.bias if drawn.bias is None else source.parameter(drawn.bias)
        return layer._transform(x, weight, bias, *args)

    return forward


@torch.no_grad()
def _frozen(layer: VariationalLayer, mask: Tensor, active: bool) -> Callable[..., Tensor]:
    """The forward pass of a layer in `eval()` as plain linear maps, with noise on its output if it is active."""
    layer.weight = nn.Parameter(layer.weight * mask, requires_grad=False)
    sigma2 = layer.posterior.spread(layer, mask)
    leaves, form = tree_flatten(layer.log_sigma2.exp() * mask if sigma2 is None else sigma2)
    for i, leaf in enumerate(leaves):
        layer.register_buffer(f"sigma2_{i}", leaf, persistent=False)

    def forward(x: Tensor, *args: Any) -> Tensor:
        def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return layer._transform(x, weight, bias, *args)

        if not active:
            return linear(x, layer.weight, layer.bias)
        sigma2 = tree_unflatten([getattr(layer, f"sigma2_{i}") for i in range(len(leaves))], form)
        mean, variance = moments(linear, x, Weights(layer.weight, sigma2, layer.bias, layer.bias_sigma2))
        if not isinstance(layer, nn.Linear):  # fast convolutions may give values below 0; a sum of products of squares does not
            variance = variance.clamp_min(0)
        sampler: Any = layer.sampler
        return mean + variance.sqrt() * sampler.normal(mean)

    return forward


def calls(source: Source, run: Callable[[int], Any], batches: tuple[int, int]) -> list[Call]:
    """The requests for noise in a pass, from runs at two batch sizes. run: the forward pass at a batch size.

    Raises ExportError if the calls depend on the batch size in more than the sizes of their noise.
    """
    records = []
    for batch in batches:
        source.listen()
        run(batch)
        records.append(source.record)
    first, second = records
    if [asked[:2] for asked in first] != [asked[:2] for asked in second]:
        raise ExportError("monte_carlo: which stochastic layers are called depends on the batch size")
    return [_call(asked, other[2], *batches) for asked, other in zip(first, second, strict=True)]


def same_noise(source: Source, run: Callable[[int], Any], batch: int, known: Sequence[Call]) -> None:
    """Check that a pass with other sizes of the open dimensions asks for the same noise.

    Raises ExportError if it does not: the noise of a call would have no fixed size for a row.
    """
    source.listen()
    run(batch)
    asked = [(layer, torch.Size(shape).numel()) for layer, _, shape, _ in source.record]
    expected = [(call.layer, call.size(batch)) for call in known]
    if asked != expected:
        changed = next(((one or other)[0] for one, other in zip_longest(asked, expected) if one != other))
        raise ExportError(
            f"monte_carlo: how much noise {changed!r} takes depends on the sizes in dynamic_axes, which a file cannot hold: "
            "dropout at each position, or a layer that the example leaves a single position (give a larger one). Leave these "
            "dimensions out"
        )


def _call(asked: Asked, other: tuple[int, ...], batch: int, more: int) -> Call:
    layer, of, shape, posterior = asked
    numbers, grown = torch.Size(shape).numel(), torch.Size(other).numel()
    per_row, rest = divmod(grown - numbers, more - batch)
    if rest or len(shape) != len(other):
        raise ExportError(f"monte_carlo: the noise of {layer!r} does not grow in proportion to the batch: {shape} and {other}")
    dims = tuple(a if a == b else None for a, b in zip(shape, other, strict=True))
    return Call(layer, of, dims, per_row, numbers - per_row * batch, posterior)
