"""A model's outputs, whatever their container, as named tensors."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.batch import main_output
from svdcompress.errors import ExportError, ModelError, SvdcError
from svdcompress.export._inputs import Signature


class Named(dict[str, Tensor]):
    """Outputs that `named_outputs` has named already."""


def named_outputs(output: Any, taken: Sequence[str] = ()) -> dict[str, Tensor]:
    """All tensors of an output, by name.

    The main one (`main_output`: the tensor itself, the first of a tuple, the logits of a dict or dataclass) comes first and
    is called "output". Others keep their key, or are numbered from "output_1"; one that would be called "output" or like an
    input (`taken`) gets a `_`, as the names in a graph are unique.
    """
    if isinstance(output, Tensor):
        return {"output": output}
    found = dict(_leaves(output, ""))
    try:
        main = main_output(output)
    except ModelError as error:
        raise ExportError(str(error)) from error
    outputs = {"output": main}
    if not isinstance(output, tuple | list | Named):
        taken = [*taken, "output_1"]  # a name that `as_given` takes for that of a tuple's second tensor
    for name, tensor in found.items():
        if tensor is not main:
            name = f"output_{name}" if name[0].isdigit() else name
            while name in outputs or name in taken:
                name = f"{name}_"
            outputs[name] = tensor
    return outputs


def as_given(outputs: Mapping[str, Tensor]) -> Any:
    """What a likelihood reads of a file's own outputs, by name: the model's tuple where `named_outputs` numbered all of one,
    so that what is a pair for the model is one for the file; else the main tensor."""
    numbered = ["output", *(f"output_{index}" for index in range(1, len(outputs)))]
    found = list(outputs.values())
    return tuple(found) if len(found) > 1 and list(outputs) == numbered else found[0]


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{name}_{key}" if name else str(key))
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{name}_{index}" if name else str(index))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _leaves({field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, name)
    elif value is not None:
        raise ExportError(f"output {name!r} is a {type(value).__name__}; ONNX holds tensors only (use_cache=False may help)")


@contextlib.contextmanager
def running(model: nn.Module, names: Sequence[str], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Run without gradients, and raise a model's failure as an ExportError about the example inputs."""
    try:
        with torch.no_grad():
            yield
    except SvdcError:
        raise
    except Exception as error:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in zip(names, tensors, strict=True))
        raise ExportError(f"{type(model).__name__} fails on the example inputs ({shapes}): {error}") from error


class Positional(nn.Module):
    """A module that calls a model with the file's inputs by position, and returns its outputs as a plain tuple.

    tensors: inputs with which to find the names of the outputs. Raises ExportError if the model fails on them.
    """

    def __init__(self, model: nn.Module, signature: Signature, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.model = model
        self.signature = signature
        with running(model, signature.names, tensors):
            self.names = list(self.named(tensors))

    def named(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """The model's outputs by their names in the file."""
        return named_outputs(self.signature.call(self.model, tensors), self.signature.names)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.named(tensors).values())
