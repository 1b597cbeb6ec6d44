"""Schemas of what a run's files hold besides tensors and figures; checked once, when the files are read."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Length = Annotated[int, Field(ge=1, lt=2**31)]
Index = Annotated[int, Field(ge=0, lt=2**31)]
Split = Literal["train", "validation", "test"]


class _Part(BaseModel):
    """Values must have exactly these types; other keys are allowed."""

    model_config = ConfigDict(strict=True, extra="allow")


class Preprocessing(_Part):
    """How inputs are read and prepared, as in `Data.preprocessing`."""

    transform: list[str | dict[str, Any]] = []
    columns: list[str] | None = None
    categories: dict[str, list[str]] = {}
    target: str | list[str] | None = None
    tokenizer: str | None = None
    text: str | None = None
    max_length: Length | None = None
    image_size: Annotated[list[Length], Field(min_length=2, max_length=2)] | None = None
    bytes: str | None = None
    target_scale: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    input_shape: list[Index] | None = None


class Selected(_Part):
    """Which inputs a pruned model still reads, and along which dimension."""

    inputs_kept: list[Index] | None = None
    inputs_dim: Index | None = None


class Seen(_Part):
    """A split of the data as it was when the run began."""

    examples: Index
    checksum: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    targets: Annotated[int, Field(ge=0, lt=2**32)] | None = None


class Extra(_Part):
    """`extra` of the manifest of a run's model."""

    preprocessing: Preprocessing | None = None
    classes: list[str] | None = None
    tau: float | None = None
    inputs: Selected | None = None
    data: dict[Split, Seen] | None = None


class Facts(_Part):
    """`state/run.json`. run: the run's name in its states of training; processes: how many it began with; None: an earlier
    version began it. aside: the folder that `--overwrite` moved the former contents to."""

    aside: str | None = None
    run: str | None = None
    processes: Length | None = None
    seconds: dict[str, float] = {}
    unfinished: dict[str, float] = {}
    torch_threads: Length | None = None
    torch_threads_first: Length | None = None
    data: dict[Split, Seen] = {}
    start: str | None = None
    recipe: str | None = None
    finished: bool = False
