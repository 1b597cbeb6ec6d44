"""Reasons why a file cannot be loaded onto a model, found before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.errors import ModelError
from svdcompress.layers import (
    DROPOUT_CLASSES,
    VARIATIONAL_CLASSES,
    BernoulliDropout,
    GaussianDropout,
    Posterior,
    VariationalLayer,
    check_posterior,
    check_prior,
    check_variance_dtype,
    class_name,
    known_class,
    parse_share,
    parse_threshold,
    register_loaded,
    variational_class,
)
from svdcompress.sources import FLOATS, finite_as

OPTIONAL = ("mask", "bias_sigma2")
"""Buffers that a variational layer may lack."""

_FOLLOWS = {"log_sigma2": "weight", "mask": "weight", "bias_sigma2": "bias"}
"""Tensors that only a variational layer has, each with the tensor of the dense layer whose shape it has."""


def problems(model: nn.Module, manifest: dict[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield every reason against loading a file's tensors onto the model, which is not changed."""
    register_loaded()
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, layer in manifest["layers"].items():
        yield from _layer_problem(name, layer, modules)
    for name, module in model.named_modules():
        if isinstance(module, VariationalLayer) and name not in manifest["layers"]:
            yield f"{name}: variational in the model, dense in the file"
        elif isinstance(module, BernoulliDropout | GaussianDropout) and name not in manifest["dropout"]:
            yield f"{name}: {type(module).__name__} in the model, which draws in predictions too; none in the file"
    for name in manifest["dropout"]:
        if not isinstance(modules.get(name), (*DROPOUT_CLASSES, BernoulliDropout, GaussianDropout)):
            yield f"{name}: no dropout layer in the model"
    shapes = manifest["surgery"].get("shapes", {})
    for name, attributes in manifest["surgery"].get("attributes", {}).items():
        if name not in modules or any(not hasattr(modules[name], key) for key in attributes):
            yield f"{name or 'the model'}: lacks one of the attributes {sorted(attributes)}"
        elif any(not _like(getattr(modules[name], key), value) for key, value in attributes.items()):
            yield f"{name or 'the model'}: attributes {attributes} must be integers, as many as in the model"
    for name in manifest["surgery"].get("kept", {}):
        if name not in modules:
            yield f"{name}: the file keeps some of its channels, but the model has no such module"
    state = model.state_dict(keep_vars=True)
    yield from _name_problems(state, manifest, tensors, shapes)
    for name in sorted(set(state) & set(tensors)):
        yield from _tensor_problem(name, state[name], tensors[name], shapes)
    for name, tensor in tensors.items():
        yield from _value_problem(name, tensor, state.get(name))
        yield from _follower_problem(name, tensor, tensors)
    kept: dict[int, str] = {}
    for name, value in state.items():
        other = kept.setdefault(id(value), name) if isinstance(value, Tensor) else name
        if other != name and name in tensors and other in tensors and not _equal(tensors[name], tensors[other]):
            yield f"{name}: shares a tensor with {other} in the model, but not in the file"


def _like(own: Any, stored: Any) -> bool:
    """Whether a stored attribute may replace the model's: an integer an integer, as many integers a tuple or list."""
    if type(own) is int:
        return type(stored) is int
    alike = isinstance(own, tuple | list) and isinstance(stored, list) and len(own) == len(stored)
    return alike and all(type(part) is int for part in (*own, *stored))


def _layer_problem(name: str, layer: dict[str, Any], modules: Mapping[str, nn.Module]) -> Iterator[str]:
    module = modules.get(name)
    if layer["class"] not in {kind.__name__ for kind in VARIATIONAL_CLASSES.values()}:
        yield (
            f"{name}: unknown layer class {layer['class']!r}; a class of your own must be in "
            "svdcompress.layers.VARIATIONAL_CLASSES before you load its file"
        )
    elif module is None or _class_of(module) != layer["class"]:
        found = type(modules[name]).__name__ if name in modules else "no such layer"
        yield f"{name}: {layer['class']} in the file, {found} in the model"
    else:
        try:
            check_posterior(layer.get("posterior", "independent"))
            check_prior(layer["prior"]).check_share(parse_share(layer["share"]))
            check_variance_dtype(layer["variance_dtype"])
            parse_threshold(layer["threshold"])
        except ModelError as error:
            yield f"{name}: {error}"


def _class_of(module: nn.Module) -> str | None:
    """Name of the variational class of a dense or converted module, as files record it; None if it has none."""
    if isinstance(module, VariationalLayer):
        return class_name(module)
    known = known_class(type(module)) if variational_class(type(module)) else None
    return None if known is None else VARIATIONAL_CLASSES[known].__name__


