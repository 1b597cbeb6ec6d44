"""Two passes over a model: the first notes each layer's outputs before the cut, the second fits the weights after it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from svdcompress.batch import call, first_tensor, unwrapped
from svdcompress.convert import as_it_was
from svdcompress.errors import UsageError
from svdcompress.hooks import hooked
from svdcompress.layers import variational_layers
from svdcompress.reconstruction._layer import ROWS, LayerError, Target, input_of, refit, rows_of, unfit
from svdcompress.relevance import as_masks, hold


@dataclass(frozen=True, repr=False)
class Reconstruction:
    """What `reconstruct` did. layers: the fitted ones, in the order in which they run. left: {name: why it was not fitted}."""

    layers: list[LayerError] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)

    @property
    def before(self) -> float:
        """Mean error over the layers before the fit."""
        return sum(layer.before for layer in self.layers) / max(len(self.layers), 1)

    @property
    def after(self) -> float:
        """Mean error over the layers after the fit."""
        return sum(layer.after for layer in self.layers) / max(len(self.layers), 1)

    def to_dict(self) -> dict[str, Any]:
        """Number of layers, mean errors and `left`, serializable as JSON."""
        return {"layers": len(self.layers), "before": self.before, "after": self.after, "left": dict(self.left)}

    def __repr__(self) -> str:
        left = f", {len(self.left)} left as they were" if self.left else ""
        return f"Reconstruction({len(self.layers)} layers, error of their outputs {self.before:.3g} -> {self.after:.3g}{left})"


@torch.no_grad()
def reconstruct(
    model: nn.Module,
    inputs: Any,
    masks: Mapping[str, Tensor],
    *,
    before: Mapping[str, Tensor] | None = None,
    rows: int = ROWS,
    seed: int = 0,
) -> Reconstruction:
    """Fit the remaining means, in place, so that each layer's outputs under `masks` stay close to those before the cut.

    Layers are fitted in the order in which they run, by `min |Y - X W'|^2 + ridge |W' - W|^2` over positions of the examples:
    Y are the layer's outputs before the cut, X its inputs after the cut, computed by layers that are already refitted (He et
    al. 2017, arXiv 1707.06168, section 3.1, for given channels). For a Gaussian posterior with the curvature of that error,
    the solution is the mean given that the removed weights are 0, the "optimal brain surgeon" (Hassibi & Stork 1992, eq. 5),
    here for whole units and with the ridge in place of a prior around W. The ridge, and whether a layer changes at all, are
    chosen on the positions of a random fifth of the examples. Biases are fitted too; variances and masks are not changed. A
    layer without any weights left gives its former mean: by its bias, or by that of the batch normalization after it, whose
    running mean becomes what the layer gives now.

    It takes two forward passes. Layers are left alone, and named in the result, if their masks are not of whole units, or if
    they are frozen, run several times or not at all, share their weight, or are transposed convolutions.

    model: converted; in `eval()` meanwhile, and only its weights and biases change.
    inputs: one batch of examples, a few hundred or more, without targets.
    masks: which weights are kept after the cut.
    before: the same before the cut (None: what the model computes with in `eval()`).
    rows: positions of the examples, drawn with `seed`, that a layer of up to 512 inputs (times kernel positions) is fitted to;
        a wider one is fitted to more.

    Raises UsageError if the inputs or outputs of a layer are not finite, PruneError for masks of another model.

    Example:
        >>> from svdcompress.selection import ranked, whole_units
        >>> masks = whole_units(model, ranked(svdc.convert(model), x, goal={"macs": 0.5}))
        >>> found = svdc.reconstruct(model, x, masks)
        >>> small = svdc.prune(model, x, masks=masks)
    """
    model = unwrapped(model)
    masks = as_masks(model, masks)
    layers = dict(variational_layers(model))
    shared, left = _shared(model), {}
    for name, layer in layers.items():
        if why := "it shares its weight" if shared & {id(layer.weight), id(layer.bias)} else unfit(layer, masks[name]):
            left[name] = why
    silent = {name: layer for name, layer in layers.items() if name not in left and not masks[name].any()}
    able = {name: layer for name, layer in layers.items() if name not in left and name not in silent}
    counts = rows_of(able, rows)
    with as_it_was(model, False), _put_back(model, after_errors_alone=True):  # masks are buffers
        if before is not None:
            hold(model, before)
        targets = _Targets(counts, seed, len(first_tensor(inputs)))
        means: dict[str, list[Tensor]] = {}
        watched = [(layer, targets.note(name)) for name, layer in able.items()]
        watched += [(layer, _mean_into(means, name)) for name, layer in silent.items()]
        with hooked(layer.register_forward_hook(hook, with_kwargs=True) for layer, hook in watched):
            call(model, inputs)
        for name in able:
            if (runs := targets.runs.get(name, 0)) != 1:
                left[name] = "it runs several times" if runs else "it doesn't run itself"
        hold(model, masks)
        made_up = set()
        for name, mean in means.items():
            bias = silent[name].bias
            if bias is not None and bias.requires_grad:
                bias.copy_(torch.stack(mean).mean(0))
                made_up.add(name)
        found: list[LayerError] = []

        def refitting(name: str) -> Any:
            def hook(layer: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
                target = targets.rows.pop(name, None)
                if target is None:
                    left[name] = "it runs several times after the cut"
                elif isinstance(made := refit(name, layer, target, (given, named)), str):
                    left[name] = made
                else:
                    found.append(made)

            return hook

        ready = [name for name in targets.rows if name not in left]
        refits = (able[name].register_forward_pre_hook(refitting(name), with_kwargs=True) for name in ready)
        with hooked(refits), hooked(_centring(model, silent, made_up)):
            call(model, inputs)
    left |= {name: "it doesn't run after the cut" for name in ready if name in targets.rows}
    left |= {name: "none of its weights are left, and it has no bias that learns" for name in silent if name not in made_up}
    return Reconstruction(found, left)


def fits_any(model: nn.Module) -> bool:
    """Whether the model has a layer that `reconstruct` can fit under some masks."""
    shared = _shared(model)
    return any(
        unfit(layer, torch.ones_like(layer.weight, dtype=torch.bool)) is None
        and not shared & {id(layer.weight), id(layer.bias)}
        for _, layer in variational_layers(model)
    )


@contextmanager
def reconstructed(
    model: nn.Module,
    inputs: Any,
    masks: Mapping[str, Tensor],
    *,
    before: Mapping[str, Tensor] | None = None,
    rows: int = ROWS,
) -> Iterator[Reconstruction]:
    """Give the model the means of `reconstruct` and these masks, in `eval()`; it is restored afterwards."""
    with as_it_was(model, False), _put_back(model):
        found = reconstruct(model, inputs, masks, before=before, rows=rows)
        hold(model, masks)
        yield found


# The two passes


def _shared(model: nn.Module) -> set[int]:
    """Ids of the parameters that several modules hold."""
    found = Counter(id(own) for module in model.modules() for own in module._parameters.values() if own is not None)
    return {one for one, count in found.items() if count > 1}


def _mean_into(means: dict[str, list[Tensor]], name: str) -> Any:
    """A hook that notes the mean of each of a layer's outputs, in each call."""

    def hook(layer: Any, given: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> None:
        x, given, named = input_of(given, named)
        mean = layer.rows(output, x, *given, **named).float().mean(0)
        if not mean.isfinite().all():
            raise UsageError(f"inputs: the outputs of layer {name!r} are not finite; look for NaN in inputs and weights")
        means.setdefault(name, []).append(mean)

    return hook


def _centring(model: nn.Module, silent: Mapping[str, nn.Module], made_up: set[str]) -> Iterator[RemovableHandle]:
    """Register hooks by which a normalization of a silent layer's outputs takes these constants for the mean, so that it gives
    the mean of its own former outputs. The names of these layers are added to `made_up`."""
    given: list[tuple[str, Tensor]] = []

    def note(name: str) -> Any:
        return lambda layer, args, named, output: given.append((name, output))

    def hook(norm: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        x = args[0] if args else next(iter(named.values()))
        for name in (name for name, output in given if output is x):
            norm.running_mean.copy_(x.transpose(0, 1).flatten(1).mean(1))
            made_up.add(name)

    for name, layer in silent.items():
        if name not in made_up:
            yield layer.register_forward_hook(note(name), with_kwargs=True)
    for norm in _norms(model) if silent else ():
        yield norm.register_forward_pre_hook(hook, with_kwargs=True)


def _norms(model: nn.Module) -> Iterator[Any]:
    """The normalization layers with running statistics."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            yield module


class _Targets:
    """Collects some rows of each layer's outputs. runs: how often each layer ran.

    Rows are in a random order of the examples, as the last ones are held out: data are often sorted by class, and what a layer
    may change must not be judged on classes that it was not fitted to.
    """

    def __init__(self, counts: Mapping[str, int], seed: int, examples: int) -> None:
        self.counts, self.generator = counts, torch.Generator().manual_seed(seed)
        self.order = torch.randperm(examples, generator=torch.Generator().manual_seed(seed))
        self.rows: dict[str, Target] = {}
        self.runs: Counter[str] = Counter()

    def note(self, name: str) -> Any:
        """A hook that keeps random rows of a layer's outputs and their indices, those of an example together."""

        def hook(layer: Any, given: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> None:
            self.runs[name] += 1
            x, given, named = input_of(given, named)
            rows = layer.rows(output, x, *given, **named)
            if self.runs[name] == 1 and len(rows):
                at = torch.randperm(len(rows), generator=self.generator)[: self.counts[name]].sort().values
                at = at[self.order[_examples(at, output, len(rows), len(self.order))].argsort(stable=True)].to(rows.device)
                self.rows[name] = Target(at, rows[at], x.shape)

        return hook


def _examples(at: Tensor, output: Tensor, rows: int, examples: int) -> Tensor:
    """The examples that rows `at` of an output belong to. Rows go by example, but for a sequence that comes first, as in
    (steps, examples, features), where they go by step."""
    if output.dim() > 2 and output.shape[0] != examples == output.shape[1]:
        return at // math.prod(output.shape[2:-1]) % examples
    return at * examples // rows


@contextmanager
def _put_back(model: nn.Module, *, after_errors_alone: bool = False) -> Iterator[None]:
    """Restore the weights and biases of the layers, and the means of norms, afterwards, or only after errors."""
    own = {id(each): each for _, layer in variational_layers(model) for each in (layer.weight, layer.bias) if each is not None}
    own |= {id(norm.running_mean): norm.running_mean for norm in _norms(model)}
    kept = {key: tensor.detach().clone() for key, tensor in own.items()}
    done = False
    try:
        yield
        done = True
    finally:
        if not (done and after_errors_alone):
            with torch.no_grad():
                for key, tensor in own.items():
                    tensor.copy_(kept[key])
