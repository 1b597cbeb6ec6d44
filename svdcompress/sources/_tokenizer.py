"""Checks a tokenizer's folder before a library reads it: its files must not name files elsewhere.

If the vocabulary in `tokenizer.json` is a string, the tokenizers library reads it from the file of that name, whatever and
wherever it is (/dev/zero, say); transformers reads what `tokenizer_config.json` names as `vocab_file`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from svdcompress.errors import DataError, shortened

NO_LIMIT = 10**9
"""A tokenizer's `model_max_length` of this or more means no limit."""

LISTS = ("vocab", "merges")
"""Parts of `tokenizer.json` that hold words; if one is a string, it is read as a file name."""


def check_tokenizer(place: str, field: str) -> None:
    """Raises DataError if the files in a tokenizer's folder name files elsewhere; a name that is not a folder's passes."""
    folder = Path(place).expanduser()
    if not os.path.isdir(folder):
        return
    for pair, name in _texts_in(folder / "tokenizer.json", field):
        if pair in LISTS:
            raise DataError(f"{field}: {folder / 'tokenizer.json'}: {pair} is text ({shortened(name, 60)}), not the words")
    for pair, name in _texts_in(folder / "tokenizer_config.json", field):
        if pair.endswith("_file") and _elsewhere(folder, name):
            raise DataError(
                f"{field}: {folder / 'tokenizer_config.json'}: {pair} names a file elsewhere ({shortened(name, 60)})"
            )


def most_tokens(tokenizer: Any, field: str) -> int:
    """The tokenizer's limit on tokens, `model_max_length`; NO_LIMIT or more if it has none. Raises DataError if invalid."""
    most = getattr(tokenizer, "model_max_length", None) or NO_LIMIT
    if isinstance(most, bool) or not isinstance(most, int | float) or not 1 <= most < float("inf"):
        raise DataError(f"{field}: its model_max_length is {shortened(repr(most), 60)}, which is not a number of tokens")
    return int(most)


def _texts_in(path: Path, field: str) -> list[tuple[str, str]]:
    """All (key, value) pairs of a JSON file whose value is a string, at any depth; a key that occurs twice is there twice."""
    found: list[tuple[str, str]] = []
    if not os.path.isfile(path):
        return found
    try:
        json.loads(path.read_bytes(), object_pairs_hook=lambda pairs: found.extend(p for p in pairs if isinstance(p[1], str)))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{field}: {path}: cannot be read ({shortened(str(error))})") from error
    return found


def _elsewhere(folder: Path, name: str) -> bool:
    """Whether a name is that of a file that exists outside a folder; many tokenizers name files on their makers' machines."""
    try:
        place = (folder / name).resolve()
        return not place.is_relative_to(folder.resolve()) and (os.path.exists(place) or os.path.exists(name))
    except (OSError, ValueError):
        return False
