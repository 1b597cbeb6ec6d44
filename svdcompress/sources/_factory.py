"""Data from the user's own factories: datasets, loaders or tensors."""

from __future__ import annotations

import multiprocessing
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)
from torch.utils.data.distributed import DistributedSampler

from svdcompress.batch import map_tensors
from svdcompress.errors import DataError
from svdcompress.recipe import DataSection
from svdcompress.sources._images import sensible_workers
from svdcompress.sources._names import import_name
from svdcompress.sources._raw import Raw, Table, no_targets
from svdcompress.sources.given import shown

FEW = 256
"""Datasets of up to this many examples are read in this process: starting others would take longer."""


FORMS = (
    "accepted are (inputs, targets), a Dataset or a DataLoader, also two or three of them (train, test or train, validation, "
    "test), or a dict of them by these names"
)
"""What a function of data may return, for messages."""


def read_factory(name: str, section: DataSection) -> Raw:
    """What `package.module:factory` returns: (train, test), (train, validation, test), a dict with these names, or train alone.

    Each is a Dataset with a length, a DataLoader (its dataset, collate function and number of workers are used, its
    order and batches are not; a warning names a sampler that is ignored), or an (inputs, targets) pair.
    """
    factory = import_name(name, DataError, "data.name")
    name = shown(name)
    if section.args and not callable(factory):
        raise DataError(f"data.args: {name} is a {type(factory).__name__}, not a function: it takes no arguments")
    try:
        made = factory(**section.args) if callable(factory) else factory
    except Exception as error:  # whatever the user's factory raises
        raise DataError(f"data.name: {name} failed: {type(error).__name__}: {error}") from error
    if isinstance(made, dict):
        parts = {"validation" if key in ("val", "valid") else key: value for key, value in made.items()}
        if len(parts) < len(made):
            raise DataError(
                f"data.name: {name} returned {', '.join(map(str, made))}: validation, val and valid mean the same split"
            )
    elif isinstance(made, tuple | list) and not _is_pair(made, name):
        names = {1: ("train",), 2: ("train", "test"), 3: ("train", "validation", "test")}.get(len(made), ())
        parts = dict(zip(names, made, strict=True)) if names else {}
    else:
        parts = {"train": made}
    unknown = sorted(set(parts) - {"train", "validation", "test"})
    if "train" not in parts or unknown:
        raise DataError(
            f"data.name: {name} must return train, test or train, validation, test; it returned {_told(made)}; {FORMS}"
        )
    tables = {key: _table(part, name, section) for key, part in parts.items() if part is not None}
    warnings = [line for key, part in parts.items() if (line := _dropped(part, name, key))]
    return Raw(tables["train"], tables.get("test"), tables.get("validation"), warnings=warnings)


def _is_pair(made: Any, name: str) -> bool:
    """Whether this is (inputs, targets) and not (train, test): arrays only, or inputs of any form with an array of targets.

    A list of numbers (or of names, which `_pair` refuses) counts as an array: it cannot be a split.
    Raises DataError for two nested lists of numbers, which may be either.
    """
    if _arrays(made) or len(made) != 2:
        return _arrays(made)
    if _nested(made[0]) and _nested(made[1]) and len(made[0]) == len(made[1]):
        raise DataError(
            f"data.name: {name}: two lists of lists may be (inputs, targets) or (train, test): pass arrays or tensors"
        )
    return (_arrays(made[1:]) or _plain(made[1])) and isinstance(made[0], tuple | list | dict | Tensor | np.ndarray)


def _arrays(parts: Any) -> bool:
    """Whether all of these are arrays or tensors."""
    return all(isinstance(part, Tensor | np.ndarray) for part in parts)


def _told(made: Any, most: int = 6) -> str:
    """What a function returned, for messages: its type and the shapes or types of its parts."""
    kind = type(made).__name__
    if isinstance(made, dict):
        return f"a dict with {', '.join(map(str, list(made)[:most])) or 'nothing in it'}"
    if not isinstance(made, tuple | list):
        return f"an object of type {kind}"
    shapes = [f"{type(part).__name__} {tuple(part.shape)}" if _arrays([part]) else type(part).__name__ for part in made[:most]]
    return f"a {kind} of {len(made)}: {', '.join(shapes)}{', ...' * (len(made) > most)}"


def _plain(part: Any) -> bool:
    """Whether this is a list of numbers or of texts."""
    first = part[0] if isinstance(part, list) and part else None
    return isinstance(first, int | float | str | np.generic) or (isinstance(first, Tensor) and first.dim() == 0)


