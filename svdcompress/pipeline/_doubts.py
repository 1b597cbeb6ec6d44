"""The test examples that the small model is least sure of, for the report: prediction, truth and picture."""

from __future__ import annotations

import base64
import math
from typing import Any

import torch
from torch import Tensor

from svdcompress.likelihoods import Likelihood
from svdcompress.sources import Data, Examples
from svdcompress.uncertainty import Gathered

SHOWN = 12
"""The number of examples shown."""

SIDE = 48
"""The longest side of a picture in the report, in pixels; larger pictures are scaled down."""


def doubts(
    found: Gathered, examples: Examples, data: Data, likelihood: Likelihood, places: Tensor | None = None
) -> list[dict[str, Any]]:
    """`doubts` of the report, the least sure first; [] if an example has many targets (pixels, tokens), and for regression.

    found: predictions of all the examples, in their order. They are ranked by the entropy of the predictive distribution.
    places: the index of each example in the test data (None: the examples are all of it).
    """
    single = found.targets.dim() == 1 and len(found.targets) == found.inputs
    if not single or not likelihood.probabilities:
        return []
    order = found.scores["entropy"].argsort(descending=True, stable=True)[:SHOWN]
    inputs, _ = next(iter(examples.subset(order).batches(len(order))))
    pictures = _pictures(inputs, data.preprocessing)
    rows = []
    for place, index in enumerate(order.tolist()):
        mean = found.mean[index]
        guess = int(mean.argmax()) if mean.dim() else int(mean > 0.5)
        sure = float(mean[guess]) if mean.dim() else float(max(mean, 1 - mean))
        row: dict[str, Any] = {
            "example": index if places is None else int(places[index]),
            "truth": _name(int(found.targets[index]), data),
            "guess": _name(guess, data),
        }
        row |= {"confidence": sure, "entropy": float(found.scores["entropy"][index])}
        if "mutual_information" in found.scores:
            row["mutual_information"] = float(found.scores["mutual_information"][index])
        rows.append(row | ({} if pictures is None else {"picture": _compact(pictures[place])}))
    return rows


def _name(label: int, data: Data) -> str:
    names = data.classes or []
    return str(names[label]) if 0 <= label < len(names) else str(label)


def _compact(picture: Tensor) -> dict[str, Any]:
    """A picture as its shape and its bytes in base64: lists of numbers would make up most of the report."""
    return {"shape": list(picture.shape), "base64": base64.b64encode(picture.contiguous().numpy().tobytes()).decode()}


def _pictures(inputs: Any, preprocessing: dict[str, Any]) -> Tensor | None:
    """Inputs as integers from 0 to 255, (N, H, W) or (N, H, W, 3), each scaled by its own range; None if they are no images."""
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        return None
    x = inputs.detach().float().cpu()
    flat = x.dim() == 2 and x.shape[1] >= 16 and math.isqrt(x.shape[1]) ** 2 == x.shape[1]
    if flat and "columns" not in preprocessing and not preprocessing.get("standardized"):
        side = math.isqrt(x.shape[1])
        x = x.view(-1, 1, side, side)
    if x.dim() != 4 or x.shape[1] not in (1, 3) or min(x.shape[2:]) < 4:
        return None
    if max(x.shape[2:]) > SIDE:
        factor = SIDE / max(x.shape[2:])
        size = [max(1, round(n * factor)) for n in x.shape[2:]]
        x = torch.nn.functional.interpolate(x, size, mode="area")
    low, high = x.amin((1, 2, 3), keepdim=True), x.amax((1, 2, 3), keepdim=True)
    grey = ((x - low) / (high - low).clamp_min(1e-12) * 255).round().to(torch.uint8)
    return grey[:, 0] if grey.shape[1] == 1 else grey.permute(0, 2, 3, 1)
