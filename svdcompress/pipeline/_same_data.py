"""Checks that a run's data are those that it began with: other data would silently lead to another model, or other figures."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from svdcompress.batch import map_tensors
from svdcompress.errors import DataError
from svdcompress.sources import Data, InMemory

ROWS = 256
"""How many examples of each split, evenly spaced, go into its checksum."""

SPLITS = ("train", "validation", "test")


def seen(data: Data) -> dict[str, dict[str, Any]]:
    """For each split, the number of examples, and checksums of some of them and of all targets (None if not in memory)."""
    found = {}
    for name in SPLITS:
        examples, sums = getattr(data, name), (None, None)
        if isinstance(examples, InMemory):
            sums = _checksum(examples), _added(examples.targets, 0)
        found[name] = {"examples": len(examples), "checksum": sums[0], "targets": sums[1]}
    return found


def check_same(before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]], folder: Path) -> str:
    """A warning if the data's values have changed since the run began, else "".

    Raises DataError if the number of examples in a split has changed.
    """
    for name, stored in before.items():
        if stored["examples"] != now[name]["examples"]:
            raise DataError(
                f"data: the split {name} has {now[name]['examples']:,} examples, but had {stored['examples']:,} when the run "
                f"in {folder} began: continue with the data that it began with, or start another run"
            )
    others = [name for name, stored in before.items() if not _alike(stored, now[name])]
    if not others:
        return ""
    return f"the data ({', '.join(others)}) have changed since the run began: its result belongs to neither version"


def changed(before: Mapping[str, Mapping[str, Any]], data: Data) -> str:
    """How data that were opened again differ from those of a finished run, in words; "" if they do not."""
    found = []
    for name, now in seen(data).items():
        if name in before and not _alike(stored := before[name], now):
            count, was = now["examples"], stored["examples"]
            found.append(f"{name}: other values" if count == was else f"{name}: {count:,} examples, {was:,} then")
    return "; ".join(found)


def checksum(batch: Any) -> int:
    """A checksum of the values of all tensors in a batch."""
    total = 0

    def add(tensor: Tensor) -> None:
        nonlocal total
        total = _added(tensor, total)

    map_tensors(batch, add)
    return total


def _checksum(examples: InMemory) -> int:
    some = torch.linspace(0, len(examples) - 1, min(ROWS, len(examples)), dtype=torch.float64).round().long()
    return checksum(map_tensors((examples.inputs, examples.targets), lambda tensor: tensor[some]))


def _added(tensor: Tensor, total: int) -> int:
    return zlib.crc32(tensor.contiguous().cpu().view(torch.uint8).numpy().data, total)


def _alike(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether two splits have the same figures; older runs have none of all targets."""
    same = all(before[name] == now[name] for name in ("examples", "checksum"))
    return same and before.get("targets") in (None, now["targets"])
