"""Saving and loading without a pickle: tensors as safetensors, everything else as a JSON manifest in the same file.

A variational, masked or pruned model is loaded onto a fresh model from the user's own factory, exact to the bit: the manifest
says which layers are variational and which shapes and attributes pruning changed.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from svdcompress.convert import leave_fused_paths
from svdcompress.errors import CheckpointError, ModelError, OutputError, UsageError
from svdcompress.layers import (
    DROPOUT_CLASSES,
    VARIATIONAL_CLASSES,
    BernoulliDropout,
    GaussianDropout,
    VariationalLayer,
    check_prior,
    check_variance_dtype,
    keep_channels,
    parse_share,
    parse_threshold,
    register_loaded,
)

FORMAT = 1
KEY = "svdcompress"
_OPTIONAL = ("mask", "bias_sigma2")
_FOLLOWS = {"log_sigma2": "weight", "mask": "weight", "bias_sigma2": "bias"}
_SETTINGS = ("prior", "share", "threshold", "variance_dtype")
_NOISE = {"BernoulliDropout": BernoulliDropout, "GaussianDropout": GaussianDropout}


# Save


def save(model: nn.Module, path: str | Path, *, extra: Mapping[str, Any] | None = None) -> None:
    """Write a model's parameters and buffers, and what makes it variational and pruned; the file appears whole or not at all.

    extra: JSON-able, kept in the manifest under "extra".
    Raises UsageError if `extra` is not JSON-able, CheckpointError if the model's state is not made of tensors alone,
    OutputError if the file cannot be written.
    """
    tensors, ties = _state(model)
    manifest = _manifest(model, tensors, ties, dict(extra or {}))
    try:
        text = json.dumps(manifest)
    except (TypeError, ValueError) as error:
        raise UsageError(f"extra: not JSON-able ({error})") from error
    _write(Path(path), tensors, {KEY: text})  # one entry: safetensors writes several in any order


def _state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The distinct tensors of a model's state, and {name: name under which it is kept} of the shared ones."""
    tensors: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{name}: holds a {type(value).__name__}, which only a pickle could save")
        if id(value) in first:
            ties[name] = first[id(value)]
        else:
            first[id(value)] = name
            tensors[name] = value.detach().cpu().contiguous().clone()
    return tensors, ties


def _manifest(model: nn.Module, tensors: Mapping[str, Tensor], ties: dict[str, str], extra: dict[str, Any]) -> dict[str, Any]:
    from svdcompress import __version__

    layers, dropout = {}, {}
    for name, module in model.named_modules():
        if isinstance(module, VariationalLayer):
            own = {key: getattr(module, key) for key in _SETTINGS}
            layers[name] = {"class": type(module).__name__, **own}
        elif isinstance(module, BernoulliDropout | GaussianDropout):
            dropout[name] = {"class": type(module).__name__, "p": module.p, "channels": module.channels}
    return {
        "format": FORMAT,
        "model": type(model).__name__,
        "layers": layers,
        "dropout": dropout,
        "surgery": getattr(model, "surgery", None) or {},
        "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()},
        "ties": ties,
        "versions": {"svdcompress": __version__, "torch": torch.__version__},
        "extra": extra,
    }


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
        save_file(tensors, str(temporary), metadata)
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise OutputError(f"{path}: cannot be written ({error})") from error


# Load


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest of a file that `save` wrote. Raises CheckpointError for a missing, truncated or foreign file."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata() or {}
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path}: not a safetensors file, or truncated ({error})") from error
    if KEY not in metadata:
        raise CheckpointError(f"{path}: has no svdcompress manifest; load a dense checkpoint with svdcompress.sources instead")
    try:
        manifest = json.loads(metadata[KEY])
        known = isinstance(manifest, dict) and isinstance(manifest["format"], int)
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: its manifest cannot be read ({error})") from error
    if not known or manifest["format"] > FORMAT:
        raise CheckpointError(f"{path}: format {manifest.get('format')!r}; this version reads up to {FORMAT}")
    return manifest


