"""The user's own weights: safetensors (sharded too) and PyTorch files read with weights only, and what does not fit."""

from __future__ import annotations

import copy
import os
import pickle  # for its error and its protocol; nothing is unpickled here  # nosec B403
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from svdcompress.errors import CheckpointError, explained, shortened
from svdcompress.files import memory, parse_json

NESTED = ("state_dict", "model_state_dict", "model", "module", "net", "ema")
"""Keys under which training scripts keep the weights beside other things."""

WRAPPERS = ("module.", "_orig_mod.", "model.")
"""Prefixes that DataParallel, torch.compile and Lightning put before each name; stripped if the names then fit."""

LISTED = 8

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""Types of numbers that weights may have: with integers, complex numbers or eight bits they are something else."""


def load_weights(
    model: nn.Module, path: str | Path, strip_prefix: str | None = None, notes: list[str] | None = None
) -> nn.Module:
    """Load a dense checkpoint into a model, in place; returns it.

    A model that brings files of another form into its own by hooks (`register_load_state_dict_pre_hook`) does so here, too.

    path: .safetensors, a `.safetensors.index.json` or a folder with one (sharded), or a .pt/.pth file, which is read with
        weights only: a file whose pickle would run code is refused.
    strip_prefix: taken off the start of each name, where present. Weights nested under `state_dict` or `model`, and the
        prefixes of DataParallel and torch.compile, are found without it.
    notes: gets a line on other weights that the file holds, and on a prefix that none of its names has.

    Raises CheckpointError for a file that is missing, empty, truncated or unsafe, and for weights of another model (it lists
    missing and unexpected names and wrong shapes) or that are not finite; the model is then as it was.
    """
    path = Path(path)
    state, told = _stored(path, model, strip_prefix)
    state = _migrated(state, model)
    _check(state, model, path, told)
    if notes is not None:
        notes += told
    model.load_state_dict(state, strict=False)
    return model


def start_from(model: nn.Module, path: str | Path, strip_prefix: str | None = None) -> list[str]:
    """Load what fits of a checkpoint into a model that is to be trained, in place: a pretrained encoder under a new head.

    Names that the file lacks stay as they were drawn, names that the model lacks are left out; returns a line on each, and
    what `load_weights` notes. The rest is as there; raises CheckpointError, too, where less than half of the model's numbers
    are in the file, or a shape differs.
    """
    path = Path(path)
    state, told = _stored(path, model, strip_prefix)
    own = model.state_dict()
    fits = {name: tensor for name, tensor in state.items() if name in own}
    if 2 * sum(own[name].numel() for name in fits) < sum(tensor.numel() for tensor in own.values()):
        _check(state, model, path, told)  # which lists the names
    _check({**own, **fits}, model, path, told)
    model.load_state_dict(fits, strict=False)
    new = [name for name in own if name not in fits and not name.endswith("num_batches_tracked")]
    unused = [name for name in state if name not in own]
    return told + [
        f"{path.name}: {len(names)} {what}: {', '.join(shortened(name, 120) for name in names[:4])}{' ...' * (len(names) > 4)}"
        for names, what in ((new, "tensors are not in it and start as drawn"), (unused, "of its tensors are not used"))
        if names
    ]


def save_weights(model: nn.Module, path: str | Path) -> None:
    """Write a model's state_dict as safetensors; of tied tensors one is stored. `load_weights` reads it back."""
    state, seen = {}, set()
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        state[name] = tensor.detach().cpu().contiguous().clone()
    save_file(state, str(path), {"format": "pt"})


def _read(path: Path) -> Any:
    if os.path.isdir(path):
        path = _in_folder(path)
    if not os.path.exists(path):
        raise CheckpointError(f"weights: {path}: no such file")
    if path.stat().st_size == 0:
        raise CheckpointError(f"weights: {path}: the file is empty")
    if path.name.endswith(".index.json"):
        return _read_sharded(path)
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    return _read_torch(path)


def _in_folder(folder: Path) -> Path:
    for pattern in ("*.safetensors.index.json", "*.safetensors", "*.pt", "*.pth", "*.bin"):
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            raise CheckpointError(f"weights: {folder}: several files fit ({', '.join(p.name for p in found[:4])}); name one")
    raise CheckpointError(f"weights: {folder}: no .safetensors, .pt or .pth file in this folder")


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(str(path))
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"weights: {path}: not a whole safetensors file ({shortened(str(error))}); fetch or save it again"
        ) from error


