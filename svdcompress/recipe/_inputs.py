"""The sections of a recipe that say what a run starts from: a network, its weights and the data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from svdcompress.recipe._section import Plain, Section


class ModelSection(Section):
    """Which network: a built-in name, `package.module:factory`, `./file.py:make`, `torchvision:`, `timm:` or `hf:`."""

    name: str | None = None
    args: Plain = {}


class WeightsSection(Section):
    """A checkpoint of the dense model to start from; without one the dense model is trained first.

    trained: whether the factory returns the model with trained weights; None: yes for `hf:` and pretrained models, else no.
    False, with a file: these are weights to start from, such as a pretrained encoder's; names may be missing (a new head) or
    left over, which is reported, and the dense model is trained first.
    """

    file: str | None = None
    strip_prefix: str | None = None
    trained: bool | None = None


Side = Annotated[int, Field(ge=1, le=8192)]
"""Pixels of an image's side."""


class DataSection(Section):
    """Where examples come from, how they are split, and what is done to them on the way in."""

    name: str | None = None
    args: Plain = {}
    root: str | None = None  # folder of the data, for sources that have one; `mnist:DIR` says the same
    target: str | None = None  # column to predict, for tables
    features: list[str] | None = None  # columns to use, for tables; all others by default
    test: str | None = None  # another source for the test set
    test_share: float = Field(default=0.2, gt=0, lt=1)  # held out for the test if a source has no test set of its own
    # A share of the training data, or, from 1 up, a number of its examples. If the weights were trained on them, name other
    # data: another source (csv:FILE, ...), or "test:50%", a share of the test data that the test figures then leave out.
    validation: Annotated[float, Field(gt=0)] | str = 0.1
    split: Literal["random", "tail"] = "random"  # which examples are held out: drawn with split_seed, or the last
    split_seed: int = 0
    transform: list[str | Plain] = []  # for all examples, in order
    augment: list[str | Plain] = []  # for training examples, drawn again each time
    # Inputs to mean 0 and standard deviation 1, before the transforms; auto: columns of a table, if transform is empty.
    standardize: bool | Literal["auto"] = "auto"
    # For regression; figures and files stay in the target's own units. auto: standardize if the inputs are standardized.
    target_scale: Literal["auto", "none", "standardize"] = "auto"
    image_size: tuple[Side, Side] | None = None  # height, width to which image files are resized
    # Use no targets: the model learns from the dense model's answers, and errors are disagreement with it.
    unlabelled: bool = False
    workers: int | None = Field(default=None, ge=0)  # loader processes, for data that do not fit in memory
    # Use at most this many examples, for a quick run: the first ones, or, if these lack classes, drawn with split_seed.
    limit: int | None = Field(default=None, ge=1)
