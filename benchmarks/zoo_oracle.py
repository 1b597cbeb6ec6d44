"""What a pruned network has to compute, and how much of it could be removed, found without any of the package's code.

The reference is a plain copy of the dense network with each weight multiplied by its mask. What could be removed is found by
running that copy with its layers cut apart: each layer outputs noise of the right shape, so that what joins the layers (sums,
concatenations, norms, splits, attention) shows which output channel reaches which input channel.

1. An input channel of a layer is dead if the network's input does not reach it through living weights, or if no living weight
   of a living output reads it.
2. An output channel may go if every input channel that it reaches directly may go; an input channel may go if it is dead and
   every output channel that reaches it directly may go. This is repeated until nothing changes.

The weights in such rows and columns, and the biases of such rows, are removable. Limits: norms and other parameters are not
counted. Shapes are ignored, so that the result is too large if a view, split or grouped convolution needs equally many
channels of several parts, or if a layer would lose its last channel. Values are ignored, so that it is too small if a gate is
a constant 0 (a share above 1). A layer is not cut if its weight is used without calling it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

PAIRS = 4
"""The number of examples in each of the two halves that are compared."""

CHANGED = 1e-5
"""Differences between the halves above this share of a tensor's largest value are not rounding."""


def rows_and_columns(layer: Any, tensor: Tensor) -> Tensor:
    """A tensor with the shape of a layer's weight, as (groups, outputs, inputs, positions)."""
    if isinstance(layer, nn.Linear):
        return tensor[None, :, :, None]
    groups, first, second = layer.groups, tensor.shape[0], tensor.shape[1]
    flat = tensor.reshape(groups, first // groups, second, -1)
    return flat.transpose(1, 2) if layer.transposed else flat


def reference(dense: nn.Module, masks: dict[str, Tensor]) -> nn.Module:
    """A copy of the dense network in `eval()` with its weights multiplied by the masks."""
    model = copy.deepcopy(dense).eval()
    with torch.no_grad():
        for name, mask in masks.items():
            layer: Any = model.get_submodule(name)
            layer.weight.mul_(mask)
    return model


class Cut(torch.autograd.Function):
    """A layer of which only the shape is left: noise (`out`) forward, and whatever `back` makes of the gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor, back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return out.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.back(gradients[0]), None, None


class Oracle:
    """Cuts a masked network apart. `removable()` counts; `rows` and `columns` say which channels may go, by layer."""

    def __init__(self, masked: nn.Module, names: list[str], masks: dict[str, Tensor], inputs: Any) -> None:
        self.model = masked
        self.layers: dict[str, Any] = {name: masked.get_submodule(name) for name in names}
        self.alive = {n: rows_and_columns(layer, masks[n]).any(3) for n, layer in self.layers.items()}
        self.inputs = inputs
        self.generator = torch.Generator().manual_seed(0)
        self.called: set[str] = set()

    def _noise(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    @staticmethod
    def _dim(layer: nn.Module, tensor: Tensor) -> int:
        return tensor.dim() - 1 if isinstance(layer, nn.Linear) else 1

    def _spread(self, layer: nn.Module, tensor: Tensor, channels: Tensor) -> Tensor:
        shape = [1] * tensor.dim()
        shape[self._dim(layer, tensor)] = -1
        return channels.reshape(shape)

    def _changed(self, layer: nn.Module, tensor: Tensor) -> Tensor:
        if len(tensor) % (2 * PAIRS):  # made of parameters alone: taken as reached, as it differs between positions
            return torch.ones(tensor.shape[self._dim(layer, tensor)], dtype=torch.bool)
        first, second = tensor.detach().float().chunk(2)
        return self._any(layer, (first - second).abs() > CHANGED * tensor.detach().abs().amax().clamp_min(1e-30))

    def _any(self, layer: nn.Module, tensor: Tensor) -> Tensor:
        return tensor.movedim(self._dim(layer, tensor), 0).flatten(1).any(1)

    @contextmanager
    def _cut(
        self, changes: Callable[[str, Tensor], Tensor], passes: Callable[[str, Tensor], Tensor] | None
    ) -> Iterator[list[Tensor]]:
        """Inside, each layer outputs noise.

        changes: maps the input channels in which the halves differ to the output channels in which they are made to differ.
        passes: maps the output channels that have a gradient to the input channels that get one.
        """
        originals = {}

        def replace(name: str, layer: Any) -> None:
            def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                self.called.add(name)
                with torch.no_grad():
                    true = type(layer).forward(layer, x.detach(), *args, **kwargs)
                    out = self._noise(tuple(true.shape))
                    half = len(out) // 2 if len(out) % (2 * PAIRS) == 0 else 0
                    out[half:] = out[: len(out) - half]
                    differ = self._spread(layer, out, changes(name, self._changed(layer, x))).expand(out[half:].shape)
                    out[half:] = torch.where(differ, 3 * self._noise(tuple(out[half:].shape)), out[half:])

                def back(gradient: Tensor) -> Tensor:
                    if passes is None:
                        return torch.zeros_like(x)
                    channels = passes(name, self._any(layer, gradient != 0))
                    return self._noise(tuple(x.shape)) * self._spread(layer, x, channels)

                return Cut.apply(x if x.requires_grad else x.detach().requires_grad_(), out, back)

            originals[name] = layer
            layer.forward = forward

        for name, layer in self.layers.items():
            replace(name, layer)
        try:
            yield []
        finally:
            for layer in originals.values():
                del layer.forward

    def _halves(self) -> Any:
        def double(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor.repeat((2 * PAIRS,) + (1,) * (tensor.dim() - 1))[: 2 * PAIRS]
            return self._noise((2 * PAIRS, *tensor.shape[1:]))

        return each(double, self.inputs)

    def _forward(self, changes: Callable[[str, Tensor], Tensor]) -> None:
        with self._cut(changes, None), torch.no_grad():
            apply(self.model, self._halves())

    def _backward(self, passes: Callable[[str, Tensor], Tensor]) -> None:
        with self._cut(lambda n, x: torch.zeros(self._outs(n), dtype=torch.bool), passes), torch.enable_grad():
            outputs = [t for t in tensors(apply(self.model, self._halves())) if t.requires_grad]
            torch.autograd.backward(outputs, [self._noise(tuple(t.shape)) for t in outputs])

    def _outs(self, name: str) -> int:
        groups, outs, _ = self.alive[name].shape
        return groups * outs

    def _ins(self, name: str) -> int:
        groups, _, ins = self.alive[name].shape
        return groups * ins

    def find(self) -> None:
        """Fill in `rows` and `columns`: {layer: bool per output or input channel, whether it may go}."""
        reached: dict[str, Tensor] = {}
        needed: dict[str, Tensor] = {}

        def reach(name: str, into: Tensor) -> Tensor:
            reached[name] = reached.get(name, torch.zeros(self._ins(name), dtype=torch.bool)) | into
            alive = self.alive[name]
            return (alive & into.reshape(alive.shape[0], 1, -1)).any(2).reshape(-1)

        def need(name: str, out: Tensor) -> Tensor:
            alive = self.alive[name]
            into = (alive & out.reshape(alive.shape[0], -1, 1)).any(1).reshape(-1)
            needed[name] = needed.get(name, torch.zeros_like(into)) | into
            return into

        self._forward(reach)
        self._backward(need)
        for name in self.layers:
            nothing = torch.zeros(self._ins(name), dtype=torch.bool)
            reached.setdefault(name, ~nothing if name not in self.called else nothing)
            needed.setdefault(name, nothing)
        self.columns = {name: ~(reached[name] & needed[name]) for name in self.layers}
        self.rows = {name: torch.ones(self._outs(name), dtype=torch.bool) for name in self.layers}

        def stays(name: str, into: Tensor) -> Tensor:
            self.columns[name] &= ~into
            return ~self.rows[name]

        def reaches(name: str, out: Tensor) -> Tensor:
            self.rows[name] &= ~out
            return ~self.columns[name]

        for _ in range(100):
            before = sum(int(t.sum()) for t in (*self.rows.values(), *self.columns.values()))
            self._backward(reaches)
            self._forward(stays)
            if before == sum(int(t.sum()) for t in (*self.rows.values(), *self.columns.values())):
                break
        for name in self.layers:
            if name not in self.called:
                self.rows[name][:] = False
                self.columns[name][:] = False

    def removable(self) -> int:
        """The number of weights and biases in rows and columns that may go."""
        self.find()
        total = 0
        for name, layer in self.layers.items():
            groups, outs, ins = self.alive[name].shape
            rows, columns = self.rows[name].reshape(groups, outs, 1), self.columns[name].reshape(groups, 1, ins)
            total += int((rows | columns).sum()) * (layer.weight.numel() // (groups * outs * ins))
            total += 0 if layer.bias is None else int(self.rows[name].sum())
        return total


def each(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply a function to every tensor in a tuple of inputs, or to the only one."""
    return tuple(function(part) for part in value) if isinstance(value, tuple) else function(value)


def apply(model: nn.Module, inputs: Any) -> Any:
    """Call the model with a tuple of inputs, or with the only one."""
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def tensors(value: Any) -> list[Tensor]:
    """Floating-point tensors in nested outputs, in order."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return [tensor for part in parts for tensor in tensors(part)]


def error(found: Any, expected: Any) -> float:
    """The largest difference, as a share of how far apart examples are in its tensor (at least a thousandth of the largest
    value there); infinite if shapes differ or a value is not finite."""
    pairs = list(zip(tensors(found), tensors(expected), strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        return float("inf")
    worst = 0.0
    for a, b in pairs:
        if a.numel():
            size = torch.maximum((b - b.mean(0)).abs().max(), 1e-3 * b.abs().max()).clamp_min(1e-30)
            gap = float((a - b).abs().max() / size)
            worst = max(worst, gap if gap == gap else float("inf"))
    return worst


# Masks


def random_masks(layers: dict[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """Masks without a random half of the weights: hardly any unit can go."""
    return {name: torch.rand(layer.weight.shape, generator=generator) >= 0.5 for name, layer in layers.items()}


def aligned_masks(
    model: nn.Module, layers: dict[str, Any], generator: torch.Generator, share: float = 0.4
) -> dict[str, Tensor]:
    """Masks without whole units, as shapes allow: layers of one width lose the same rows, equally many of each small block.

    In a module with heads, whole heads are removed, by the columns of the layer that joins them; its other layers keep
    theirs. A fifth of the single weights that remain is removed, too.
    """
    blocks: dict[int, int] = {}
    for layer in layers.values():
        groups, outs, ins, _ = rows_and_columns(layer, layer.weight).shape
        if groups > 1 and min(outs, ins) > 1:
            for width in (outs, ins):
                blocks[width * groups] = min(blocks.get(width * groups, width), width)
    dead: dict[int, Tensor] = {}

    def gone(width: int) -> Tensor:
        if width not in dead:
            block = blocks.get(width) or next(
                (b for b in (16, 12, 10, 8, 24, 20, 14, 6, 4) if width % b == 0 and width > b), width
            )
            count = max(round(share * block), 1) if block > 1 else 0
            order = torch.rand(width // block, block, generator=generator).argsort(1)
            dead[width] = (order < count).reshape(-1)
        return dead[width]

    masks = {}
    for name, layer in layers.items():
        groups, outs, ins, positions = rows_and_columns(layer, layer.weight).shape
        keep = torch.rand(groups, outs, ins, positions, generator=generator) >= 0.2
        heads = heads_of(model, name)
        if not heads:
            keep &= ~gone(groups * outs).reshape(groups, outs, 1, 1)
        elif joins_heads(name) and groups == 1 and ins % heads == 0:
            order = torch.rand(heads, generator=generator).argsort()
            keep &= (order >= round(share * heads)).repeat_interleave(ins // heads).reshape(1, 1, ins, 1)
        masks[name] = back(layer, keep)
    return masks


def back(layer: Any, keep: Tensor) -> Tensor:
    """Reshape (groups, outputs, inputs, positions) to the shape of a layer's weight."""
    if not isinstance(layer, nn.Linear) and layer.transposed:
        keep = keep.transpose(1, 2)
    return keep.reshape(layer.weight.shape)


def heads_of(model: nn.Module, name: str) -> int:
    """The number of heads of the module that holds a layer, 0 if it has none."""
    parts = name.split(".")
    for length in range(len(parts) - 1, max(len(parts) - 4, -1), -1):
        if parts[length] in ("mlp", "ffn", "mlp1", "mlp2"):
            return 0
        module = model.get_submodule(".".join(parts[:length]))
        for key in ("num_heads", "num_attention_heads", "n_head", "heads"):
            value = getattr(module, key, 0)
            if type(value) is int and value > 0:
                return value
    return 0


def joins_heads(name: str) -> bool:
    """Whether a layer's name is that of the projection behind the heads."""
    return any(
        part in ("proj", "out_proj", "c_proj", "to_out", "o_proj", "wo", "dense", "projection") for part in name.split(".")
    )