def load(path: str | Path, model: nn.Module) -> nn.Module:
    """Load what `save` wrote onto a fresh model of the same factory, dense or converted, in place; returns the model.

    Exact to the bit, the tensors' dtypes included; each tensor stays on the model's device. Raises CheckpointError for a
    file that is missing, truncated or foreign, and for a model that does not fit; the model is then as it was.
    """
    manifest = read_manifest(path)
    try:
        with safe_open(str(path), "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        tensors.update({alias: tensors[name] for alias, name in manifest["ties"].items()})
        problems = list(_problems(model, manifest, tensors))
    except (OSError, SafetensorError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged ({type(error).__name__}: {error})") from error
    if problems:
        more = f" (and {len(problems) - 6} more)" if len(problems) > 6 else ""
        raise CheckpointError(f"{path}: made for another model than {type(model).__name__}: {'; '.join(problems[:6])}{more}")
    _convert(model, manifest)
    take_attributes(model, manifest["surgery"])
    for name, tensor in tensors.items():
        _set(model, name, tensor)
    for name, module in model.named_modules():
        if isinstance(module, VariationalLayer):
            for key in _OPTIONAL:
                if f"{name}.{key}".lstrip(".") not in tensors:
                    setattr(module, key, None)
            module.train(module.training)  # forget what it derived from its old weights
    return model


def take_attributes(model: nn.Module, surgery: dict[str, Any]) -> None:
    """Set what pruning changed of the modules beside their tensors (in_features, num_heads ...), as `surgery` records it, and
    leave the record with the model, in place."""
    for name, attributes in surgery.get("attributes", {}).items():
        module = model.get_submodule(name)
        for attribute, value in attributes.items():
            old = getattr(module, attribute)
            setattr(module, attribute, type(old)(value) if isinstance(old, tuple | list) else value)
    for name, kept in surgery.get("kept", {}).items():
        keep_channels(model.get_submodule(name), kept["dim"], kept["kept"])
    object.__setattr__(model, "surgery", surgery)


def _problems(model: nn.Module, manifest: dict[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Everything that speaks against loading, before anything is touched."""
    register_loaded()
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, layer in manifest["layers"].items():
        yield from _layer_problem(name, layer, modules)
    for name, module in model.named_modules():
        if isinstance(module, VariationalLayer) and name not in manifest["layers"]:
            yield f"{name}: variational in the model, dense in the file"
    for name in manifest["dropout"]:
        if not isinstance(modules.get(name), (*DROPOUT_CLASSES, BernoulliDropout, GaussianDropout)):
            yield f"{name}: no dropout layer in the model"
    shapes = manifest["surgery"].get("shapes", {})
    for name, attributes in manifest["surgery"].get("attributes", {}).items():
        if name not in modules or any(not hasattr(modules[name], key) for key in attributes):
            yield f"{name or 'the model'}: lacks one of the attributes {sorted(attributes)}"
        elif any(not _like(getattr(modules[name], key), value) for key, value in attributes.items()):
            yield f"{name or 'the model'}: attributes {attributes} are no lengths as the model has them"
    for name, cut in manifest["surgery"].get("kept", {}).items():
        if name not in modules or type(cut["dim"]) is not int or not all(type(i) is int and i >= 0 for i in cut["kept"]):
            yield f"{name}: no module of the model, or no list of channels that are kept of what it returns"
    state = model.state_dict(keep_vars=True)
    yield from _name_problems(state, manifest, tensors, shapes)
    for name in sorted(set(state) & set(tensors)):
        yield from _tensor_problem(name, state[name], tensors[name], shapes)
    kept: dict[int, str] = {}
    for name, value in state.items():
        other = kept.setdefault(id(value), name) if isinstance(value, Tensor) else name
        if other != name and name in tensors and other in tensors and not _equal(tensors[name], tensors[other]):
            yield f"{name}: one tensor with {other} in the model, another in the file"


def _like(own: Any, stored: Any) -> bool:
    """Whether a stored attribute may take the place of the model's: an integer for one, or as many integers for a tuple."""
    if type(own) is int:
        return type(stored) is int
    alike = isinstance(own, tuple | list) and isinstance(stored, list) and len(own) == len(stored)
    return alike and all(type(part) is int for part in (*own, *stored))


def _layer_problem(name: str, layer: dict[str, Any], modules: Mapping[str, nn.Module]) -> Iterator[str]:
    classes = {kind.__name__: (dense, kind) for dense, kind in VARIATIONAL_CLASSES.items()}
    if layer["class"] not in classes:
        yield f"{name}: unknown layer class {layer['class']!r}"
    elif type(modules.get(name)) not in classes[layer["class"]]:
        found = type(modules[name]).__name__ if name in modules else "no such layer"
        yield f"{name}: {layer['class']} in the file, {found} in the model"
    else:
        try:
            check_prior(layer["prior"])
            check_variance_dtype(layer["variance_dtype"])
            parse_share(layer["share"])
            parse_threshold(layer["threshold"])
        except ModelError as error:
            yield f"{name}: {error}"


def _name_problems(
    state: Mapping[str, Any], manifest: dict[str, Any], tensors: Mapping[str, Tensor], shapes: Mapping[str, Any]
) -> Iterator[str]:
    variational = set(manifest["layers"])
    for name in sorted(set(state) - set(tensors)):
        prefix, _, key = name.rpartition(".")
        if not (prefix in variational and key in _OPTIONAL):
            yield f"{name}: missing in the file"
    for name in sorted(set(tensors) - set(state)):
        prefix, _, key = name.rpartition(".")
        made_by_pruning = key == "bias" and name in shapes
        if not (made_by_pruning or (key in _FOLLOWS and _canonical_in(variational, prefix, manifest))):
            yield f"{name}: not in the model"


def _canonical_in(variational: set[str], prefix: str, manifest: dict[str, Any]) -> bool:
    """Whether a name is that of a variational layer, or of a second name of one."""
    key = f"{prefix}.weight" if prefix else "weight"
    return prefix in variational or manifest["ties"].get(key, "").rpartition(".")[0] in variational


def _tensor_problem(name: str, own: Any, stored: Tensor, shapes: Mapping[str, Any]) -> Iterator[str]:
    prefix, _, key = name.rpartition(".")
    leader = f"{prefix}.{_FOLLOWS.get(key, key)}" if prefix else _FOLLOWS.get(key, key)
    if own.shape != stored.shape and list(stored.shape) != shapes.get(leader):
        yield f"{name}: shape {tuple(stored.shape)} in the file, {tuple(own.shape)} in the model"
    elif own.is_floating_point() != stored.is_floating_point():
        yield f"{name}: {stored.dtype} in the file, {own.dtype} in the model"


def _equal(a: Tensor, b: Tensor) -> bool:
    return a is b or (
        a.shape == b.shape and a.dtype == b.dtype and a.numpy(force=True).tobytes() == b.numpy(force=True).tobytes()
    )


def _convert(model: nn.Module, manifest: dict[str, Any]) -> None:
    shared: dict[int, Any] = {}
    for name, layer in manifest["layers"].items():
        module = model.get_submodule(name)
        own = {key: layer[key] for key in _SETTINGS}
        if not isinstance(module, VariationalLayer):
            start = shared.get(id(module.weight), 0.0)
            module = VARIATIONAL_CLASSES[type(module)].from_dense(module, log_sigma2=start, **own)
        for key, value in own.items():
            setattr(module, key, value)
        shared[id(module.weight)] = module.log_sigma2
    leave_fused_paths(model)
    for name, layer in manifest["dropout"].items():
        old = model.get_submodule(name)
        if type(old).__name__ != layer["class"]:
            parent, _, key = name.rpartition(".")
            new = _NOISE[layer["class"]](layer["p"], channels=layer["channels"])
            setattr(model.get_submodule(parent), key, new.train(old.training))


def _set(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor in its place; parameters keep their identity, ties, device and `requires_grad`."""
    prefix, _, key = name.rpartition(".")
    module: Any = model.get_submodule(prefix)
    old = getattr(module, key, None)
    if isinstance(old, Tensor):
        old.data = tensor.to(old.device, copy=True)
    elif key == "bias":
        module.bias = nn.Parameter(tensor.to(module.weight.device, copy=True), requires_grad=module.weight.requires_grad)
    else:
        setattr(module, key, tensor.to(module.weight.device, copy=True))
