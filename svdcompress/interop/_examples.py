"""How many training examples a data loader takes, over all processes of a training."""

from __future__ import annotations

import warnings
from typing import Any

from torch import distributed
from torch.utils.data import DistributedSampler, Subset, SubsetRandomSampler

from svdcompress.errors import UsageError

GIVE = "give it, as in SparsifyCallback(num_examples=60_000)"

Part = tuple[int | None, list[int] | None]
"""What one process counts: its number of examples (None: unknown), and their indices if it takes a subset."""


def count_examples(loader: Any) -> int:
    """The number of examples that a training takes from data loaders like this one, in all its processes.

    Raises UsageError if it is not known, or if processes differ in what they count without saying which examples they have.
    """
    dataset: Any = getattr(loader, "dataset", None)
    while type(dataset).__name__ == "IterableDatasetShard":  # accelerate's; its length is that of one process
        dataset = dataset.dataset
    batches: Any = getattr(loader, "batch_sampler", None)
    while hasattr(batches, "batch_sampler"):  # accelerate's, around the user's
        batches = batches.batch_sampler
    sampler = batches.sampler if hasattr(batches, "sampler") else getattr(loader, "sampler", None)
    alone = not (distributed.is_available() and distributed.is_initialized())
    divided = type(loader).__module__.startswith("accelerate.") or any(
        hasattr(one, "num_replicas") for one in (batches, sampler)
    )
    if isinstance(sampler, DistributedSampler):  # its own length is that of one process
        sampler = sampler.dataset  # the data, or Lightning's wrapper of another sampler
        sampler = getattr(sampler, "_sampler", sampler)
    # SubsetRandomSampler takes the same part of the data in each epoch; the length of others is how much an epoch takes.
    length = _length(sampler if isinstance(sampler, SubsetRandomSampler) else dataset)
    if alone or divided:
        return over_processes([(length, None)])
    parts: list[Part] = [(None, None)] * distributed.get_world_size()
    distributed.all_gather_object(parts, (length, _indices(dataset, sampler)))
    return over_processes(parts, tell=distributed.get_rank() == 0)


def over_processes(parts: list[Part], tell: bool = True) -> int:
    """The number of examples of processes together, each of which reads its own data loader.

    tell: whether to warn if parts of equal length may be of different data.
    """
    lengths = [length for length, _ in parts if length is not None]
    if len(lengths) < len(parts):
        raise UsageError(f"num_examples: the number of training examples cannot be read from the data loader; {GIVE}")
    subsets = [set(indices) for _, indices in parts if indices is not None]
    if len(subsets) == len(parts) and any(subset != subsets[0] for subset in subsets):
        return len(set().union(*subsets))
    if len(set(lengths)) > 1:
        raise UsageError(
            f"num_examples: processes have {min(lengths):,} to {max(lengths):,} training examples, so each seems to have "
            f"its own part of the data; N is the number in all of them: {GIVE}"
        )
    if tell and len(parts) > 1:
        warnings.warn(
            f"each of {len(parts)} processes counts N = {lengths[0]:,} training examples; if each has its own part of the "
            f"data, give SparsifyCallback(num_examples={sum(lengths)}), or the KL counts too much",
            stacklevel=5,
        )
    return lengths[0]


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _indices(dataset: Any, sampler: Any) -> list[int] | None:
    """The examples that a process takes, by their index in the data of which it has a subset."""
    chosen = [int(index) for index in sampler.indices] if isinstance(sampler, SubsetRandomSampler) else None
    while isinstance(dataset, Subset):
        own = [int(index) for index in dataset.indices]
        chosen = own if chosen is None else [own[index] for index in chosen]
        dataset = dataset.dataset
    return chosen
