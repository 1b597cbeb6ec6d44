"""The processes of a launch: as many as when the run began, all with the same data and the same model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from svdcompress.errors import DataError, ModelError, UsageError
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._figures import there
from svdcompress.pipeline._folder import STATE, RunState, resume_command
from svdcompress.pipeline._late import digest
from svdcompress.pipeline._resume import FILES, epochs_done
from svdcompress.pipeline._same_data import checksum
from svdcompress.recipe import Recipe
from svdcompress.sources import Data, InMemory, example_inputs
from svdcompress.train import broadcast_weights, gathered, seed_everything


def check_number(folder: Path, recipe: Recipe, world: int) -> None:
    """Raises UsageError if a run that has trained is resumed with another number of processes: its steps would take another
    number of examples from there on. Runs of earlier versions do not know their number."""
    facts = RunState(folder, writer=False).facts
    before = facts.get("processes")
    if before in (None, world) or facts.get("finished") or not _trained(folder):
        return
    command, how = resume_command(folder, recipe), "without torchrun or accelerate launch"
    if before > 1 and command.startswith("svdc "):
        how = f"torchrun --nproc_per_node {before} -m {command.replace('svdc', 'svdcompress', 1)}"
    elif before > 1:
        how = f"torchrun --nproc_per_node {before}"
    raise UsageError(
        f"--resume: the run in {folder} was begun with {before} process{'es' * (before > 1)}, and {world} would "
        f"take other steps, as batch_size counts per process: continue with {before} ({how}), or start another run with "
        "another --out"
    )


def remember_number(state: RunState, world: int) -> None:
    """Store the number of processes, unless an earlier version has trained with a number that is not known."""
    if state.facts.get("processes") is not None or not _trained(state.out):
        state.put(processes=world)


def check_data(seen: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises DataError in all processes if one has other data than the first. seen: of this process (`_same_data.seen`)."""
    first, *others = gathered(seen)
    for rank, other in enumerate(others, 1):
        for split, stored in first.items():
            if other[split] != stored:
                count, was = other[split]["examples"], stored["examples"]
                how = "other values" if count == was else f"{count:,} examples, not {was:,}"
                raise DataError(
                    f"data: each process must be given all of the data, as it takes its own part of each batch; process {rank} "
                    f"has others than process 0 ({split}: {how})"
                )


def first_examples(context: Context, data: Data, count: int) -> Any:
    """The inputs of the first training examples. With several processes and data that are read as needed, whose values
    `check_data` does not know, warns if they differ."""
    if context.place.world == 1:
        return example_inputs(data.train, count)
    seed_everything(context.recipe.seed, "first examples")  # most random augmentation is alike then
    inputs = example_inputs(data.train, count)
    if len(set(gathered(checksum(inputs)))) > 1 and not isinstance(data.train, InMemory):
        context.warn(
            "the first training examples differ among the processes: unless that is random augmentation, give each process all "
            "of the data, as it takes its own part of each batch"
        )
    return inputs


def one_model(context: Context, model: nn.Module) -> None:
    """Give all processes the first one's dense model, with a note if theirs differed. Raises ModelError in all processes if
    one has another architecture."""
    if context.place.world == 1:
        return
    shapes = {name: list(value.shape) for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    found = gathered((shapes, digest(model)))
    first, own = found[0]
    for rank, (other, _) in enumerate(found):
        if other != first:
            name = next(name for name in (*first, *other) if first.get(name) != other.get(name))
            raise ModelError(
                f"model: process {rank} has another one than process 0 ({name}: {other.get(name, 'missing')}, not "
                f"{first.get(name, 'missing')}); give all of them the same"
            )
    if any(each != own for _, each in found):
        with there(context.place.device, model):
            broadcast_weights(model)
        context.note("the processes had models with other weights, or other buffers: all of them have those of process 0 now")


def _trained(folder: Path) -> bool:
    return any(epochs_done(folder / STATE / name) for name in FILES)
