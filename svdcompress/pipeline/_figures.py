"""The figures of a run: turns models and data into the entries of `report.json`."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from svdcompress import cost
from svdcompress.batch import map_tensors
from svdcompress.pipeline._select import Select, bare
from svdcompress.relevance import Masks
from svdcompress.sources import Data, example_inputs

PACKAGES = ("svdcompress", "torch", "accelerate", "onnx", "onnxruntime", "numpy", "safetensors")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a run's figures depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@contextmanager
def there(device: torch.device, *models: nn.Module) -> Iterator[None]:
    """Move models to a device while the body runs; between stages they stay on the CPU."""
    try:
        for model in models:
            model.to(device)
        yield
    finally:
        for model in models:
            model.cpu()


def macs_of(model: nn.Module, inputs: Any) -> int:
    """Multiply-accumulates for one example; the model must be on the device of the inputs. 0 if they cannot be counted."""
    try:
        return int(cost.measure(model, inputs).to_dict().get("macs") or 0)
    except Exception:  # a model that cannot be counted is taken as small
        return 0


def layer_rows(
    before: dict[str, tuple[int, ...]], masks: Masks, dense: nn.Module, small: nn.Module, inputs: Any
) -> list[dict[str, Any]]:
    """`layers` of the report: shapes, the share of the original weights that is gone, units that have a weight left, MACs."""
    before_by, after_by = (cost.by_layer(model, inputs) for model in (dense, small))
    if isinstance(small, Select):  # a wrapper around the model
        after_by = {name.removeprefix("model."): found for name, found in after_by.items()}
    small = bare(small)
    dense_layers = dict(dense.named_modules())
    after = {name: tuple(p.shape) for name, p in small.named_parameters(remove_duplicate=False)}  # tied layers have one each
    layers = _variational(small)
    left = {name: int(layer.relevant().sum()) for name, layer in layers.items()}
    units = {layer.name: layer for layer in masks.layers}
    rows = []
    for name, shape in before.items():
        count = units[name]
        total = int(np.prod(shape))
        groups = getattr(dense_layers.get(name), "groups", 1)
        had = _sides(shape, groups, getattr(layers.get(name), "transposed", False))
        rows.append(
            {
                "name": name,
                "type": type(dense_layers[name]).__name__ if name in dense_layers else None,
                "shape_before": list(shape),
                "shape_after": list(after.get(f"{name}.weight", ())) or None,
                "sparsity": 1 - left.get(name, 0) / total,
                "weights_before": total,
                "weights": left.get(name, 0),
                "parameters_before": before_by[name].parameters if name in before_by else None,
                "parameters": after_by[name].parameters if name in after_by else None,
                "macs_before": before_by[name].macs if name in before_by else None,
                "macs": after_by[name].macs if name in after_by else None,
                "inputs_before": had[0],
                "inputs": count.inputs,
                "outputs_before": had[1],
                "outputs": count.outputs,
            }
        )
    return rows


def _variational(model: nn.Module) -> dict[str, Any]:
    from svdcompress.layers import variational_layers

    return dict(variational_layers(model))


def _sides(shape: tuple[int, ...], groups: int, transposed: bool) -> tuple[int, int]:
    """A layer's numbers of inputs and outputs, from the shape of its weight: (outputs, inputs / groups, ...), or transposed."""
    one, other = shape[0], shape[1] * groups
    return (one, other) if transposed else (other, one)


def feed(data: Data, file: Path) -> Callable[[int], Any]:
    """A function that makes batches of any size for an ONNX file, from training examples."""
    inputs = example_inputs(data.train, 128)

    def make(batch: int) -> Any:
        def repeat(tensor: Tensor) -> np.ndarray:
            times = -(-batch // len(tensor))
            return tensor.repeat(times, *[1] * (tensor.dim() - 1))[:batch].contiguous().numpy()

        if isinstance(inputs, Tensor):
            return repeat(inputs)
        arrays = map_tensors(inputs, repeat)
        return arrays if isinstance(arrays, dict) else dict(zip(_input_names(file), arrays, strict=True))

    return make


def _input_names(file: Path) -> list[str]:
    import onnx

    return [value.name for value in onnx.load(str(file), load_external_data=False).graph.input]
