"""Each kind of data source: its reader, and the fields of the data section that it knows, so that none is silently ignored."""

from __future__ import annotations

import os
from collections.abc import Callable

from svdcompress.errors import DataError
from svdcompress.recipe import DataSection
from svdcompress.sources._arrays import read_digits, read_npz
from svdcompress.sources._cifar import read_cifar
from svdcompress.sources._hub import read_hub
from svdcompress.sources._idx import read_idx
from svdcompress.sources._image_folder import read_imagefolder
from svdcompress.sources._names import is_python_name
from svdcompress.sources._raw import Raw
from svdcompress.sources._text import ARGS

READERS: dict[str, Callable[[str, DataSection], Raw]] = {
    "digits": read_digits,
    "mnist": read_idx,
    "idx": read_idx,
    "npz": read_npz,
    "imagefolder": read_imagefolder,
    "cifar10": read_cifar,
    "cifar100": read_cifar,
    "hf": read_hub,
}
"""The reader of each kind of source. `csv:` and `parquet:` have one of their own, as do Python names."""

_TABLE = ("args", "target", "features", "test")

KNOWN: dict[str, tuple[str, ...]] = {
    "digits": (),
    "mnist": ("root",),
    "idx": ("root",),
    "npz": (),
    "imagefolder": ("image_size",),
    "cifar10": ("root", "image_size"),
    "cifar100": ("root", "image_size"),
    "hf": ("args", "target", "features", "image_size"),
    "csv": _TABLE,
    "parquet": _TABLE,
}
"""The fields that each kind of source knows, apart from those that all kinds know."""

FACTORY = ("args",)
"""The same for `package.module:factory`."""


def made_by(section: DataSection) -> str | None:
    """The name of the user's function that makes the data, and may preprocess them itself; None for all other sources."""
    name = str(section.name)
    known = name.partition(":")[0] in (*READERS, "csv", "parquet")
    return name if not known and is_python_name(name) else None


def check_fields(section: DataSection) -> None:
    """Raises DataError, naming both, for a field that is set but that the section's kind of source does not know."""
    kind, _, place = str(section.name).partition(":")
    if kind not in KNOWN and not is_python_name(str(section.name)):
        return  # an unknown name has an error of its own
    known = KNOWN.get(kind, FACTORY)
    for field in ("args", "root", "target", "features", "test", "image_size"):
        value = getattr(section, field)
        if value and field not in known:
            others = [name for name, fields in KNOWN.items() if field in fields] + ["factories"] * (field in FACTORY)
            raise DataError(
                f"data.{field}: {kind if kind in KNOWN else section.name} does not know this field ({value!r}); "
                f"{', '.join(others)} {'do' if len(others) > 1 else 'does'}"
            )
    if kind in ("csv", "parquet") or (kind == "hf" and os.path.isdir(place)):  # for the hub, the rest goes to load_dataset
        unknown = [name for name in section.args if name not in ARGS]
        what = "tables" if kind != "hf" else "saved data sets"
        if unknown:
            raise DataError(f"data.args: {what} know {', '.join(ARGS)}, not {unknown[0]!r}")
        if section.args and not section.args.get("tokenizer"):
            raise DataError(
                f"data.args.{next(iter(section.args))}: applies to text only; also name its tokenizer (--data-arg "
                "tokenizer=FOLDER)"
            )
