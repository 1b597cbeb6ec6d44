"""Mutates files and checks that reading one ends in a typed error or a right result, quickly, with the model unchanged.

A format is a folder of valid files and a function that reads it. A mutation depends only on its format, seed and number, so
`python tests/fuzz/fuzz.py FORMAT --only NUMBER` repeats a fault.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from svdcompress.errors import SvdcError

SECONDS = 10.0
BYTES = 2**30
"""Memory that one reading may take at most."""

LONGEST_MESSAGE = 4000

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 255, 2**31, 2**63, 10**20, -(10**20), 0.5, -0.0, 1e300, float("nan"), float("inf")),
    *("", "x", "0", "nan", "../../etc/passwd", "/dev/zero", "torch:save", "./evil.py:f", "subprocess:call"),
    *("é\u202e\x00", "x" * 5000),
    *([], {}, [[]], [None], {"": ""}, [1, "two"], {"class": "Linear"}, [0] * 2000),
)  # fmt: skip
"""Replacement values."""

WORDS = (
    *(b"\xff" * 4, b"\0" * 8, b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\xff" * 8, b"\0\0\0\x01"),
    *(b"{", b"]", b'"', b",", b"\n", b"inf", b"1e999"),
)
"""Bytes to insert or to overwrite others with."""


@dataclass
class Format:
    """A kind of file. make: writes valid files into a folder. read: reads them, and raises Wrong if the result is not right.

    files: names of those to mutate. structured: {name: (to a value, from a value)} for files that are also mutated as values.
    """

    name: str
    make: Callable[[Path], None]
    read: Callable[[Path, random.Random], None]
    files: tuple[str, ...]
    structured: dict[str, tuple[Callable[[bytes], Any], Callable[[Any], bytes]]] = field(default_factory=dict)


class Wrong(Exception):
    """The result is not right, or a refused file changed the model."""


class Slow(BaseException):
    """A reading took longer than it may."""


@dataclass
class Count:
    """How reading the mutations of one format ended. faults: (number, what)."""

    tried: int = 0
    refused: int = 0
    right: int = 0
    faults: list[tuple[int, str]] = field(default_factory=list)


def fuzz(form: Format, count: int, folder: Path, seed: int = 0, first: int = 0, limit_memory: bool = False) -> Count:
    """Read `count` mutations of a format's files in a folder."""
    good, place = folder / f"{form.name}-good", folder / form.name
    if not good.exists():
        good.mkdir(parents=True)
        form.make(good)
    with time_limit(SECONDS * 6):
        form.read(good, random.Random(0))  # the valid files are read correctly, and everything is imported
    found = Count()
    for number in range(first, first + count):
        one(form, good, place, seed, number, found, limit_memory)
    return found


def one(form: Format, good: Path, place: Path, seed: int, number: int, found: Count, limit_memory: bool) -> None:
    rng = random.Random(f"{form.name}:{seed}:{number}")
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(good, place)
    mutate(form, place, rng)
    found.tried += 1
    try:
        with time_limit(SECONDS), memory_limit() if limit_memory else nothing():
            form.read(place, rng)
        found.right += 1
    except SvdcError as error:
        found.refused += 1
        if len(str(error)) > LONGEST_MESSAGE or error.exit_code == 1:
            found.faults.append((number, f"a message of {len(str(error))} characters, exit code {error.exit_code}"))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # including panics of extensions
        where = traceback.extract_tb(error.__traceback__)[-1]
        found.faults.append(
            (number, f"{type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})")
        )


def mutate(form: Format, place: Path, rng: random.Random) -> None:
    """Change one of the format's files, as bytes or as a value."""
    name = rng.choice(form.files)
    path = place / name
    content = path.read_bytes()
    if name in form.structured and rng.random() < 0.6:
        parse, write = form.structured[name]
        path.write_bytes(write(changed_value(parse(content), rng)))
        return
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        content = changed_bytes(content, rng)
    path.write_bytes(content)


def changed_bytes(content: bytes, rng: random.Random) -> bytes:
    """One change of the bytes; half of the changes are in the first 256, where headers are."""
    if not content:
        return rng.randbytes(rng.randint(0, 16))
    near = rng.random() < 0.5
    at = rng.randrange(min(len(content), 256) if near else len(content))
    end = min(len(content), at + rng.choice((1, 2, 4, 8, 64, 1000)))
    kind = rng.randrange(7)
    if kind == 0:
        return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    if kind == 1:
        return content[:at] + rng.randbytes(end - at) + content[end:]
    if kind == 2:
        return content[:at] + content[end:]
    if kind == 3:
        return content[:end] + content[at:end] * rng.choice((1, 3, 100)) + content[end:]
    if kind == 4:
        return content[:at]
    word = rng.choice(WORDS)
    return content[:at] + word + content[at + (len(word) if kind == 5 else 0) :]


def changed_value(value: Any, rng: random.Random) -> Any:
    """A JSON value with one of its parts replaced, removed, renamed or nested deeper."""
    places = list(_places(value, ()))
    where = rng.choice(places)
    kind = rng.randrange(6)
    if not where or kind == 0:
        new: Any = rng.choice(ODD)
    elif kind == 1:
        new = _at(value, rng.choice(places))
    elif kind == 2:
        new = _at(value, where)
        for _ in range(rng.choice((1, 3, 100))):
            new = [new] if rng.random() < 0.5 else {"a": new}
    else:
        new = rng.choice(ODD)
    if not where:
        return new
    *path, last = where
    inner = _at(value, tuple(path))
    if kind == 4:
        del inner[last]
    elif kind == 5 and isinstance(inner, dict):
        inner[rng.choice(("", "x" * 300, f"{last}_", "format", "class"))] = inner.pop(last)
    else:
        inner[last] = json.loads(json.dumps(new))
    return value


def _places(value: Any, where: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    yield where
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _places(item, (*where, key))


def _at(value: Any, where: tuple[Any, ...]) -> Any:
    for key in where:
        value = value[key]
    return value


# Limits


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise Slow after `seconds` of processor time, which other processes do not count towards (main thread only)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise Slow(f"more than {seconds:g} s of the processor's time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def memory_limit() -> Iterator[None]:
    """Limit the address space to a GiB more than now; larger requests get MemoryError."""
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def nothing() -> Iterator[None]:
    """No limit."""
    yield
