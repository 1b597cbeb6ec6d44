"""Warnings about inputs that are not prepared as in training, or of another size."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from svdcompress.errors import SvdcError
from svdcompress.pipeline import OpenRun
from svdcompress.recipe import Recipe
from svdcompress.sources import BYTES, flat_bytes, has_bytes, is_table, made_by, preprocess
from svdcompress.sources.given import shown

Sizes = Mapping[str, Sequence[int]]
"""For the name of each input of a run's ONNX file, its sizes after the batch; 0 where any size is taken."""

LEAST, MOST = -1.0, 2.0
"""Numbers beyond these are not on the scale of bytes that were divided by 255."""


def doubts(path: str | Path, raw: Any, opened: OpenRun) -> list[str]:
    """Warnings about how inputs were prepared, given what the run knows of that. raw: the inputs as they were read."""
    found = (
        unknown_preparation(path, opened.recipe, opened.preprocessing),
        bytes_as_images(path, raw, opened),
        undivided(path, raw, opened.preprocessing),
    )
    return [line for line in found if line]


def unknown_preparation(path: str | Path, recipe: Recipe, preprocessing: Mapping[str, Any]) -> str:
    """The warning for images given to a run whose data a user's function made, which may have prepared them; or ""."""
    images = os.path.isdir(path) or Path(path).suffix.lower() not in (".csv", ".parquet", ".npy", ".npz")
    function = made_by(recipe.data) if images else None
    if not function:
        return ""
    steps = [step if isinstance(step, str) else next(iter(step), "") for step in preprocessing.get("transform") or ()]
    went, more = "without further changes (the run has no data.transform)", "anything else, such as normalizing"
    if steps:
        went, more = f"and then through the run's data.transform ({', '.join(steps)})", "more than that"
    return (
        f"{path}: images, but the run's data come from {shown(function)}, and it is not known how that function prepares an "
        f"image. They are passed in as values in [0, 1], {went}. If the function does {more}, the predictions are wrong: give "
        "an array of prepared inputs instead (.npy)"
    )


def bytes_as_images(path: str | Path, raw: Any, opened: OpenRun) -> str:
    """The warning for bytes, which will be scaled like images, although training had none; or "".

    Of runs of earlier versions it is not known what they had; the shape of images then suffices. Images in files are bytes in
    any case (see `unknown_preparation`), and so are those of known sources of images.
    """
    known = opened.preprocessing
    if is_table(known, raw) or known.get("bytes") or not has_bytes(raw):
        return ""
    if "bytes" not in known:
        return f"{BYTES.format(path)}, unless the run was trained on bytes as well" if flat_bytes(raw) else ""
    name = str(opened.recipe.data.name)
    if not _of_arrays(path) or not (made_by(opened.recipe.data) or name.startswith("npz:")):
        return ""
    return (
        f"{path}: byte inputs (uint8) are divided by 255 like images, but the run was not trained on bytes: unless its inputs "
        "were pixels from 0 to 1, give them as float32, as in training"
    )


def undivided(path: str | Path, raw: Any, preprocessing: Mapping[str, Any]) -> str:
    """The warning for numbers that are far from 0 to 1, in a run that was trained on bytes divided by 255; or "".

    Which of several inputs were bytes is not known, so that only images of whole numbers are doubted there.
    """
    if not preprocessing.get("bytes"):
        return ""
    single = isinstance(raw, Tensor)
    for tensor in [raw] if single else raw.values():
        if tensor.dtype in (torch.uint8, torch.bool) or not tensor.numel():
            continue
        low, high = (float(value) for value in tensor.aminmax())
        doubted = single or (tensor.dim() > 3 and low >= 0 and bool((tensor == tensor.round()).all()))
        if doubted and (low < LEAST or high > MOST):
            return (
                f"{path}: values from {low:.4g} to {high:.4g}, but the run was trained on bytes divided by 255, from 0 to 1: "
                "give bytes as uint8, or divide them by 255"
            )
    return ""


def other_sizes(raw: Any, x: Any, opened: OpenRun, files: Sizes, preprocessing: Mapping[str, Any]) -> str:
    """How the sizes of inputs differ from those in training; "" if they don't, or if it is not known.

    raw, x: the inputs as they were read, and as the model takes them. files: used if the run does not say the shape itself.
    """
    if not isinstance(raw, Tensor):
        pairs = [(f"{name} ", tensor, files[name]) for name, tensor in x.items() if name in files]
    elif known := preprocessing.get("input_shape"):
        pairs = [("", x, _taken(raw, known, opened, preprocessing))] if list(raw.shape[1:]) != list(known) else []
    else:
        pairs = [("", x, sizes) for sizes in files.values()] if len(files) == 1 else []
    told = []
    for name, tensor, wanted in pairs:
        found = list(tensor.shape[1:])
        if wanted is not None and (len(found) != len(wanted) or any(n and n != m for n, m in zip(wanted, found, strict=True))):
            told.append(f"{name}{_text(found)}, not {_text(wanted)}")
    return " and ".join(told)


def warning_of_sizes(path: str | Path, differ: str) -> str:
    """The warning for inputs of other sizes than in training. differ: what `other_sizes` says."""
    return (
        f"{path}: inputs of the shape {differ} as in training: temperatures, intervals and promises (--coverage, "
        "--answer-above) are for inputs like the validation data, and so are the run's figures. Resize the inputs, or check "
        "the predictions"
    )


def _taken(raw: Tensor, known: Sequence[int], opened: OpenRun, preprocessing: Mapping[str, Any]) -> list[int] | None:
    """The sizes of an input of the shape `known` as the model takes it, 0 where the recipe leaves them open; None: unknown."""
    try:
        example = preprocess(raw.new_zeros((1, *known)), preprocessing, trust_code=True)  # all of this has run already
    except SvdcError:
        return None
    anything = {int(dim) for axes in (opened.recipe.export.dynamic_axes or {}).values() for dim in axes}
    return [0 if dim in anything else size for dim, size in enumerate(example.shape) if dim]


def _of_arrays(path: str | Path) -> bool:
    return not os.path.isdir(path) and Path(path).suffix.lower() in (".npy", ".npz")


def _text(sizes: Sequence[int]) -> str:
    return f"({', '.join(str(size) if size else 'any' for size in sizes)}{',' * (len(sizes) == 1)})"
