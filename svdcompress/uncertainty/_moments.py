"""Propagates mean and variance through a network in one pass: `mc_predict(..., method="moments")`.

A value is either exact (a tensor) or has a mean and a variance for each number, taken as independent normal variables (Frey &
Hinton 1999; Gast & Roth 2018). Linear maps, average pooling, norms, reshaping and dropout are exact under that independence;
ReLU is exact for a normal variable; maximum pooling takes maxima of pairs (Clark 1961), each treated as normal again. The
approximation leaves out the correlation between units.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from svdcompress.batch import main_output
from svdcompress.errors import DataError, ModelError, SvdcError, out_of_memory
from svdcompress.layers import BernoulliDropout, GaussianDropout, StochasticLayer, VariationalLayer
from svdcompress.likelihoods import Prediction, Sums
from svdcompress.uncertainty._inputs import check_rows
from svdcompress.uncertainty._rules import FUNCTIONS, MODULES, Moments, dropout, unknown, variational

DRAWS = 2**22
"""Most numbers drawn at once when logits are sampled."""


def moments_predict(
    model: nn.Module, slices: Iterable[tuple[Any, int, int]], sums: Sums, samples: int, generator: torch.Generator
) -> Prediction:
    """The prediction from one pass over all inputs.

    slices: parts of the inputs, each with the index of its first input and its size. sums: those of the task.

    The mean probabilities of normal logits have no closed form; they are computed from `samples` draws of the logits, at
    almost no cost compared with a pass of the network.
    """
    follow = None
    for x, start, size in slices:
        follow = follow or traced(model, x)
        _add(sums, propagate(follow, x), start, size, samples, generator)
    return sums.prediction(1 if sums.follows_moments else samples)


def _add(sums: Sums, output: Any, start: int, size: int, samples: int, generator: torch.Generator) -> None:
    mean, variance = _heads(sums, output)
    check_rows(mean, size)
    if sums.follows_moments:
        mean, variance = (tree_map(lambda head: head[None], part) for part in (mean, variance))
        sums.add_moments(mean, variance, start)
        return
    std = tree_map(lambda head: head.clamp_min(0).sqrt(), variance)
    at_once = max(1, DRAWS // max(head.numel() for head in tree_leaves(std)))
    for done in range(0, samples, at_once):
        count = min(at_once, samples - done)

        def draws(centre: Tensor, spread: Tensor, count: int = count) -> Tensor:
            shape = (count, *spread.shape)
            return centre + spread * torch.randn(shape, dtype=spread.dtype, device=spread.device, generator=generator)

        sums.add(tree_map(draws, mean, std), start)


def _heads(sums: Sums, output: Any) -> tuple[Any, Any]:
    """Means and variances of the heads: of a tuple of outputs, or else of the main output."""
    leaves = tree_leaves(output, is_leaf=_is_moments)
    if not isinstance(output, tuple | list) or not all(isinstance(leaf, Moments | Tensor) for leaf in leaves):
        output = _main(output)
    means = tree_map(lambda leaf: _moments(leaf).mean, output, is_leaf=_is_moments)
    variances = tree_map(lambda leaf: _moments(leaf).variance, output, is_leaf=_is_moments)
    return sums.likelihood.heads(means), sums.likelihood.head_variances(variances)


def _moments(leaf: Any) -> Moments:
    return leaf if isinstance(leaf, Moments) else Moments(leaf, torch.zeros_like(leaf))


def _main(output: Any) -> Moments:
    """The main output, as `main_output` chooses it among tensors."""
    leaves = tree_leaves(output, is_leaf=_is_moments)
    means = tree_map(lambda leaf: leaf.mean if isinstance(leaf, Moments) else leaf, output, is_leaf=_is_moments)
    chosen = main_output(means)
    return next(_moments(leaf) for leaf in leaves if (leaf.mean if isinstance(leaf, Moments) else leaf) is chosen)


def _is_moments(leaf: Any) -> bool:
    return isinstance(leaf, Moments)


def traced(model: nn.Module, x: Any) -> _Follow:
    """The model's graph, with the defaults of arguments that the call leaves out. Raises ModelError if it cannot be traced."""
    parameters = inspect.signature(model.forward).parameters
    if isinstance(model, StochasticLayer):  # fx traces into the outermost module, whatever it is
        alone = fx.Graph()
        alone.output(alone.call_module("0", (alone.placeholder(next(iter(parameters))),)))
        return _Follow(fx.GraphModule(nn.Sequential(model), alone, type(model).__name__))
    given = set(x) if isinstance(x, Mapping) else set(list(parameters)[: len(x) if isinstance(x, tuple | list) else 1])
    plain = (bool, int, float, str, type(None))
    left_out = {name: p.default for name, p in parameters.items() if name not in given and isinstance(p.default, plain)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fx warns that the defaults are fixed, which is intended
            with _tracing:
                graph = _Tracer().trace(model, concrete_args=left_out or None)
    except Exception as error:  # fx raises many kinds of errors
        raise ModelError(f"method 'moments' cannot follow {type(model).__name__}: {error}; use method='sampling'") from error
    return _Follow(fx.GraphModule(model, graph, type(model).__name__))


def propagate(follow: _Follow, x: Any) -> Any:
    """The output as Moments (or as a tensor, if no noise reaches it), in the structure that the model returns.

    Raises ModelError for an operation that noise cannot be propagated through, DataError for inputs that do not fit.
    """
    try:
        return follow.follow(x)
    except SvdcError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if out_of_memory(error):
            raise
        text = str(error).partition("\n\nWhile executing")[0]
        raise DataError(f"x does not fit {type(follow.module).__name__}: {text}") from error


_tracing = threading.Lock()


class _Tracer(fx.Tracer):
    """Traces stochastic layers, and those of torch.nn, as single steps.

    fx patches nn.Module while it traces. Calls that other threads make in the meantime pass through unchanged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()

    def call_module(self, m: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> Any:
        if threading.get_ident() != self.thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self.thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, StochasticLayer) or super().is_leaf_module(m, module_qualified_name)


class _Follow(fx.Interpreter):
    """Runs the graph on Moments; operations that no noise has reached run as usual."""

    def follow(self, x: Any) -> Any:
        module: Any = self.module
        nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
        if isinstance(x, Mapping):
            given = dict(x)
        else:
            given = dict(zip([node.target for node in nodes], x if isinstance(x, tuple | list) else (x,), strict=False))
        # For an argument that the call leaves out, the placeholder's own argument is the default.
        return self.run(*[given[node.target] if node.target in given else (*node.args, None)[0] for node in nodes])

    def call_module(self, target: str, args: tuple, kwargs: dict) -> Any:
        module: Any = self.fetch_attr(target)
        if any(isinstance(arg, Moments) for arg in kwargs.values()):  # the rules take noisy arguments by position
            args, kwargs = (*args, *kwargs.values()), {}
        noisy = any(isinstance(arg, Moments) for arg in args)
        if isinstance(module, VariationalLayer):
            return variational(module, *args, *kwargs.values())
        if isinstance(module, BernoulliDropout | GaussianDropout) and module.p > 0:
            return dropout(module, *args, *kwargs.values())
        if not noisy:
            return module(*args, **kwargs)
        rule = next((MODULES[kind] for kind in type(module).__mro__ if kind in MODULES), None)
        if rule is None:
            raise unknown(f"{type(module).__name__} ({target})")
        return rule(module, args[0])

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        return self._call(target, getattr(target, "__name__", str(target)), args, kwargs)

    def call_method(self, target: str, args: tuple, kwargs: dict) -> Any:
        return self._call(lambda x, *rest, **named: getattr(x, target)(*rest, **named), target, args, kwargs)

    def _call(self, function: Callable, name: str, args: tuple, kwargs: dict) -> Any:
        noisy = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Moments)]
        if not noisy:
            return function(*args, **kwargs)
        if name == "getattr":
            return getattr(noisy[0].mean, args[1])
        rule = FUNCTIONS.get(name.rstrip("_") if name != "getitem" else name)
        if rule is None or (not isinstance(args[0], Moments) and name not in ("add", "mul", "sub")):
            raise unknown(name)
        return rule(*args, **kwargs)
