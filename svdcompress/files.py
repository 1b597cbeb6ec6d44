"""Files that appear whole or not at all, JSON of limited depth, and limits for checks before anything is allocated."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from svdcompress.errors import OutputError

TEMPORARY = ".svdc-tmp"
"""Suffix of files that are being written; a killed process may leave one behind, which `sweep` removes."""

DEEPEST = 64
"""Most levels of nesting in the JSON and YAML that are read; our own has fewer than twenty."""

FULL = 2**16
"""Free bytes on a device below which it counts as full."""

INFLATES = 1032
"""Most bytes that one byte of deflated data can become."""


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Call `write(temporary path)` and move the result to `path`: readers see the old file or the new one, never a part of it.

    The file gets the mode of a new file under the umask, whatever mode `write` gave it. Raises OutputError if there is no
    space or no permission.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        write(temporary)
        temporary.chmod(0o666 & ~umask())
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except Exception as error:
        reason = _why_not(path.parent, error)
        with suppress(OSError):  # the folder may be gone
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError | RuntimeError) or type(error).__name__ == "SafetensorError":
            raise OutputError(f"{path}: cannot be written: {reason}") from error
        raise


def make_folder(path: Path) -> Path:
    """Make a folder, and those above it, if needed. Raises OutputError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{path}: {not_made(path, error, 'created')}") from error
    return path


def not_made(path: Path, error: OSError, done: str) -> str:
    """Why a folder could not be made, and what to do. done: what should have been done to it, "created"."""
    for place in (path, *path.parents):
        if os.path.islink(place) and not os.path.exists(place):  # mkdir says only that it exists
            return f"{place} is a link to {os.readlink(place)}, which does not exist; make that folder, or choose another place"
    return f"cannot be {done} ({error.strerror or error}); choose another place"


def _why_not(folder: Path, error: Exception) -> str:
    """Why a file could not be written, and what to do: torch, for example, reports a full disk as "unexpected pos 64 vs 0"."""
    advice = "free some space or choose another place"
    if not os.path.isdir(folder):
        return f"the folder {folder} no longer exists"
    try:
        full = shutil.disk_usage(folder).free < FULL
    except OSError:
        full = False
    if full or getattr(error, "errno", None) == errno.ENOSPC:
        return f"No space left on device; {advice}"
    return f"{getattr(error, 'strerror', None) or error}; {advice}"


def write_text(path: str | Path, text: str) -> Path:
    """Write a text file in one step: a reader, or a crash, sees the old file or the new one. Raises OutputError."""
    write_atomically(Path(path), lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return Path(path)


def umask() -> int:
    """The process's umask."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def is_temporary(path: Path) -> bool:
    """Whether a file (or folder) is a temporary one, which is left behind if its process is killed."""
    return path.name.startswith(".") and path.name.endswith(TEMPORARY)


def sweep(folder: Path) -> None:
    """Remove the temporary files and folders that killed processes left in a folder."""
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        if is_temporary(path):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def parse_json(text: str | bytes, *, finite: bool = True) -> Any:
    """Parse JSON. Raises ValueError if it is invalid or nested too deep, and for NaN and infinity (unless `finite` is False).

    A key that occurs twice in one object is an error too, as there is no telling which of the two was meant.
    """
    strict: dict[str, Any] = {"parse_constant": _no_constant, "parse_float": _finite} if finite else {}
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(text, object_pairs_hook=_once, **strict)
    except RecursionError as error:
        raise ValueError(f"nested more than {DEEPEST} deep") from error
    check_depth(value)
    return value


SEAL = "sha256"
"""The key of a JSON object under which `sealed` stores a digest of the rest."""


def sealed(content: Mapping[str, Any]) -> str:
    """JSON with a digest of itself, so that `unsealed` notices if it is changed later, even by one digit."""
    plain = json.loads(json.dumps(content))
    return json.dumps({**plain, SEAL: digest_of(plain)})


def unsealed(text: str | bytes) -> Any:
    """Parse what `sealed` made, without the digest. Raises ValueError as `parse_json` does, and if the digest does not fit.
    Text without one, as earlier versions wrote it, is accepted."""
    found = parse_json(text)
    if isinstance(found, dict) and found.pop(SEAL, None) not in (None, digest_of(found)):
        raise ValueError("changed since it was written")
    return found


def digest_of(content: Any) -> str:
    """SHA-256 of a JSON-able value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_depth(value: Any) -> None:
    """Raise ValueError for lists and mappings that are nested more than DEEPEST deep."""
    waiting = [(value, 1)]
    while waiting:
        item, depth = waiting.pop()
        if depth > DEEPEST:
            raise ValueError(f"nested more than {DEEPEST} deep")
        inner = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        waiting += [(part, depth + 1) for part in inner if isinstance(part, dict | list)]


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is out of range for a float")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:40]!r} occurs twice")
    return found


def memory() -> int:
    """Bytes of memory that are available on this machine (all that it has, if that is unknown; 16 GiB if both are)."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
        return found["MemAvailable"]
    except (OSError, KeyError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 16 * 2**30
