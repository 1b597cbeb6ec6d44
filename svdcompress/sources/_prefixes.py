"""What stands before the names in a file of weights: wrappers' prefixes, which are stripped, and others, which errors name."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping

from torch import Tensor

WRAPPERS = ("module.", "_orig_mod.", "model.")
"""Prefixes that DataParallel, torch.compile and Lightning put before each name; stripped if the names then fit."""

DEEPEST = 4
"""How many wrappers around one another are tried."""

AROUND = re.compile(f"(?:{'|'.join(map(re.escape, WRAPPERS))})*")


def bare(name: str) -> str:
    """A name without all prefixes of wrappers.

    >>> bare("module._orig_mod.0.weight")
    '0.weight'
    """
    found = AROUND.match(name)
    return name[found.end() :] if found else name


def absent(names: Container[str], own: Mapping[str, Tensor]) -> list[str]:
    """A model's names that a file lacks; it may lack a batch norm's counter and all but one of tied tensors."""
    held = {tensor.data_ptr() for name, tensor in own.items() if name in names}
    return [
        name
        for name, tensor in own.items()
        if name not in names and tensor.data_ptr() not in held and not name.endswith("num_batches_tracked")
    ]


def unwrapped(stored: dict[str, Tensor], own: Container[str]) -> dict[str, Tensor]:
    """A file's tensors without the wrappers' prefixes after which most names of the model follow; as they are if none does.

    Wrappers may be around one another (`module._orig_mod.` of DDP around torch.compile). The count of updates that
    `AveragedModel` keeps beside its `module.` is no weight, and is left out with that prefix.
    """
    if any(name in own for name in stored):
        return stored
    tried = [""]
    for _ in range(DEEPEST):
        longer = [prefix + wrapper for prefix in tried for wrapper in WRAPPERS]
        tried += [p for p in longer if p not in tried and any(name.startswith(p) for name in stored)]
    best = max(tried, key=lambda p: sum(name.startswith(p) and name[len(p) :] in own for name in stored))
    counts = {f"{best[:at]}n_averaged" for at in range(len(best)) if best.startswith("module.", at)}
    if any(name not in counts and not name.startswith(best) for name in stored):
        counts = set()  # not an AveragedModel's
    return {name.removeprefix(best): tensor for name, tensor in stored.items() if name not in counts or tensor.dim()}


def fitting(stored: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    """Prefixes that stand before all names of a model in a file; if some have tensors of its shapes, only these.

    >>> import torch
    >>> names = {"weight": torch.ones(2), "bias": torch.zeros(2)}
    >>> fitting({f"{who}.{name}": tensor for who in ("student", "teacher") for name, tensor in names.items()}, names)
    ['student.', 'teacher.']
    """
    longest = max(absent((), own), key=len, default=None)
    if longest is None:
        return []
    ends = [name for name in own if own[name].data_ptr() == own[longest].data_ptr()]
    named, shaped = [], []
    for prefix in dict.fromkeys(name.removesuffix(end) for name in stored for end in ends if name.endswith(end)):
        there = {name: stored[prefix + name] for name in own if prefix + name in stored}
        if prefix and not absent(there, own):
            named.append(prefix)
            if all(tensor.shape == own[name].shape for name, tensor in there.items()):
                shaped.append(prefix)
    return shaped or named