def _read_sharded(path: Path) -> dict[str, Tensor]:
    try:
        index = Index.model_validate(parse_json(path.read_bytes()))
    except (OSError, ValueError) as error:  # a ValidationError is a ValueError
        reason = explained(error) if isinstance(error, ValidationError) else shortened(str(error))
        raise CheckpointError(f"weights: {path}: not an index of safetensors shards ({reason})") from error
    shards = sorted(set(index.weight_map.values()))
    state: dict[str, Tensor] = {}
    for shard in shards:
        file = path.parent / Path(shard).name
        if file.suffix != ".safetensors":
            raise CheckpointError(f"weights: {path} names {shortened(shard)}, which is no .safetensors file")
        if not os.path.isfile(file):
            raise CheckpointError(f"weights: {path} names {shortened(shard)}, which is not beside it")
        held = _read_safetensors(file)
        twice = next((name for name in held if name in state), None)
        if twice is not None:
            raise CheckpointError(f"weights: {path}: {shortened(twice)} is in two shards")
        state.update(held)
    lost = next((name for name in index.weight_map if name not in state), None)
    if lost is not None:
        raise CheckpointError(f"weights: {path} names {shortened(lost)}, which none of its shards holds")
    return state


class Index(BaseModel):
    """A `.safetensors.index.json`: which shard holds each tensor."""

    model_config = ConfigDict(strict=True)
    weight_map: dict[str, str]


