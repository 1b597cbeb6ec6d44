"""The manifest of a checkpoint: its schema, validated once when it is read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from svdcompress.errors import CheckpointError, explained, shortened
from svdcompress.files import parse_json

FORMAT = 1
KEY = "svdcompress"

LONGEST = 2**26
"""Maximum length of a manifest, in characters: one for ten thousand layers has about a million."""


def _a_number(value: float) -> float:
    """Accept infinity, a limit that nothing reaches, but not NaN."""
    if value != value:
        raise ValueError("NaN is not a limit")
    return value


Length = Annotated[int, Field(ge=0, lt=2**40)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Limit = Annotated[float, AfterValidator(_a_number)]


class _Part(BaseModel):
    """Base of the manifest's parts: strict types (no text for a number, no number for a flag), unknown keys allowed."""

    model_config = ConfigDict(strict=True, extra="allow")


class Strategy(_Part):
    """A prior or a posterior: its name, and the arguments of its constructor."""

    name: str
    settings: dict[str, Any] = {}


class Layer(_Part):
    """A variational layer."""

    class_: str = Field(alias="class")
    prior: str | Strategy
    posterior: str | Strategy = "independent"
    share: dict[str, Finite] | list[str] | str
    threshold: dict[str, Limit] | Limit
    variance_dtype: str


class Dropout(_Part):
    """An MC dropout layer, which can also draw noise in `eval()`."""

    class_: Literal["BernoulliDropout", "GaussianDropout"] = Field(alias="class")
    p: Annotated[float, Field(ge=0, lt=1)]
    channels: bool


class Kept(_Part):
    """The channels of a module's output that are kept, along dimension `dim`."""

    dim: int
    kept: list[Length]


class Surgery(_Part):
    """What pruning changed: integer attributes by module, shapes by tensor, and the channels kept of modules' outputs."""

    attributes: dict[str, dict[str, Length | list[Length]]] = {}
    shapes: dict[str, list[Length]] = {}
    kept: dict[str, Kept] = {}


class Likelihood(_Part):
    """What the model's output means: a likelihood's name, and the arguments of its constructor."""

    name: str
    settings: dict[str, Any] = {}


class Manifest(_Part):
    """The whole manifest."""

    format: Annotated[int, Field(ge=1, le=FORMAT)]
    model: str = ""
    layers: dict[str, Layer]
    dropout: dict[str, Dropout]
    folded: dict[str, str] = {}
    surgery: Surgery
    shapes: dict[str, list[Length]] = {}
    ties: dict[str, str]
    versions: dict[str, str] = {}
    extra: dict[str, Any] = {}
    likelihood: Likelihood | None = None
    sha256: str = ""


def digest(manifest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of a manifest, without its own `sha256`, and of the tensors stored beside it."""
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    found = hashlib.sha256(json.dumps(rest, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        if tensor.numel():
            found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def read_tensors(path: str | Path, manifest: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors beside a manifest, which `read_manifest` returned. Raises CheckpointError if either was changed after it was
    written; files of earlier versions hold no digest, and are taken as they are."""
    with safe_open(str(path), "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    if manifest.get("sha256", "") not in ("", digest(manifest, tensors)):
        raise CheckpointError(f"{path}: damaged, or changed after it was written (its SHA-256 is not the one that it holds)")
    return tensors


def read_manifest(path: str | Path) -> dict[str, Any]:
    """Read and validate the manifest of a file that `save` wrote.

    Raises CheckpointError for a missing, truncated or foreign file and, naming the field, for a manifest that `save` would
    not write.
    """
    path = Path(path)
    if not os.path.isfile(path):
        raise CheckpointError(f"{path}: no such file")
    try:
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata() or {}
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path}: not a safetensors file, or truncated ({shortened(str(error))})") from error
    if KEY not in metadata:
        raise CheckpointError(f"{path}: has no svdcompress manifest; load a dense checkpoint with svdcompress.sources instead")
    if len(metadata[KEY]) > LONGEST:
        raise CheckpointError(f"{path}: a manifest of {len(metadata[KEY]):,} characters; at most {LONGEST:,} are read")
    try:
        manifest = parse_json(metadata[KEY], finite=False)
    except ValueError as error:
        raise CheckpointError(f"{path}: its manifest cannot be read ({shortened(str(error))})") from error
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{path}: its manifest is a {type(manifest).__name__}, not an object")
    number = manifest.get("format")
    if type(number) is not int or not 1 <= number <= FORMAT:
        raise CheckpointError(f"{path}: format {shortened(repr(number), 40)}; this version reads up to {FORMAT}")
    try:
        Manifest.model_validate(manifest)
    except ValidationError as error:
        raise CheckpointError(f"{path}: its manifest is damaged: {explained(error)}") from None
    return manifest
