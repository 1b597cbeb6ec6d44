"""Transforms that a recipe names: for all inputs (`data.transform`) and for training batches only (`data.augment`).

Each takes and returns a batch (N, ...); for inputs that are tuples or mappings, it applies to each floating-point tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from svdcompress.batch import map_tensors
from svdcompress.errors import RecipeError, SvdcError, TrustError, out_of_memory, shortened
from svdcompress.sources._names import HOW, import_name, is_python_name

Spec = str | Mapping[str, Any]

LARGEST_SIDE = 8192
"""Most pixels to which a side is resized, or by which it is padded, as a file may ask for any number."""

PURE: dict[str, Callable[..., Any]] = {
    **{f"torch:{function.__name__}": function for function in (
        torch.abs, torch.clamp, torch.exp, torch.flip, torch.log, torch.log1p, torch.nan_to_num, torch.sigmoid, torch.sign,
        torch.sqrt, torch.square, torch.tanh,
    )},
    **{f"torch.nn.functional:{function.__name__}": function for function in (F.normalize, F.relu, F.softmax)},
}  # fmt: skip
"""Functions of torch that only compute, which even a file may name."""


def build(specs: Sequence[Spec], field: str, *, trust_code: bool = False) -> Callable[[Any], Any] | None:
    """A function of a batch that applies a list of transforms in turn; None for an empty list.

    trust_code: allow transforms that are Python functions: for the user's own recipe, not for what a file says.
    Raises RecipeError for an unknown transform, and TrustError for a Python function without `trust_code`. The function
    raises RecipeError for inputs that a transform does not fit.
    """
    steps = [_named(spec, _step(spec, field, trust_code), field) for spec in specs]
    if not steps:
        return None

    def apply(batch: Any) -> Any:
        for step in steps:
            batch = (
                step(batch)
                if isinstance(batch, Tensor)
                else map_tensors(batch, lambda t, s=step: s(t) if t.is_floating_point() else t)
            )
        return batch

    return apply


def _named(spec: Spec, step: Callable[[Tensor], Any], field: str) -> Callable[[Tensor], Any]:
    """The step, with errors that name the field, the step and the shape of its inputs."""
    label = spec if isinstance(spec, str) else "{" + ", ".join(f"{name}: {value}" for name, value in spec.items()) + "}"
    label = shortened(label)

    def apply(x: Tensor) -> Any:
        try:
            out = step(x)
        except SvdcError:
            raise
        except Exception as error:  # torch's own, or whatever a user's function raises
            if out_of_memory(error):
                raise
            shape = ", ".join(["N", *map(str, x.shape[1:])])
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise RecipeError(f"{field}: {label} does not fit inputs of the shape ({shape}): {reason}") from error
        if out is None:
            raise RecipeError(f"{field}: {label} returned nothing; a batch of inputs is needed")
        return out

    return apply


def fit(specs: Sequence[Spec], inputs: Any) -> list[Spec]:
    """The same transforms with statistics of the training inputs written out: `standardize` becomes `normalize`."""
    fitted: list[Spec] = []
    for spec in specs:
        if spec == "standardize":
            spec = {"normalize": _statistics(build(fitted, "data.transform", trust_code=True), inputs)}
        fitted.append(spec)
    return fitted


def as_float(tensor: Tensor) -> Tensor:
    """Bytes as float32 in [0, 1]; floating point as float32; other types unchanged."""
    if tensor.dtype == torch.uint8:
        return tensor.float().div_(255)
    return tensor.float() if tensor.is_floating_point() else tensor


BYTES = (
    "{}: byte inputs (uint8) are divided by 255 like images; pass token ids as int64, and other data (counts, codes) as float32"
)
"""The warning for `flat_bytes`, with the origin of the inputs."""

OWN_BYTES = (
    "{}: byte inputs (uint8) are divided by 255 like images, so they are from 0 to 1; if the model divides them itself, pass "
    "them as float32"
)
"""The note for bytes of the user's own that do have the shape of images, with their origin."""

DIVIDED = "divided by 255"
"""`bytes` of the preprocessing of a run whose inputs, or some of them, are bytes."""


def has_bytes(inputs: Any) -> bool:
    """Whether any input holds bytes, which `as_float` scales."""
    found: list[bool] = []
    map_tensors(inputs, lambda tensor: found.append(tensor.dtype == torch.uint8))
    return any(found)


def flat_bytes(inputs: Any) -> bool:
    """Whether any input holds bytes, which `as_float` scales, but doesn't have the shape of images."""
    found: list[bool] = []
    map_tensors(inputs, lambda tensor: found.append(tensor.dtype == torch.uint8 and tensor.dim() < 3))
    return any(found)


def _statistics(before: Callable | None, inputs: Any) -> dict[str, list[float]]:
    if not isinstance(inputs, Tensor):
        raise RecipeError(
            "data.transform: standardize needs inputs that are one tensor in memory; write normalize with numbers"
        )
    x = before(inputs) if before else inputs
    dims = [0] if x.dim() == 2 else [d for d in range(x.dim()) if d != 1]
    mean, std = x.double().mean(dims), x.double().std(dims, correction=0)
    std[std < 1e-12] = 1.0  # a constant column becomes 0
    return {"mean": mean.tolist(), "std": std.tolist()}


