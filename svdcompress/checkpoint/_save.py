"""Saving a model as a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.batch import unwrapped
from svdcompress.checkpoint._manifest import FORMAT, KEY, digest
from svdcompress.convert import folded
from svdcompress.errors import CheckpointError, UsageError
from svdcompress.files import write_atomically
from svdcompress.layers import BernoulliDropout, GaussianDropout, VariationalLayer, class_name, stored
from svdcompress.likelihoods import as_stored, likelihood_of
from svdcompress.sources import write_tensors
from svdcompress.version import __version__

SETTINGS = ("prior", "share", "threshold", "variance_dtype")
"""Attributes of a variational layer that the manifest records; "posterior" is added unless it is the independent one."""


def save(model: nn.Module, path: str | Path, *, extra: Mapping[str, Any] | None = None) -> None:
    """Write a model's parameters and buffers, and what conversion and pruning changed; the file appears whole or not at all.

    For a model wrapped by torch.compile or data-parallel training, the model within is written.
    extra: JSON-able, kept in the manifest under "extra".
    Raises UsageError if `extra` is not JSON-able, CheckpointError if the model's state holds anything but dense tensors
    of types that safetensors has (not complex128), OutputError if the file cannot be written.

    Example:
        >>> svdc.save(svdc.convert(model), "model.safetensors")
    """
    model = unwrapped(model)
    tensors, ties = _state(model)
    manifest = _manifest(model, tensors, ties, dict(extra or {}))
    try:
        manifest = json.loads(json.dumps(manifest))  # as `load` reads it
    except (TypeError, ValueError) as error:
        raise UsageError(f"extra: not JSON-able ({error})") from error
    text = json.dumps({**manifest, "sha256": digest(manifest, tensors)})
    metadata = {KEY: text}  # a single entry: safetensors writes several in arbitrary order
    write_atomically(Path(path), lambda temporary: write_tensors(tensors, temporary, metadata))


def _state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The distinct tensors of a model's state, and {alias: name under which it is stored} for the shared ones."""
    tensors: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{name}: holds a {type(value).__name__}, which only a pickle could save")
        if value.layout != torch.strided:
            raise CheckpointError(
                f"{name}: a sparse tensor, which such a file cannot hold; save the model that was passed to to_sparse"
            )
        if id(value) in first:
            ties[name] = first[id(value)]
        else:
            first[id(value)] = name
            tensors[name] = value.detach().cpu().contiguous().clone()
    return tensors, ties


def _manifest(model: nn.Module, tensors: Mapping[str, Tensor], ties: dict[str, str], extra: dict[str, Any]) -> dict[str, Any]:
    layers, dropout = {}, {}
    for name, module in model.named_modules():
        if isinstance(module, VariationalLayer):
            own = {key: getattr(module, key) for key in SETTINGS} | {"prior": stored(module.prior)}
            if module.posterior != "independent":
                own["posterior"] = stored(module.posterior)
            layers[name] = {"class": class_name(module), **own}
        elif isinstance(module, BernoulliDropout | GaussianDropout):
            dropout[name] = {"class": type(module).__name__, "p": module.p, "channels": module.channels}
    likelihood = likelihood_of(model)
    return {
        "format": FORMAT,
        "model": type(model).__name__,
        "layers": layers,
        "dropout": dropout,
        "folded": folded(model),
        "surgery": getattr(model, "surgery", None) or {},
        "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()},
        "ties": ties,
        "versions": {"svdcompress": __version__, "torch": torch.__version__},
        "extra": extra,
        **({} if likelihood is None else {"likelihood": as_stored(likelihood)}),
    }
