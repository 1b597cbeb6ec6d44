"""The deterministic file: the model in `eval()`, as dense layers with irrelevant weights at 0."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from svdcompress.errors import ExportError
from svdcompress.export import _parity
from svdcompress.export._copies import eval_copy
from svdcompress.export._inputs import Signature
from svdcompress.export._noise import freeze
from svdcompress.export._outputs import Positional
from svdcompress.export._trace import TRACE_BATCH, check_sizes, strip_shapes, trace
from svdcompress.export._write import write

if TYPE_CHECKING:
    import onnx_ir as ir


def check_sizes_of(reference: nn.Module, signature: Signature) -> None:
    """Check that other sizes of the open dimensions lead the model's code the same way; see `check_sizes`."""
    plain = eval_copy(reference)
    freeze(plain)
    tensors = signature.resized(TRACE_BATCH)
    check_sizes(Positional(plain, signature, tensors), tensors, signature.open)


class Deterministic:
    """Traces and saves a deterministic file; see `export_onnx`. reference: an `eval_copy` of the model."""

    def __init__(self, reference: nn.Module, signature: Signature) -> None:
        self.reference, self.signature = reference, signature
        self.metadata: dict[str, Any] = {"kind": "deterministic"}
        self.parities: dict[int, float] = {}

    def graph(self, opset: int, verify: bool) -> ir.Model:
        """The graph to save."""
        plain = eval_copy(self.reference)
        freeze(plain)
        module = Positional(plain, self.signature, self.signature.resized(TRACE_BATCH))

        def examples(batch: int) -> list[Tensor]:
            return self.signature.tried(batch, module.named)[0]

        axes = self.signature.open
        graph = trace(module, examples, self.signature.names, axes.dynamic, axes.axes, opset)
        _name_transposed(graph, plain)
        strip_shapes(graph)
        return graph

    def save(self, graph: ir.Model, path: Path, verify: bool) -> int:
        """Write the file; returns its bytes. With `verify`, `parities` then has the largest difference for each batch
        size."""

        def check(file: Path) -> None:
            if verify:
                self.parities.update(compare(file, self.reference, self.signature))

        return write(graph, path, check)


def _name_transposed(graph: ir.Model, module: nn.Module) -> None:
    """Give weights that the exporter transposed (those of Linear layers whose inputs have three dimensions or more) the names
    of their parameters, instead of val_0."""
    values = graph.graph.initializers
    named = {str(name) for name in values}
    known: dict[tuple[int, ...], list[tuple[str, np.ndarray]]] = {}
    for name, parameter in module.named_parameters():
        if parameter.dim() == 2 and name not in named:
            known.setdefault(tuple(parameter.shape)[::-1], []).append((name, parameter.numpy().T))
    parameters = {name for name, _ in module.named_parameters()}
    for value in list(values.values()):
        if value.const_value is None or value.name in parameters:
            continue
        array = value.const_value.numpy()
        for name, theirs in known.get(array.shape, []):
            if name not in named and np.array_equal(array, theirs):
                value.name = name
                named.add(name)
                break


def compare(path: Path, model: nn.Module, signature: Signature, batches: Sequence[int] = _parity.BATCHES) -> dict[int, float]:
    """Largest difference of a deterministic file from PyTorch for each batch size. model: an `eval_copy`."""
    module = Positional(model, signature, signature.resized(batches[0]))
    session = _parity.session(path)
    there = [value.name for value in session.get_inputs()]
    if set(there) - set(signature.names):
        raise ExportError(f"{path.name}: its inputs are {', '.join(there)}, not {', '.join(signature.names)}")
    cases = {batch: signature.tried(batch, module.named) for batch in batches}

    def got(batch: int) -> list[np.ndarray]:
        feeds = {name: tensor.numpy() for name, tensor in zip(signature.names, cases[batch][0], strict=True) if name in there}
        return _parity.run(session, module.names, feeds, f"at batch {batch}")

    def double(batch: int) -> dict[str, Tensor]:
        return copy.deepcopy(module).double().named(_parity.widened(cases[batch][0]))

    return _parity.differences({batch: outputs for batch, (_, outputs) in cases.items()}, got, double)
