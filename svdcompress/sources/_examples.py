"""Examples and their batches: in memory (indexed a batch at a time, no per-example work) or through a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from svdcompress.batch import first_tensor, map_tensors, to_device
from svdcompress.errors import DataError, SvdcError
from svdcompress.sources._check import Check

LABEL_KEYS = ("labels", "label", "targets", "target", "y")
"""Names under which a batch that is a mapping keeps its targets."""

ON_DEVICE_BYTES = 4 * 2**30
"""Examples in memory are moved to an accelerator once, as a whole, if they take no more than this."""


class Examples(Protocol):
    """One split of the data: a length and batches of (inputs, targets)."""

    def __len__(self) -> int: ...

    def batches(
        self, batch_size: int, *, shuffle: int | None = None, rank: int = 0, world: int = 1, device: Any = "cpu"
    ) -> Iterator[tuple[Any, Tensor]]:
        """Each example once, in batches on a device.

        shuffle: the seed of a random order, with augmentation; None: every example, in order, without augmentation.
        rank, world: this process takes its part of each batch of `batch_size * world`; with several processes, an incomplete
        last batch is left out when shuffling.
        """
        ...

    def subset(self, indices: Tensor) -> Examples:
        """The examples at `indices`."""
        ...


def order_of(count: int, batch_size: int, shuffle: int | None, rank: int, world: int) -> list[Tensor]:
    """The indices of each batch. A last training batch of one example is left out if the others have more, as batch statistics
    need two."""
    order = torch.arange(count) if shuffle is None else torch.randperm(count, generator=torch.Generator().manual_seed(shuffle))
    if world == 1:
        batches = list(order.split(batch_size))
        if shuffle is not None and len(batches) > 1 and len(batches[-1]) == 1 < batch_size:
            batches.pop()
        return batches
    whole = order[: count - count % (batch_size * world)] if shuffle is not None else order
    parts = [chunk[rank * batch_size : (rank + 1) * batch_size] for chunk in whole.split(batch_size * world)]
    return [part for part in parts if len(part)]


class InMemory:
    """Examples held as tensors.

    inputs: a tensor (N, ...), or a tuple or dict of tensors. targets: (N,) or (N, outputs).
    augment: applied to each shuffled batch of inputs, on the device.
    """

    def __init__(self, inputs: Any, targets: Tensor, augment: Callable[[Any], Any] | None = None) -> None:
        self.inputs = inputs
        self.targets = targets
        self.augment = augment
        self._moved: dict[torch.device, tuple[Any, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.targets)

    def subset(self, indices: Tensor) -> InMemory:
        """The examples at `indices`."""
        return InMemory(map_tensors(self.inputs, lambda tensor: tensor[indices]), self.targets[indices], self.augment)

    def batches(
        self, batch_size: int, *, shuffle: int | None = None, rank: int = 0, world: int = 1, device: Any = "cpu"
    ) -> Iterator[tuple[Any, Tensor]]:
        """See `Examples.batches`."""
        device = torch.device(device)
        inputs, targets = self._on(device)
        single = isinstance(inputs, Tensor)
        order = order_of(len(self), batch_size, shuffle, rank, world)
        if targets.device.type != "cpu" and order:  # in one copy: each copy waits for the work queued on the device
            order = torch.cat(order).to(targets.device).split([len(indices) for indices in order])
        for where in order:
            # index_select: half the time of x[where] on a CPU
            x = (
                inputs.index_select(0, where)
                if single
                else map_tensors(inputs, lambda t, where=where: t.index_select(0, where))
            )
            y = targets.index_select(0, where)
            if targets.device != device:
                x, y = to_device(x, device), y.to(device)
            yield (self.augment(x) if self.augment is not None and shuffle is not None else x), y

    def _on(self, device: torch.device) -> tuple[Any, Tensor]:
        if device.type == "cpu":
            return self.inputs, self.targets
        if device not in self._moved:
            sizes: list[int] = []
            map_tensors(self.inputs, lambda tensor: sizes.append(tensor.numel() * tensor.element_size()))
            fits = sum(sizes) <= ON_DEVICE_BYTES
            self._moved[device] = (
                (to_device(self.inputs, device), self.targets.to(device)) if fits else (self.inputs, self.targets)
            )
        return self._moved[device]


class FromDataset:
    """Examples of a torch Dataset, read by loader processes.

    transform, augment: applied to a batch's inputs, in that order (`augment` to shuffled ones only).
    indices: which of the dataset's examples these are. check: checks each batch and converts its targets.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        collate: Callable | None = None,
        workers: int = 0,
        transform: Callable[[Any], Any] | None = None,
        augment: Callable[[Any], Any] | None = None,
        indices: Tensor | None = None,
        check: Check | None = None,
    ) -> None:
        if not hasattr(dataset, "__len__"):
            raise DataError(f"data: {type(dataset).__name__} has no length; a dataset with __len__ and __getitem__ is needed")
        self.dataset: Any = dataset
        self.collate = collate
        self.workers = workers
        self.transform = transform
        self.augment = augment
        self.indices = torch.arange(len(self.dataset)) if indices is None else indices
        self.check = check

    def __len__(self) -> int:
        return len(self.indices)

    def subset(self, indices: Tensor) -> FromDataset:
        """The examples at `indices`."""
        return FromDataset(
            self.dataset,
            collate=self.collate,
            workers=self.workers,
            transform=self.transform,
            augment=self.augment,
            indices=self.indices[indices],
            check=self.check,
        )

    def batches(
        self, batch_size: int, *, shuffle: int | None = None, rank: int = 0, world: int = 1, device: Any = "cpu"
    ) -> Iterator[tuple[Any, Tensor]]:
        """See `Examples.batches`. Raises DataError, naming the row, if examples are unreadable, not finite or out of range."""
        device = torch.device(device)
        order = [self.indices[part].tolist() for part in order_of(len(self), batch_size, shuffle, rank, world)]
        loader = DataLoader(
            self.dataset,
            batch_sampler=order,
            collate_fn=self.collate,
            num_workers=min(self.workers, len(order)) if len(order) > 1 else 0,  # a single batch is read in this process
            pin_memory=device.type == "cuda",
            generator=torch.Generator().manual_seed(0 if shuffle is None else shuffle),  # the workers' seed, for repeats
        )
        read = self._read(loader)
        for rows in order:
            x, y = split_batch(next(read), self._origin)
            if self.check is not None:
                known = rows if len(rows) == len(y) else []  # a collate function may leave out examples
                self.check.inputs(x, known)
                y = self.check.targets(y, known)
            x = to_device(map_tensors(x, lambda tensor: tensor.detach()), device)
            y = y.detach().to(device, non_blocking=True)
            x = self.transform(x) if self.transform is not None else x
            yield (self.augment(x) if self.augment is not None and shuffle is not None else x), y

    @property
    def _origin(self) -> str:
        return self.check.origin if self.check is not None else type(self.dataset).__name__

    def _read(self, loader: DataLoader) -> Iterator[Any]:
        """The loader's batches. Raises DataError, without a worker's traceback, for whatever the dataset raises."""
        try:
            yield from loader
        except SvdcError as error:
            if not str(error).startswith("Caught "):
                raise
            raise type(error)(str(error).rstrip().rpartition(f"{type(error).__name__}: ")[2]) from error
        except Exception as error:  # whatever the user's dataset raises
            reason = f"{type(error).__name__}: {error}"
            if str(error).startswith("Caught "):  # from a loader process: the last line is the error itself
                reason = str(error).rstrip().splitlines()[-1]
            elif "DataLoader worker" in str(error):  # killed, e.g. for lack of shared memory
                reason += " (data.workers=0 reads without loader processes)"
            raise DataError(f"data: {self._origin}: an example could not be read: {reason}") from error


