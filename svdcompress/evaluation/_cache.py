"""Baselines trained for an evaluation, kept in the run's folder so that the next evaluation need not train them again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from svdcompress.errors import CheckpointError
from svdcompress.files import digest_of, make_folder, parse_json, write_atomically, write_text
from svdcompress.sources import load_weights, save_weights

FOLDER = "baselines"
"""The folder of the baselines, inside a run's folder."""

INDEX = "baselines.json"


def kept(folder: Path, name: str, settings: Any, fresh: Callable[[], nn.Module], make: Callable[[], nn.Module]) -> nn.Module:
    """The model of this name: from the run's folder if it was made with the same settings, otherwise made now and kept there.

    settings: JSON-able, everything that the model depends on. fresh: makes the architecture that kept weights are loaded into.
    make: makes the model. A damaged file is replaced. Raises OutputError if the folder cannot be written.
    """
    place = folder / FOLDER
    file, made_of = place / f"{name}.safetensors", digest_of(settings)
    if file.is_file() and _index(place).get(name, {}).get("made_of") == made_of:
        try:
            return load_weights(fresh(), file).eval()
        except CheckpointError:
            pass
    make_folder(place)  # before the training
    started = time.monotonic()
    model = make().cpu().eval()
    write_atomically(file, lambda path: save_weights(model, path))
    seconds = round(time.monotonic() - started, 1)
    write_text(place / INDEX, json.dumps({**_index(place), name: {"made_of": made_of, "seconds": seconds}}, indent=1) + "\n")
    return model


def is_kept(folder: Path, name: str, settings: Any) -> bool:
    """Whether `kept` would find the model in the run's folder."""
    place = folder / FOLDER
    return (place / f"{name}.safetensors").is_file() and _index(place).get(name, {}).get("made_of") == digest_of(settings)


def _index(place: Path) -> dict[str, Any]:
    try:
        found = parse_json((place / INDEX).read_bytes())
    except (OSError, ValueError):
        return {}
    return {name: entry for name, entry in found.items() if isinstance(entry, dict)} if isinstance(found, dict) else {}
