"""The device and the processes of a run, through accelerate (only this folder imports it)."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from svdcompress.errors import TrainingError, UsageError
from svdcompress.layers import fast_bfloat16
from svdcompress.train._together import launched, telling_of_waits, tried

Value = TypeVar("Value")

DEVICE_VARIABLE = "ACCELERATE_TORCH_DEVICE"

SHARDED = {"FSDP": "ACCELERATE_USE_FSDP", "DeepSpeed": "ACCELERATE_USE_DEEPSPEED", "Megatron-LM": "ACCELERATE_USE_MEGATRON_LM"}
"""Ways to divide weights among processes, and the variables by which `accelerate launch` asks for them."""


@contextmanager
def accelerate_kept() -> Iterator[None]:
    """When the body ends, restore accelerate's state, of which a process has only one, to what the caller's own code left.

    Otherwise a caller's Accelerator would continue with our precision and accumulation, and their next one on our device. The
    processes of a launch stay joined.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState

    states = [kind._shared_state for kind in (AcceleratorState, GradientState, PartialState)][: 2 if launched() else 3]
    before, device = [dict(state) for state in states], os.environ.get(DEVICE_VARIABLE)
    try:
        yield
    finally:
        for state, values in zip(states, before, strict=True):
            state.clear()
            state.update(values)
        os.environ.pop(DEVICE_VARIABLE, None)
        if device is not None:
            os.environ[DEVICE_VARIABLE] = device


def make_accelerator(device: str = "auto", precision: str = "no") -> Any:
    """An Accelerator for a device ("auto": CUDA, MPS or CPU, whichever is available) and a precision (no, auto, bf16, fp16).

    Under `accelerate launch` or `torchrun` it joins the other processes, each with a GPU of its own. Raises UsageError for a
    device that is not available, a numbered GPU that several processes would share, launches that divide the weights (FSDP,
    DeepSpeed), and if the processes did not join; TrainingError for fp16 without a CUDA device.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    _check(device)
    _refuse_one_for_all(device)
    refuse_sharding()
    if precision == "fp16" and (device == "cpu" or not torch.cuda.is_available()):
        raise TrainingError("train.precision: fp16 needs a CUDA device; use bf16 or no")
    # accelerate has one state per process: forget the precision and (without other processes) the device of an earlier fit.
    AcceleratorState._reset_state()
    GradientState._reset_state()
    if not launched():
        PartialState._reset_state()
    if device == "auto" or (device == "cuda" and launched()):  # the variable would put all processes on the first GPU
        os.environ.pop(DEVICE_VARIABLE, None)
    else:
        os.environ[DEVICE_VARIABLE] = device
    # accelerate joins processes on CPUs only if it is told to use them
    together = launched() and "LOCAL_RANK" in os.environ  # by torchrun or accelerate; others may set RANK for one process
    cpu = device == "cpu" or (device == "auto" and together and not torch.accelerator.is_available())
    joins = together and not torch.distributed.is_initialized()  # a group of ours; one of the caller's is the caller's to end
    if joins:
        atexit.register(_end_group)
    try:
        with telling_of_waits() if joins else nullcontext():
            made = Accelerator(cpu=cpu, mixed_precision=resolved_precision(precision, device))
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"device: {device} with precision {precision} cannot be used ({error})") from error
    asked = int(os.environ.get("WORLD_SIZE") or 1) if together else 1
    if made.num_processes != asked:
        raise UsageError(
            f"device: {asked} processes were launched, but did not join ({made.num_processes} here, on {made.device}): each "
            "would do the whole run. Launch one, or name another device (or unset RANK, LOCAL_RANK and WORLD_SIZE)"
        )
    return made


def resolved_precision(precision: str, device: torch.device | str = "auto") -> str:
    """no, bf16 or fp16; "auto" becomes the fastest on a device: bf16 where it is faster than float32, otherwise no.

    device: as in a recipe.

        >>> resolved_precision("bf16", "cpu")
        'bf16'
    """
    if precision != "auto":
        return precision
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    return "bf16" if fast_bfloat16(torch.device(device)) else "no"


def refuse_sharding() -> None:
    """Refuse launches that divide the weights: prior groups, masks and pruning need whole layers, not each rank's part."""
    for name, variable in SHARDED.items():
        if os.environ.get(variable, "false").lower() in ("1", "true", "yes"):
            raise UsageError(
                f"accelerate: {name} divides the weights among processes, but relevance is decided on whole layers; "
                "launch without it (DDP: accelerate launch --multi_gpu, or torchrun)"
            )


def _refuse_one_for_all(device: str) -> None:
    """Refuse a numbered GPU for several processes on one machine: each needs one of its own."""
    beside = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    if launched() and "LOCAL_RANK" in os.environ and beside > 1 and device.startswith("cuda:"):
        raise UsageError(
            f"device: {device} cannot be shared by the {beside} processes that were launched; use auto or cuda, and each takes "
            "a GPU of its own"
        )


def _check(device: str) -> None:
    if device == "auto":
        return
    try:
        kind = torch.device(device)
    except RuntimeError:
        raise UsageError(f"device: unknown {device!r}; use auto, cpu, cuda, cuda:1 or mps") from None
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(kind.type, False):
        raise UsageError(f"device: {device} is not available on this machine; use auto or cpu")
    if kind.type == "cuda" and (kind.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device: {device} is not available; this machine has {torch.cuda.device_count()} CUDA devices")


@dataclass(frozen=True)
class Place:
    """The place of a process in a launch: its device, its rank, and the number of processes."""

    device: torch.device
    rank: int
    world: int

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0


@accelerate_kept()
def find_place(device: str = "auto") -> Place:
    """The place of this process; joins the other processes of a launch, if there are any."""
    accelerator = make_accelerator(device)
    return Place(accelerator.device, accelerator.process_index, accelerator.num_processes)


def broadcast_weights(model: torch.nn.Module) -> None:
    """Give all processes of a launch the first one's weights and buffers, bit for bit."""
    if not launched():
        return
    from accelerate import utils

    for tensor in (*model.parameters(), *model.buffers()):
        sent = tensor.detach().contiguous()
        utils.broadcast(sent)  # in place
        if sent.data_ptr() != tensor.data_ptr():  # a copy, of a tensor in another layout
            tensor.detach().copy_(sent)


def wait() -> None:
    """Wait until all processes of a launch have arrived here; does nothing in a run of one process."""
    if launched():
        from accelerate.utils import wait_for_everyone

        wait_for_everyone()


def broadcast(value: Value) -> Value:
    """The first process's value, in all processes of a launch."""
    if not launched():
        return value
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([value])[0]


def on_first(place: Place, work: Callable[[], Value]) -> Value | None:
    """Do something in the first process alone, while the others wait; returns the result there, None on others. Its SvdcError
    is raised in all; of any other exception, the others get a TrainingError that names it.

    Without that the others would wait until the first one ends, which a script that catches the error doesn't.
    """
    found, failed = tried(work, broadcast, "the first process") if place.first else (None, None)
    if failed := broadcast(failed):
        raise failed
    return found


def _end_group() -> None:
    """End gloo's process group as the process ends: its threads would abort a process that ends before them. Other
    backends end by themselves, and could wait here for a process that has failed."""
    if torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo":
        gc.collect()  # a wrapped model is a cycle: freed after its group, it would wait for gloo's thread, which waits for it
        torch.distributed.destroy_process_group()


def leave() -> None:
    """Leave the other processes of a launch, at the very end; without this, the first process to end may abort."""
    if launched():
        from accelerate import PartialState

        wait()
        gc.collect()  # as in `_end_group`
        PartialState().destroy_process_group()
