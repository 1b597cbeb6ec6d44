"""The user's own weights: reads safetensors (also sharded) and PyTorch files (weights only), and reports what does not fit."""

from __future__ import annotations

import copy
import os
import pickle  # for its error and its protocol; nothing is unpickled here  # nosec B403
import shlex
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from svdcompress.errors import CheckpointError, explained, shortened
from svdcompress.files import memory, parse_json
from svdcompress.sources._prefixes import absent, bare, fitting, unwrapped

NESTED = ("state_dict", "model_state_dict", "model", "module", "net", "ema")
"""Keys under which training scripts keep the weights next to other things."""

LISTED = 8

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""Data types that weights may have; integers, complex numbers or eight-bit floats mean that they are something else."""


def load_weights(
    model: nn.Module, path: str | Path, strip_prefix: str | None = None, notes: list[str] | None = None
) -> nn.Module:
    """Load a dense checkpoint into a model, in place; returns it.

    A model's hooks that convert files of another form (`register_load_state_dict_pre_hook`) run here, too.

    path: .safetensors, a `.safetensors.index.json` or a folder with one (sharded), or a .pt/.pth file, which is read with
        weights only: a file whose pickle would run code is refused.
    strip_prefix: removed from the start of each name that has it; if some have it, only these are taken. Weights nested under
        `state_dict` or `model`, and the prefixes of DataParallel, torch.compile and Lightning, alone or around one another, are
        found without it.
    notes: gets a line about other weights in the file, about names without the prefix, and about a prefix that no name has.

    Raises CheckpointError for a file that is missing, empty, truncated or unsafe, and for weights that are of another model
    (it lists missing and unexpected names and wrong shapes, and prefixes that would help) or not finite; the model is then
    unchanged.
    """
    path = Path(path)
    state, told, stored = _stored(path, model, strip_prefix)
    state = _migrated(state, model)
    _check(state, model, path, told, stored)
    if notes is not None:
        notes += told
    model.load_state_dict(state, strict=False)
    return model


def start_from(model: nn.Module, path: str | Path, strip_prefix: str | None = None) -> list[str]:
    """Load the part of a checkpoint that fits into a model to be trained, in place: a pretrained encoder under a new head, say.

    Tensors that the file lacks keep their initial values, and tensors that the model lacks are left out; returns a line about
    each kind, and the notes of `load_weights`. Otherwise like `load_weights`; also raises CheckpointError if less than half of
    the model's numbers are in the file, or if a shape differs.
    """
    path = Path(path)
    state, told, stored = _stored(path, model, strip_prefix)
    own = model.state_dict()
    fits = {name: tensor for name, tensor in state.items() if name in own}
    if 2 * sum(own[name].numel() for name in fits) < sum(tensor.numel() for tensor in own.values()):
        _check(state, model, path, told, stored)  # which lists the names
    _check({**own, **fits}, model, path, told, stored)
    model.load_state_dict(fits, strict=False)
    new = [name for name in own if name not in fits and not name.endswith("num_batches_tracked")]
    unused = [name for name in state if name not in own]
    return told + [
        f"{path.name}: {len(names)} {what}: {_first(names)}"
        for names, what in (
            (new, "tensors are not in it and keep their initial values"),
            (unused, "of its tensors are not used"),
        )
        if names
    ]


def save_weights(model: nn.Module, path: str | Path) -> None:
    """Write a model's state_dict as safetensors; tied tensors are stored once. `load_weights` reads it back."""
    state, seen = {}, set()
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        state[name] = tensor.detach().cpu().contiguous().clone()
    write_tensors(state, path, {"format": "pt"})


