"""Fits one layer of a model to its former outputs: whether it can be fitted, to how many rows, and the fit itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.errors import UsageError
from svdcompress.layers import VariationalLayer
from svdcompress.reconstruction._solve import solve

ROWS, WIDEST = 16_384, 4096
"""Rows that a layer is fitted to: `ROWS`, or 32 for each input of its matrix product if that is more; but only `WIDEST` if
there are more inputs than that, as the system of the rows is solved then."""

INPUTS = 512
"""Inputs of a layer's matrix product for which `ROWS` rows are enough."""

NUMBERS = 2**27
"""Most numbers to hold at a time: in the rows of one layer, and in the kept outputs of all layers."""

HELD = 0.2
"""Share of the rows that are held out to choose the ridge: the last ones."""

EXACT, ROUGH = 1e-12, 1e-10
"""Share of the variance of a layer's outputs below which its error is rounding and it is left as it is: in double and in
single precision."""

FEWEST = 10
"""Fewest rows of which a fifth can be held out."""


@dataclass(frozen=True)
class LayerError:
    """Error of a layer's outputs compared with those before the cut, on held-out rows: squared error over their variance.

    before: with the old weights, after: with the fitted ones; both after layers that are already refitted.
    """

    name: str
    before: float
    after: float


@dataclass(frozen=True)
class Target:
    """A layer's former outputs. rows: (rows, outputs) of them; at: indices of these rows. shape: of the layer's input."""

    at: Tensor
    rows: Tensor
    shape: torch.Size


def unfit(layer: VariationalLayer, mask: Tensor) -> str | None:
    """Why the weight of a layer cannot be fitted; None if it can."""
    if not layer.weight.requires_grad:
        return "it is frozen"
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):
        return "it is a transposed convolution"
    view = layer.canonical(mask)
    outputs, inputs = alive(view)
    if not torch.equal(view, (outputs[:, :, None] & inputs[:, None])[..., None].expand_as(view)):
        return "its mask does not consist of whole units"
    return None


def alive(view: Tensor) -> tuple[Tensor, Tensor]:
    """Which outputs and inputs have a weight left in a mask's canonical view, (groups, outputs) and (groups, inputs)."""
    return view.any(3).any(2), view.any(3).any(1)


def rows_of(layers: Mapping[str, VariationalLayer], rows: int) -> dict[str, int]:
    """How many rows each layer is fitted to."""
    counts = {}
    for name, layer in layers.items():
        columns = layer.canonical(layer.weight)[0, 0].numel()
        wanted = WIDEST if columns > WIDEST else rows * max(1, columns // INPUTS)
        counts[name] = max(1, min(wanted, NUMBERS // (columns * layer._groups)))
    kept = sum(count * _outputs(layers[name]) for name, count in counts.items())
    share = min(1.0, NUMBERS / max(kept, 1))
    return {name: max(1, int(share * count)) for name, count in counts.items()}


def _outputs(layer: VariationalLayer) -> int:
    view = layer.canonical(layer.weight)
    return view.shape[0] * view.shape[1]


def refit(name: str, layer: VariationalLayer, target: Target, given: Any) -> LayerError | str:
    """Fit a layer, whose mask is frozen, to rows of its former outputs; returns its error, or why it is not fitted.

    given: its positional and keyword arguments now. Raises UsageError if what it reads or gave is not finite.
    """
    at, wanted = target.at, target.rows
    x, args, kwargs = input_of(*given)
    if x.shape != target.shape:
        return "it reads inputs of another shape after the cut"
    if len(at) < FEWEST:
        return f"it produced only {len(at)} rows"
    exact = torch.float32 if wanted.device.type == "mps" else torch.float64  # MPS has no double precision
    seen, wanted = layer.windows(x, at, *args, **kwargs), wanted.to(exact)
    seen = seen.to(exact if seen.shape[2:].numel() <= len(at) else torch.float32)  # few rows of many inputs need no more
    if not (seen.isfinite().all() and wanted.isfinite().all()):
        raise UsageError(f"inputs: the inputs or outputs of layer {name!r} are not finite; look for NaN in inputs and weights")
    assert layer.mask is not None
    view, mask = layer.canonical(layer.weight.detach()), layer.canonical(layer.mask)
    outputs, inputs = alive(mask)
    held = round(HELD * len(at))
    wanted = wanted.reshape(len(at), *outputs.shape)
    bias = None if layer.bias is None else layer.bias.detach().reshape(outputs.shape)
    learns = layer.bias is not None and layer.bias.requires_grad
    missed, left, spread = 0.0, 0.0, 0.0
    weight, shifted = view.clone(), None if bias is None else bias.clone()
    for group, (outs, ins) in enumerate(zip(outputs, inputs, strict=True)):
        if not (outs.any() and ins.any()):
            continue
        x, y = seen[:, group, ins].flatten(1), wanted[:, group, outs]
        now = view[group][outs][:, ins].to(exact).flatten(1)
        residual = y - (x @ now.T.to(x.dtype)).to(exact) - (0 if bias is None else bias[group, outs].to(exact))
        own = float((y - y.mean(0)).square().sum()) * held / len(y)
        spread += own
        if float(residual.square().sum()) <= (EXACT if x.dtype == exact else ROUGH) * own:
            continue
        found = solve(x, residual, held, intercept=learns)
        new = (now + found.change).reshape(int(outs.sum()), int(ins.sum()), -1)
        rows = weight[group][outs]
        rows[:, ins] = new.to(weight.dtype)
        weight[group, outs] = rows
        if shifted is not None and learns:
            shifted[group, outs] += found.shift.to(shifted.dtype)
        missed, left = missed + found.before, left + found.after
    if not spread > 0:
        return "its outputs don't vary"
    if missed > 0:
        layer.weight.copy_(layer.as_weight(weight))
        if shifted is not None and layer.bias is not None and learns:
            layer.bias.copy_(shifted.reshape(-1))
    return LayerError(name, missed / spread, left / spread)


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """A layer's input, positional or by keyword, and its other positional and keyword arguments."""
    if args:
        return args[0], args[1:], kwargs
    name = "input" if "input" in kwargs else "x"
    return kwargs[name], (), {key: value for key, value in kwargs.items() if key != name}
