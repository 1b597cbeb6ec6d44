"""Test data made worse by degrees: corrupted images, noisy or missing values, masked words, at five levels each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from svdcompress.batch import map_tensors
from svdcompress.uncertainty._gather import Batches, head
from svdcompress.uncertainty._outside import are_ids, differ, free_tokens

LEVELS: dict[str, tuple[float, ...]] = {
    "blur": (0.02, 0.04, 0.06, 0.09, 0.12),
    "noise": (0.05, 0.1, 0.2, 0.3, 0.5),
    "contrast": (0.8, 0.6, 0.4, 0.25, 0.1),
    "rotation": (10.0, 20.0, 30.0, 45.0, 60.0),
    "occlusion": (0.2, 0.3, 0.4, 0.5, 0.6),
    "noisy values": (0.1, 0.25, 0.5, 1.0, 2.0),
    "missing values": (0.1, 0.2, 0.3, 0.5, 0.7),
    "masked words": (0.1, 0.2, 0.3, 0.5, 0.7),
}
"""What the levels 1 to 5 mean. blur: standard deviation as a fraction of the image's side. noise: standard deviation as a
fraction of the data's range. contrast: the fraction that is left. rotation: degrees, to either side. occlusion: a rectangle's
sides as fractions of the image's. noisy values: standard deviation in units of the column's. missing values, masked words: the
probability that each is lost."""

IMAGES = ("blur", "noise", "contrast", "rotation", "occlusion")

Corruption = Callable[[Tensor, float, torch.Generator], Tensor]


def shifts(
    test: Batches, seed: int = 0, limit: int = 2000, image_shape: Sequence[int] | None = None
) -> dict[str, list[Batches]]:
    """The first test batches, up to about `limit` inputs, corrupted: {kind: [uncorrupted, level 1, ..., level 5]}.

    Images (B, C, H, W), or rows of numbers that are flattened images of `image_shape`, are blurred, get noise, lose contrast,
    are rotated or partly hidden, in the manner of Hendrycks & Dietterich 2019 but on the model's own inputs, whatever their
    normalization. Other floating-point inputs (columns of tables, series) get noise on each number, or lose numbers, which the
    column's mean replaces; constant columns do not change. Token ids (alone, or as `input_ids`) lose words, which are hidden
    by the attention mask if there is one, else replaced by random ones. A kind that does not change the first batch is left
    out.

    See `LEVELS` for the levels. The same seed gives the same corruptions. Raises nothing of its own; {} for inputs of unknown
    kind.
    """
    some = head(test, limit)
    seen = _numbers(some)
    found: dict[str, list[Batches]] = {}
    if seen is not None:
        shape = _image_shape(seen, image_shape)
        kinds = _of_images(seen, shape) if shape else _of_columns(seen)
        for kind, corrupt in kinds.items():
            found[kind] = [some, *(_changed(some, partial(_apply, corrupt, level), seed) for level in LEVELS[kind])]
    else:
        name = "masked words"
        found[name] = [some, *(_changed(some, None, seed, level) for level in LEVELS[name])]
    return {kind: levels for kind, levels in found.items() if differ(levels[0], levels[-1])}


def _numbers(batches: Batches) -> Tensor | None:
    """The first floating-point tensor of each batch's inputs, concatenated; None if one has none or their shapes differ."""
    parts: list[Tensor] = []
    for inputs, _ in batches():
        found: list[Tensor] = []
        map_tensors(inputs, lambda t, found=found: found.append(t) if t.is_floating_point() and t.dim() > 1 else None)
        if not found:
            return None
        parts.append(found[0].detach().cpu())
    return torch.cat(parts) if parts and len({part.shape[1:] for part in parts}) == 1 else None


def _image_shape(seen: Tensor, given: Sequence[int] | None) -> tuple[int, int, int] | None:
    if seen.dim() == 4:
        return (int(seen.shape[1]), int(seen.shape[2]), int(seen.shape[3]))
    if given is not None and len(given) == 3 and seen.dim() == 2 and math.prod(given) == seen.shape[1]:
        return (int(given[0]), int(given[1]), int(given[2]))
    return None


def _of_images(seen: Tensor, shape: tuple[int, int, int]) -> dict[str, Corruption]:
    low, high, mean = float(seen.min()), float(seen.max()), float(seen.mean())

    def laid_out(work: Corruption) -> Corruption:
        def corrupt(x: Tensor, level: float, generator: torch.Generator) -> Tensor:
            return work(x.reshape(-1, *shape), level, generator).reshape(x.shape)

        return corrupt

    def noise(x: Tensor, level: float, generator: torch.Generator) -> Tensor:
        drawn = torch.randn(x.shape, generator=generator).to(x)
        return (x + level * (high - low) * drawn).clamp(low, high)

    def occlude(x: Tensor, level: float, generator: torch.Generator) -> Tensor:
        return occlusion(x, level, generator, mean)

    kinds: dict[str, Corruption] = {
        "blur": lambda x, level, _: blur(x, level),
        "noise": noise,
        "contrast": lambda x, level, _: contrast(x, level),
        "rotation": rotation,
        "occlusion": occlude,
    }
    return {kind: laid_out(kinds[kind]) for kind in IMAGES}