def check_types(tensors: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError, naming the tensors, for a type that a safetensors file does not have, such as complex128."""
    for kind in dict.fromkeys(tensor.dtype for tensor in tensors.values()):
        try:
            to_bytes({"": torch.empty(0, dtype=kind)})
        except (KeyError, SafetensorError) as error:
            named = ", ".join(name for name, tensor in tensors.items() if tensor.dtype == kind)
            raise CheckpointError(
                f"{named}: {kind}, which a safetensors file cannot hold; convert it to another type"
            ) from error


def write_tensors(tensors: Mapping[str, Tensor], path: str | Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file. Raises CheckpointError as `check_types` does."""
    check_types(tensors)
    save_file(dict(tensors), str(path), metadata)


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
            f"weights: {path}: not a complete safetensors file ({shortened(str(error))}); fetch or save it again"
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
            raise CheckpointError(f"weights: {path} names {shortened(shard)}, which is not a .safetensors file")
        if not os.path.isfile(file):
            raise CheckpointError(f"weights: {path} names {shortened(shard)}, which is not in the same folder")
        held = _read_safetensors(file)
        twice = next((name for name in held if name in state), None)
        if twice is not None:
            raise CheckpointError(f"weights: {path}: {shortened(twice)} is in two shards")
        state.update(held)
    lost = next((name for name in index.weight_map if name not in state), None)
    if lost is not None:
        raise CheckpointError(f"weights: {path} names {shortened(lost)}, which is in none of its shards")
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
    except Exception as error:  # on text or noise the unpickler may raise anything
        reason = shortened(str(error).splitlines()[0] if str(error).strip() else type(error).__name__)
        raise CheckpointError(f"weights: {path}: truncated, or not a PyTorch file ({reason})") from error


def _check_zip(path: Path) -> None:
    """Raises CheckpointError for a TorchScript archive, and for one that unpacks to more than this machine's memory.

    PyTorch's own archives are uncompressed.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except Exception:  # not an archive: an older file or a damaged one; torch.load tells them apart
        return
    size = sum(member.file_size for member in members)
    if size > path.stat().st_size + 2**20 and size > memory():
        raise CheckpointError(f"weights: {path}: unpacks to {size:,} bytes, more than this machine has memory for")
    if any(member.filename.partition("/")[2] == "constants.pkl" for member in members):  # as torch.load recognizes them
        raise CheckpointError(
            f"weights: {path}: a TorchScript archive; save its weights: "
            f"torch.save(torch.jit.load({path.name!r}).state_dict(), 'weights.pt')"
        )


def _is_pickle(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(2)
    return len(head) == 2 and head[0] == 0x80 and head[1] <= pickle.HIGHEST_PROTOCOL


def _stored(path: Path, model: nn.Module, strip_prefix: str | None) -> tuple[dict[str, Tensor], list[str], dict[str, Tensor]]:
    """A file's tensors by name, without prefixes; notes about them; and all tensors beside them, with their prefixes."""
    content, way = _read(path), []
    stored = _within(content, way)
    if stored is None:
        for key in way:
            content = content[key]
        keys = ", ".join(map(str, list(content)[:LISTED])) if isinstance(content, Mapping) else type(content).__name__
        raise CheckpointError(f"weights: {path}: no weights found in it (it holds: {keys or 'nothing'})")
    state, told = stored, _others(content, way, stored, path, strip_prefix or "")
    if strip_prefix:
        state = {name.removeprefix(strip_prefix): each for name, each in stored.items() if name.startswith(strip_prefix)}
        rest = [name for name in stored if not name.startswith(strip_prefix)]
        if not state:
            state = stored
            told.append(
                f"weights: no name in {path.name} begins with {strip_prefix!r}, so nothing is stripped (the first name is "
                f"{shortened(rest[0], 120)})"
            )
        elif rest:
            left = f"that do not begin with {strip_prefix!r} are left out ({len(rest)})"
            told.append(f"weights: names in {path.name} {left}: {_first(rest)}")
    return unwrapped(state, model.state_dict()), told, stored


def _first(names: Sequence[str]) -> str:
    return f"{', '.join(shortened(name, 120) for name in names[:4])}{' ...' * (len(names) > 4)}"


def _within(content: Any, way: list[str]) -> dict[str, Tensor] | None:
    """The tensors by name in a file's content, also nested; None if there are none. way: gets the keys that lead to them."""
    for _ in range(3):
        if not isinstance(content, Mapping):
            break
        inner = next((key for key in NESTED if isinstance(content.get(key), Mapping)), None)
        if inner is None:  # a state_dict, perhaps with extra state besides the tensors
            return {str(name): value for name, value in content.items() if isinstance(value, Tensor)} or None
        way.append(inner)
        content = content[inner]
    return None


def _others(content: Any, way: Sequence[str], state: Mapping[str, Tensor], path: Path, strip_prefix: str) -> list[str]:
    """A line about other weights in the file with the same names as those that were taken, such as their averages."""

    def names(tensors: Mapping[str, Tensor] | None) -> set[str]:
        return {bare(name.removeprefix(strip_prefix)) for name in tensors or ()}

    place = ""
    for key in way:
        for other, value in content.items():
            if other != key and not names(state).isdisjoint(names(_within(value, []))):
                file, name = path.name, shortened(repr(other), 120)
                return [
                    f"weights: taken from {key!r}; {file} also contains {name}. To use that, save it in its own file: "
                    f"torch.save(torch.load({file!r}, weights_only=True){place}[{name}], 'other.pt')"
                ]
        content, place = content[key], f"{place}[{key!r}]"
    return []


def _migrated(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The state as converted by the model's own loading hooks if its names or shapes differ from the model's; else as it is."""
    own = model.state_dict()
    if state.keys() == own.keys() and all(state[name].shape == own[name].shape for name in own):
        return state
    if any(
        tensor.dtype not in FLOATS and tensor.dtype not in {each.dtype for each in own.values()} for tensor in state.values()
    ):
        return state  # copying would silently cast it
    try:
        copied = copy.deepcopy(model)
        copied.load_state_dict(state)
    except Exception:  # it still does not fit; a later error names what is in the file
        return state
    return copied.state_dict()


def _check(state: dict[str, Tensor], model: nn.Module, path: Path, told: Sequence[str], stored: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError for tensors that are not the model's. stored: all tensors of the file, with their prefixes."""
    own = model.state_dict()
    missing = absent(state, own)
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
        advice = _prefixed(state, stored, own)
        lines += advice
        if missing and not wrong and not advice and any(name in state for name in own):
            lines.append("  To start training from these weights, such as an encoder under a new head, add --untrained")
        raise CheckpointError("\n".join([*lines, *(f"  {line}" for line in told)]))
    for name, tensor in state.items():
        if tensor.layout is not torch.strided or tensor.is_quantized or not _same_kind(tensor.dtype, own[name].dtype):
            kind = f"{tensor.dtype}" if tensor.layout is torch.strided else f"{tensor.layout}"
            raise CheckpointError(
                f"weights: {path}: {name} is {kind}, but the model's is {own[name].dtype}; save the weights in the type that "
                f"they were trained in ({', '.join(map(str, FLOATS))})"
            )
        if not finite_as(tensor, own[name]):
            raise CheckpointError(f"weights: {path}: {name} holds values that are not finite")


def _prefixed(state: Mapping[str, Tensor], stored: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    """A line, if any, about prefixes after which a file has all names of a model, other than the one that was stripped."""

    def stripped(prefix: str) -> bool:
        return all(
            stored[prefix + name] is tensor if prefix + name in stored else name in own for name, tensor in state.items()
        )

    found = [prefix for prefix in fitting(stored, own) if not stripped(prefix)]
    if not found:
        return []
    ways = " or ".join(f"--strip-prefix {shortened(shlex.quote(prefix), 120)}" for prefix in found[:4])
    return [f"  All of the model's names are in it after a prefix. To take those, add {ways}{' ...' * (len(found) > 4)}"]


def _same_kind(stored: torch.dtype, own: torch.dtype) -> bool:
    """Whether values of one type may go into a tensor of the other: any of `FLOATS` into any other, else only the same type."""
    return stored == own or (stored in FLOATS and own in FLOATS)


def finite_as(stored: Tensor, own: Any) -> bool:
    """Whether a tensor holds no NaN, and infinity only where the model's own tensor has the same, as in a causal mask."""
    if not (stored.is_floating_point() or stored.is_complex()):
        return True
    finite = torch.isfinite(stored if stored.dtype in FLOATS or stored.is_complex() else stored.float())
    if bool(finite.all()):
        return True
    alike = isinstance(own, Tensor) and own.shape == stored.shape and own.is_floating_point()
    return alike and bool((finite | (stored == own.detach().to(stored.device, stored.dtype))).all())