def split_batch(batch: Any, origin: str = "") -> tuple[Any, Tensor]:
    """Inputs and targets of a batch: a tuple whose last item is the target, or a mapping with labels.

    origin: where the data come from, for messages. Raises DataError for anything else.
    """
    where = f"data: {origin}" if origin else "data"
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        key = next((name for name in LABEL_KEYS if name in batch.keys()), None)  # noqa: SIM118 (BatchEncoding)
        if key is None:
            raise DataError(
                f"{where}: a batch has the fields {', '.join(map(str, batch.keys()))}; one of {LABEL_KEYS} is needed"
            )
        return {name: batch[name] for name in batch.keys() if name != key}, _numbers(batch[key], where)  # noqa: SIM118
    if isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch) >= 2:
        inputs = batch[0] if len(batch) == 2 else tuple(batch[:-1])
        return inputs, _numbers(batch[-1], where)
    raise DataError(
        f"{where}: a batch is a {type(batch).__name__}; (inputs, targets) or a mapping with labels is needed (inputs alone: "
        "--unlabelled)"
    )


def _numbers(targets: Any, where: str) -> Tensor:
    try:
        targets = torch.as_tensor(targets)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{where}: the targets of a batch are not numbers: {targets!r:.60} ({error})") from error
    if not targets.dim():
        raise DataError(f"{where}: the targets of a batch are a single number; one for each example is needed")
    return targets


def example_inputs(examples: Examples, count: int) -> Any:
    """The inputs of the first `count` examples, in order, on the CPU (of all, if there are fewer)."""
    if isinstance(examples, FromDataset):  # so that no loader processes read ahead
        examples = examples.subset(torch.arange(min(count, len(examples))))
    inputs, _ = next(iter(examples.batches(count)))
    return inputs


def batch_length(inputs: Any) -> int:
    """How many examples a batch of inputs holds."""
    return len(first_tensor(inputs))