def _name_problems(
    state: Mapping[str, Any], manifest: dict[str, Any], tensors: Mapping[str, Tensor], shapes: Mapping[str, Any]
) -> Iterator[str]:
    variational = set(manifest["layers"])
    known = {key for posterior in Posterior.registry.values() for key in posterior.parameters}
    spreads = {prefix: _spreads(layer) for prefix, layer in manifest["layers"].items()}
    for name in sorted(set(state) - set(tensors)):
        prefix, _, key = name.rpartition(".")
        if not (prefix in variational and (key in OPTIONAL or key in known - spreads[prefix])):
            yield f"{name}: missing in the file"
    for name in sorted(f"{prefix}.{key}".lstrip(".") for prefix, keys in spreads.items() for key in keys):
        if name not in tensors and name not in state:
            yield f"{name}: missing in the file"
    for name in sorted(set(tensors) - set(state)):
        prefix, _, key = name.rpartition(".")
        made_by_pruning = key == "bias" and name in shapes
        own = key in _FOLLOWS or any(key in keys for keys in spreads.values())
        if not (made_by_pruning or (own and _canonical_in(variational, prefix, manifest))):
            yield f"{name}: not in the model"


def _spreads(layer: Mapping[str, Any]) -> set[str]:
    """Names of a manifest layer's variance parameters; none for an unknown posterior, which `_layer_problem` reports."""
    try:
        return set(check_posterior(layer.get("posterior", "independent")).parameters)
    except ModelError:
        return set()


def _canonical_in(variational: set[str], prefix: str, manifest: dict[str, Any]) -> bool:
    """Whether `prefix` names a variational layer, or one whose weight is tied to that of a variational layer."""
    key = f"{prefix}.weight" if prefix else "weight"
    return prefix in variational or manifest["ties"].get(key, "").rpartition(".")[0] in variational


def _tensor_problem(name: str, own: Any, stored: Tensor, shapes: Mapping[str, Any]) -> Iterator[str]:
    prefix, _, key = name.rpartition(".")
    leader = f"{prefix}.{_FOLLOWS.get(key, key)}" if prefix else _FOLLOWS.get(key, key)
    if own.shape != stored.shape and list(stored.shape) != shapes.get(leader):
        yield f"{name}: shape {tuple(stored.shape)} in the file, {tuple(own.shape)} in the model"
    elif not (own.is_floating_point() and stored.dtype in FLOATS) and own.dtype != stored.dtype:
        yield f"{name}: {stored.dtype} in the file, {own.dtype} in the model"


def _follower_problem(name: str, stored: Tensor, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield what is wrong with the shape of a mask or a bias variance: it might be spread over the layer without a word."""
    prefix, _, key = name.rpartition(".")
    if key in OPTIONAL:
        leader = tensors.get(f"{prefix}.{_FOLLOWS[key]}".lstrip("."))
        if leader is None or leader.shape != stored.shape:
            other = "none" if leader is None else f"of shape {tuple(leader.shape)}"
            yield f"{name}: of shape {tuple(stored.shape)}, but the {_FOLLOWS[key]} in the file is {other}"


def _equal(a: Tensor, b: Tensor) -> bool:
    return a is b or (
        a.shape == b.shape and a.dtype == b.dtype and a.numpy(force=True).tobytes() == b.numpy(force=True).tobytes()
    )


def _value_problem(name: str, stored: Tensor, own: Any) -> Iterator[str]:
    """Yield what is wrong with a stored tensor in itself: an unsupported dtype, NaN or infinite values, negative variances.

    Infinities are accepted where the model's own tensor has the same ones, as in a causal mask.
    """
    alike = own is not None and own.dtype == stored.dtype  # such as a complex buffer of frequencies
    if (stored.is_complex() or (stored.is_floating_point() and stored.dtype not in FLOATS)) and not alike:
        yield f"{name}: {stored.dtype}, which is not supported; weights are float32, float64, float16 or bfloat16"
    elif own is None and not name.endswith("mask") and stored.dtype not in FLOATS:
        yield f"{name}: {stored.dtype}, but weights are floating-point numbers"
    elif name.endswith("mask") and own is None and stored.dtype is not torch.bool:
        yield f"{name}: {stored.dtype}, but a mask must be {torch.bool}"
    elif not finite_as(stored, own):
        yield f"{name}: holds values that are not finite (NaN or infinite)"
    elif name.endswith("bias_sigma2") and own is None and bool((stored < 0).any()):
        yield f"{name}: holds a variance below 0"