def _step(spec: Spec, field: str, trust_code: bool) -> Callable[[Tensor], Tensor]:
    if isinstance(spec, str):
        name, value = spec, None
    elif len(spec) == 1:
        name, value = next(iter(spec.items()))
    else:
        raise RecipeError(f"{field}: {spec!r}: write one transform per item, such as - normalize: {{mean: 0.5, std: 0.5}}")
    if is_python_name(name):
        if name not in PURE and not trust_code:
            raise TrustError(f"{field}: {name} is Python code, which does not run just because a file names it; {HOW}")
        function = PURE[name] if name in PURE else import_name(name, RecipeError, field)
        return (lambda x: function(x, **value)) if isinstance(value, Mapping) else function
    if name not in TRANSFORMS:
        raise RecipeError(f"{field}: unknown transform {name!r}; use {', '.join(TRANSFORMS)}, or package.module:function")
    try:
        return TRANSFORMS[name](value)
    except (TypeError, ValueError, KeyError, OverflowError, RuntimeError) as error:
        raise RecipeError(f"{field}: {name}: {value!r:.200} does not fit ({shortened(repr(error))})") from error


def _normalize(value: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    mean, std = torch.tensor(value["mean"], dtype=torch.float32), torch.tensor(value["std"], dtype=torch.float32)
    if (std <= 0).any():
        raise ValueError("std must be positive")

    def apply(x: Tensor) -> Tensor:
        channels = x.shape[1] if x.dim() > 1 else 1
        for name, numbers in (("mean", mean), ("std", std)):
            if numbers.numel() not in (1, channels):  # torch would broadcast a gray image to that many channels
                raise ValueError(f"{name} has {numbers.numel()} numbers, but the inputs have {channels} channels or columns")
        shape = (-1,) if x.dim() == 2 else (-1,) + (1,) * (x.dim() - 2)
        return (as_float(x) - mean.view(shape).to(x.device)) / std.view(shape).to(x.device)

    return apply


def _scale(factor: float) -> Callable[[Tensor], Tensor]:
    factor = float(factor)
    return lambda x: as_float(x) * factor


def _noise(std: float) -> Callable[[Tensor], Tensor]:
    std = float(std)
    return lambda x: x + std * torch.randn_like(x)


def _reshape(shape: Sequence[int]) -> Callable[[Tensor], Tensor]:
    sizes = [int(size) for size in shape]
    return lambda x: x.reshape(len(x), *sizes)


def _of_images(step: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Limit a step to images: some of torch's functions take other shapes as well, but do something else with them."""

    def apply(x: Tensor) -> Tensor:
        if x.dim() != 4:
            raise ValueError("it is for images (N, channels, height, width)")
        return step(x)

    return apply


def _check_size(*sides: int) -> None:
    if len(sides) != 2 or any(not 0 <= side <= LARGEST_SIDE for side in sides):
        raise ValueError(f"two sides of at most {LARGEST_SIDE:,} pixels are needed")


def _resize(size: Sequence[int] | int) -> Callable[[Tensor], Tensor]:
    size = [size, size] if isinstance(size, int) else [int(side) for side in size]
    _check_size(*size)
    return _of_images(lambda x: F.interpolate(as_float(x), size=size, mode="bilinear", antialias=True))


def _pad(width: int) -> Callable[[Tensor], Tensor]:
    sides = [int(width)] * 4
    _check_size(sides[0], sides[0])
    return _of_images(lambda x: F.pad(x, sides))


def _crop(pad: int | None) -> Callable[[Tensor], Tensor]:
    """Cut a window of the image's size from the zero-padded image, at a random place for each example."""
    pad = 4 if pad is None else int(pad)
    _check_size(pad, pad)

    def apply(x: Tensor) -> Tensor:
        count, _, height, width = x.shape
        padded = F.pad(x, [pad] * 4)
        top, left = torch.randint(0, 2 * pad + 1, (2, count, 1), device=x.device)
        rows = top + torch.arange(height, device=x.device)  # (N, height)
        columns = left + torch.arange(width, device=x.device)  # (N, width)
        examples = torch.arange(count, device=x.device)
        return padded[examples[:, None, None], :, rows[:, :, None], columns[:, None, :]].movedim(-1, 1).contiguous()

    return _of_images(apply)


def _flip(_: None) -> Callable[[Tensor], Tensor]:
    """Swap left and right in each example with a probability of 1/2."""
    return _of_images(lambda x: torch.where(torch.rand(len(x), 1, 1, 1, device=x.device) < 0.5, x.flip(-1), x))


def _affine(degrees: float = 0.0, shift: float = 0.0, scale: float = 0.0) -> Callable[[Tensor], Tensor]:
    """Rotation by up to `degrees`, shift by up to `shift` of the size, scaling by up to a factor of 1 + `scale`."""

    def apply(x: Tensor) -> Tensor:
        def uniform(limit: float) -> Tensor:
            return (torch.rand(len(x), device=x.device) * 2 - 1) * limit

        angle, size = torch.deg2rad(uniform(degrees)), 1 + uniform(scale)
        cos, sin = angle.cos() / size, angle.sin() / size
        rows = torch.stack([torch.stack([cos, -sin, uniform(2 * shift)], 1), torch.stack([sin, cos, uniform(2 * shift)], 1)], 1)
        return F.grid_sample(x, F.affine_grid(rows, list(x.shape), align_corners=False), align_corners=False)

    return _of_images(apply)


TRANSFORMS: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "normalize": _normalize,
    "scale": _scale,
    "flatten": lambda _: lambda x: x.flatten(1),
    "reshape": _reshape,
    "resize": _resize,
    "pad": _pad,
    "gray": lambda _: _of_images(lambda x: as_float(x).mean(1, keepdim=True)),
    "rgb": lambda _: _of_images(lambda x: x.expand(-1, 3, -1, -1)),
    "crop": _crop,
    "flip": _flip,
    "affine": lambda value: _affine(**value),
    "noise": _noise,
    "standardize": lambda _: lambda x: x,  # `fit` replaces it before it is used
}
"""Name and maker of each transform; a maker takes the value that the recipe gives (None for a bare name)."""