def _read_torch(path: Path) -> Any:
    _check_zip(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if zipfile.is_zipfile(path) or _is_pickle(path):
            raise CheckpointError(
                f"weights: {path}: its pickle holds more than weights and could run code; it is not read. "
                "Save the state_dict alone: torch.save(model.state_dict(), path), or as safetensors"
            ) from error
        raise CheckpointError(f"weights: {path}: not a PyTorch file; give a .safetensors, .pt or .pth file") from error
    except Exception as error:  # on text or noise the unpickler fails in any way
        reason = shortened(str(error).splitlines()[0] if str(error).strip() else type(error).__name__)
        raise CheckpointError(f"weights: {path}: truncated, or not a PyTorch file ({reason})") from error


def _check_zip(path: Path) -> None:
    """Raises CheckpointError for an archive that unpacks to more than this machine holds; PyTorch itself does not pack."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
    except Exception:  # no archive: an older file, or a damaged one, which torch.load tells apart
        return
    if size > path.stat().st_size + 2**20 and size > memory():
        raise CheckpointError(f"weights: {path}: unpacks to {size:,} bytes, more than this machine has memory for")


def _is_pickle(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(2)
    return len(head) == 2 and head[0] == 0x80 and head[1] <= pickle.HIGHEST_PROTOCOL


def _stored(path: Path, model: nn.Module, strip_prefix: str | None) -> tuple[dict[str, Tensor], list[str]]:
    """A file's names and tensors, without prefixes, and what to say of them."""
    content, way = _read(path), []
    state = _within(content, way)
    if state is None:
        for key in way:
            content = content[key]
        keys = ", ".join(map(str, list(content)[:LISTED])) if isinstance(content, Mapping) else type(content).__name__
        raise CheckpointError(f"weights: {path}: no weights found in it (it holds: {keys or 'nothing'})")
    told = _others(content, way, state, path)
    if strip_prefix:
        if not any(name.startswith(strip_prefix) for name in state):
            first = shortened(next(iter(state)), 120)
            told.append(
                f"weights: no name in {path.name} begins with {strip_prefix!r}, so none is stripped (the first is {first})"
            )
        state = {name.removeprefix(strip_prefix): tensor for name, tensor in state.items()}
    return _unwrapped(state, model), told


def _within(content: Any, way: list[str]) -> dict[str, Tensor] | None:
    """The names and tensors of a file's content, wherever in it they are; None where nowhere. way: gets the keys to them."""
    for _ in range(3):
        if not isinstance(content, Mapping):
            break
        inner = next((key for key in NESTED if isinstance(content.get(key), Mapping)), None)
        if inner is None:  # a state_dict, with extra state beside the tensors perhaps
            return {str(name): value for name, value in content.items() if isinstance(value, Tensor)} or None
        way.append(inner)
        content = content[inner]
    return None


def _others(content: Any, way: Sequence[str], state: Mapping[str, Tensor], path: Path) -> list[str]:
    """A line on other weights of the same names that lie beside those that were taken, as averages of them do."""

    def names(tensors: Mapping[str, Tensor] | None) -> set[str]:
        return {name.removeprefix("module.") for name in tensors or ()}

    place = ""
    for key in way:
        for other, value in content.items():
            if other != key and not names(state).isdisjoint(names(_within(value, []))):
                file, name = path.name, shortened(repr(other), 120)
                return [
                    f"weights: taken from {key!r}; {name} is in {file}, too. To take that, save it as a file of its own: "
                    f"torch.save(torch.load({file!r}, weights_only=True){place}[{name}], 'other.pt')"
                ]
        content, place = content[key], f"{place}[{key!r}]"
    return []


def _unwrapped(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    names = set(model.state_dict())
    if names & set(state):
        return state
    for prefix in WRAPPERS:
        stripped = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
        if names & set(stripped):
            return stripped
    return state


def _migrated(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """What the model's own loading hooks make of a state whose names or shapes it doesn't have; else the state as it is."""
    own = model.state_dict()
    if state.keys() == own.keys() and all(state[name].shape == own[name].shape for name in own):
        return state
    if any(
        tensor.dtype not in FLOATS and tensor.dtype not in {each.dtype for each in own.values()} for tensor in state.values()
    ):
        return state  # copying would cast it without a word
    try:
        copied = copy.deepcopy(model)
        copied.load_state_dict(state)
    except Exception:  # it fits no better; what is wrong with it is said of the file's own names
        return state
    return copied.state_dict()


def _check(state: dict[str, Tensor], model: nn.Module, path: Path, told: Sequence[str]) -> None:
    own = model.state_dict()
    loaded = {own[name].data_ptr() for name in own if name in state}
    missing = [name for name, tensor in own.items() if name not in state and tensor.data_ptr() not in loaded]
    missing = [name for name in missing if not name.endswith("num_batches_tracked")]
    unexpected = [name for name in state if name not in own]
    wrong = [
        f"{name} {tuple(tensor.shape)}, the model has {tuple(own[name].shape)}"
        for name, tensor in state.items()
        if name in own and tensor.shape != own[name].shape
    ]
    if missing or unexpected or wrong:
        lines = [f"weights: {path}: made for another model"]
        for title, names in (("missing", missing), ("unexpected", unexpected), ("wrong shape", wrong)):
            if names:
                more = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
                lines.append(f"  {title} ({len(names)}): {', '.join(shortened(n, 120) for n in names[:LISTED])}{more}")
        if loaded and missing and not wrong:
            lines.append("  Weights to start training from, such as an encoder under a new head? Add --untrained")
        raise CheckpointError("\n".join([*lines, *(f"  {line}" for line in told)]))
    for name, tensor in state.items():
        if tensor.layout is not torch.strided or tensor.is_quantized or not _same_kind(tensor.dtype, own[name].dtype):
            kind = f"{tensor.dtype}" if tensor.layout is torch.strided else f"{tensor.layout}"
            raise CheckpointError(
                f"weights: {path}: {name} is of {kind}, the model's of {own[name].dtype}; save them as they were trained "
                f"({', '.join(map(str, FLOATS))})"
            )
        if not finite_as(tensor, own[name]):
            raise CheckpointError(f"weights: {path}: {name} holds values that are not finite")


def _same_kind(stored: torch.dtype, own: torch.dtype) -> bool:
    """Whether values of one type may go into a tensor of the other: numbers with a point among themselves, else alike."""
    return stored == own or (stored in FLOATS and own in FLOATS)


def finite_as(stored: Tensor, own: Any) -> bool:
    """Whether a tensor holds no NaN, and no infinity but where the model's own has the same one, as in a causal mask."""
    if not stored.is_floating_point():
        return True
    finite = torch.isfinite(stored)
    if bool(finite.all()):
        return True
    alike = isinstance(own, Tensor) and own.shape == stored.shape and own.is_floating_point()
    return alike and bool((finite | (stored == own.detach().to(stored.device, stored.dtype))).all())