def blur(x: Tensor, level: float) -> Tensor:
    """Images (B, C, H, W) convolved with a normal density of standard deviation `level` sides; edge pixels are repeated."""
    for axis in (2, 3):
        sigma = max(level * x.shape[axis], 1e-3)
        reach = max(1, math.ceil(3 * sigma))
        at = torch.arange(-reach, reach + 1, dtype=x.dtype, device=x.device)
        kernel = torch.exp(-0.5 * (at / sigma) ** 2)
        kernel = (kernel / kernel.sum()).view(1, 1, -1, 1) if axis == 2 else (kernel / kernel.sum()).view(1, 1, 1, -1)
        padding = (0, 0, reach, reach) if axis == 2 else (reach, reach, 0, 0)
        flat = F.pad(x.flatten(0, 1).unsqueeze(1), padding, mode="replicate")
        x = F.conv2d(flat, kernel).squeeze(1).view(x.shape)
    return x


def contrast(x: Tensor, level: float) -> Tensor:
    """Each image (B, C, H, W) pulled towards its own mean: deviations are multiplied by `level`."""
    mean = x.mean((1, 2, 3), keepdim=True)
    return mean + level * (x - mean)


def rotation(x: Tensor, level: float, generator: torch.Generator) -> Tensor:
    """Images (B, C, H, W) rotated about their center by `level` degrees, each to a random side; edge pixels are repeated."""
    side = torch.randint(0, 2, (len(x),), generator=generator) * 2 - 1
    angle = torch.deg2rad(level * side.to(x))
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    height, width = x.shape[2:]  # the grid runs from -1 to 1 along both sides, whatever their lengths
    rows = [[cos, -sin * height / width, zero], [sin * width / height, cos, zero]]
    grid = F.affine_grid(torch.stack([torch.stack(row, 1) for row in rows], 1), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="border", align_corners=False)


def occlusion(x: Tensor, level: float, generator: torch.Generator, value: float) -> Tensor:
    """Images (B, C, H, W), each with a rectangle of `level` times its sides, at a random place, filled with `value`."""
    hidden = torch.ones(len(x), 1, *x.shape[2:], dtype=torch.bool, device=x.device)
    for axis in (2, 3):
        side = x.shape[axis]
        length = max(1, round(level * side))
        start = torch.randint(0, side - length + 1, (len(x), 1), generator=generator).to(x.device)
        at = torch.arange(side, device=x.device)[None]
        inside = (at >= start) & (at < start + length)
        hidden &= inside[:, None, :, None] if axis == 2 else inside[:, None, None, :]
    return torch.where(hidden, torch.full_like(x, value), x)


def _of_columns(seen: Tensor) -> dict[str, Corruption]:
    mean, std = seen.mean(0), seen.std(0, unbiased=False)

    def noise(x: Tensor, level: float, generator: torch.Generator) -> Tensor:
        return x + level * std.to(x) * torch.randn(x.shape, generator=generator).to(x)

    def missing(x: Tensor, level: float, generator: torch.Generator) -> Tensor:
        lost = (torch.rand(x.shape, generator=generator) < level).to(x.device)
        return torch.where(lost, mean.to(x).expand_as(x), x)

    return {"noisy values": noise, "missing values": missing}


def mask_words(inputs: Any, level: float, generator: torch.Generator) -> Any:
    """Inputs whose token ids are each lost with probability `level`, except padding and first or last tokens that all share.

    A lost word is hidden by `attention_mask` if the inputs have one; otherwise an id drawn from the batch's range replaces it.
    """
    inputs = map_tensors(inputs, lambda tensor: tensor)  # turns any kind of mapping into a plain dict
    ids: Any = inputs.get("input_ids") if isinstance(inputs, dict) else inputs
    if not are_ids(ids):
        return inputs
    mask = inputs.get("attention_mask") if isinstance(inputs, dict) else None
    free = free_tokens(ids, mask)
    lost = free & (torch.rand(ids.shape, generator=generator) < level).to(ids.device)
    if isinstance(inputs, dict) and isinstance(mask, Tensor) and mask.shape == ids.shape:
        return {**inputs, "attention_mask": mask.masked_fill(lost, 0)}
    if not bool(free.any()):
        return inputs
    low, high = int(ids[free].min()), int(ids[free].max())
    others = torch.where(lost, torch.randint(low, high + 1, ids.shape, generator=generator).to(ids), ids)
    return {**inputs, "input_ids": others} if isinstance(inputs, dict) else others


def _apply(corrupt: Corruption, level: float, x: Tensor, generator: torch.Generator) -> Tensor:
    return corrupt(x, level, generator)


def _changed(test: Batches, change: Any, seed: int, words: float = 0.0) -> Batches:
    def batches() -> Iterable[tuple[Any, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        for inputs, targets in test():
            if change is None:
                yield mask_words(inputs, words, generator), targets
            else:
                yield map_tensors(inputs, _first_only(change, generator)), targets

    return batches


def _first_only(change: Any, generator: torch.Generator) -> Any:
    """Apply `change` only to the first floating-point tensor of a batch, from which the statistics were taken."""
    done: list[bool] = []

    def apply(tensor: Tensor) -> Tensor:
        if done or not (tensor.is_floating_point() and tensor.dim() > 1):
            return tensor
        done.append(True)
        return change(tensor, generator)

    return apply