def _nested(part: Any) -> bool:
    """Whether this is a list of lists of numbers, of any depth."""
    return isinstance(part, list) and bool(part) and (_nested(part[0]) or (isinstance(part[0], list) and _plain(part[0])))


def _table(part: Any, name: str, section: DataSection) -> Table:
    if isinstance(part, Tensor | np.ndarray) and section.unlabelled:
        return _pair(part, no_targets(len(part)), name)
    if isinstance(part, tuple | list) and part and not section.unlabelled and len(part) != 2 and _arrays(part):
        raise DataError(
            f"data.name: {name} returned {_told(part)}, which is no (inputs, targets): several inputs go into one tuple, "
            f"((a, b), targets), and examples have no weights (loss.class_weights weighs classes); {FORMS}"
        )
    if isinstance(part, DataLoader):
        workers = part.num_workers if section.workers is None else section.workers
        return _dataset(_chosen(part), name, part.collate_fn, workers)
    if isinstance(part, Dataset):
        if type(part) is TensorDataset and len(part.tensors) == 2:  # a subclass may do anything with them
            return _pair(*part.tensors, name)
        return _dataset(part, name, None, section.workers)
    if isinstance(part, tuple | list) and len(part) == 2:
        return _pair(part[0], part[1], name)
    if hasattr(part, "__len__") and hasattr(part, "__getitem__"):
        return _dataset(part, name, None, section.workers)
    raise DataError(
        f"data.name: {name} returned a {type(part).__name__}; a Dataset, a DataLoader or (inputs, targets) is needed "
        "(inputs alone: --unlabelled)"
    )


def _pair(inputs: Any, targets: Any, name: str) -> Table:
    """Inputs and targets as a table. Raises DataError unless both are numbers and equally many."""
    sizes: list[int] = []
    if _texts(targets):
        raise DataError(f"data.name: {name}: the targets are texts: pass arrays or tensors of numbers, with classes from 0 on")
    try:
        inputs, targets = _tensors(inputs), torch.as_tensor(targets).cpu()
        map_tensors(inputs, lambda tensor: sizes.append(len(tensor)))
        sizes.append(len(targets))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"data.name: {name}: (inputs, targets) are not arrays of numbers ({error})") from error
    if len(set(sizes)) > 1 or len(sizes) < 2:
        raise DataError(f"data.name: {name}: {', '.join(map(str, sizes[:-1])) or 'no'} inputs, but {sizes[-1]} targets")
    return Table(name, inputs, targets)


def _texts(targets: Any) -> bool:
    values = targets.ravel() if isinstance(targets, np.ndarray) else targets
    return isinstance(values, list | tuple | np.ndarray) and len(values) > 0 and isinstance(values[0], str)


def _tensors(inputs: Any) -> Any:
    """Arrays and lists of numbers as tensors on the CPU; tuples and dicts of them keep their structure."""
    if isinstance(inputs, dict):
        return {key: _tensors(value) for key, value in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(_tensors(value) for value in inputs)
    return torch.as_tensor(np.asarray(inputs) if isinstance(inputs, list) else inputs).cpu()


def _dataset(dataset: Any, name: str, collate: Any, workers: int | None) -> Table:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(f"data.name: {name}: {type(dataset).__name__} has no length; a map-style dataset is needed")
    if workers is None:  # only if processes are forked: otherwise the user's classes must be importable by name
        forks = (multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]) == "fork"
        workers = sensible_workers() if forks and len(dataset) > FEW else 0
    return Table(name, dataset=dataset, collate=collate, workers=workers)


def _sampler(loader: DataLoader[Any]) -> Any:
    return loader.sampler if isinstance(loader.batch_sampler, BatchSampler) else loader.batch_sampler


def _chosen(loader: DataLoader[Any]) -> Any:
    """A DataLoader's dataset, or the part of it that a SubsetRandomSampler draws from, which is one way to split a dataset."""
    sampler = _sampler(loader)
    return Subset(loader.dataset, list(sampler.indices)) if isinstance(sampler, SubsetRandomSampler) else loader.dataset


def _dropped(part: Any, name: str, split: str) -> str | None:
    """A warning for a DataLoader whose sampler is not used, or None."""
    if not isinstance(part, DataLoader):
        return None
    dataset: Any = part.dataset
    sampler = _sampler(part)
    plain = isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(dataset)
    if sampler is None or plain or isinstance(sampler, SequentialSampler | SubsetRandomSampler | DistributedSampler):
        return None
    return (
        f"{name}: the {type(sampler).__name__} of the {split} DataLoader is not used: every example counts once in an epoch "
        "(loss.class_weights weighs classes)"
    )
