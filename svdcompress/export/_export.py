"""`export_onnx`, and the check of a file against a model."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from svdcompress.convert import to_dense
from svdcompress.errors import ExportError
from svdcompress.export import _parity
from svdcompress.export._copies import eval_copy
from svdcompress.export._inputs import Signature
from svdcompress.export._metadata import encode
from svdcompress.export._outputs import Positional
from svdcompress.export._trace import TRACE_BATCH, trace
from svdcompress.export._write import write

OPSETS = range(18, 24)
RANDOM_OPS = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial", "Dropout"}


@dataclass(frozen=True)
class Exported:
    """A file that `export_onnx` wrote.

    path, bytes: where it is, and its size (with the external weights, if it has any).
    inputs, outputs: their names, in order.
    parity: largest absolute difference from PyTorch over `batches`, or None if it was not verified.
    parities: the same for each batch size.
    metadata: what `metadata_props` holds. seconds: spent on all of it.
    """

    path: Path
    bytes: int
    inputs: list[str]
    outputs: list[str]
    parity: float | None
    parities: dict[int, float] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; the path by its name alone."""
        return {**dataclasses.asdict(self), "path": self.path.name, "parities": {str(b): p for b, p in self.parities.items()}}


def export_onnx(
    model: nn.Module,
    path: str | Path,
    example_inputs: Any,
    *,
    metadata: Mapping[str, Any] | None = None,
    opset: int = 20,
    verify: bool = True,
) -> Exported:
    """Write a model as ONNX: `eval()`, the means of the weights, irrelevant ones at 0. The model itself is left as it is.

    The first dimension of every input and output is the dynamic "batch"; other dimensions are those of the example.
    The file is checked by onnx.checker, and (`verify`) against PyTorch in onnxruntime at batches of 1, 3 and 7 rows, of which
    only 3 was traced; it appears under `path` only once all of it has passed, and what was there before is lost only then.
    Everything is in one file; weights above 2 GiB, which protobuf cannot hold, go to `<path>.data`. Numbers are float32.

    example_inputs: a tensor (its name in the file: "input"), a tuple of positional inputs or a dict of keyword inputs (names:
        those of the arguments), batch first; values that are not tensors are fixed in the graph.
    metadata: for the file's `metadata_props`; text or anything JSON-able. Versions are added.
    opset: 18 to 23.

    Outputs: the main one is "output"; see `named_outputs` for models with several.
    Raises ExportError for a model that branches on its batch size or on values, that ONNX cannot hold, or whose file disagrees
    with PyTorch; OutputError for a path that cannot be written.
    """
    start = time.perf_counter()
    path = Path(path)
    if opset not in OPSETS:
        raise ExportError(f"opset: {opset} is not in {OPSETS.start} to {OPSETS.stop - 1}")
    reference = eval_copy(model)
    signature = Signature(reference, example_inputs)
    rows = signature.resized(TRACE_BATCH)
    module = Positional(to_dense(eval_copy(reference)), signature, rows)
    props = {**(metadata or {}), **_versions("deterministic")}
    encoded = encode(props)

    graph = trace(module, rows, signature.names, opset)
    _refuse_random(graph)
    _sign(graph, encoded, type(reference).__name__)
    parities: dict[int, float] = {}

    def check(file: Path) -> None:
        if verify:
            parities.update(compare(file, reference, signature))

    size = write(graph, path, check)
    outputs = [value.name for value in graph.graph.outputs]
    parity = max(parities.values()) if verify else None
    return Exported(path, size, signature.names, outputs, parity, parities, props, time.perf_counter() - start)


def check_parity(path: str | Path, model: nn.Module, example_inputs: Any) -> float:
    """Largest absolute difference of a deterministic file from a model in `eval()`, over batches of 1, 3 and 7 rows.

    Raises ExportError beyond the tolerance, for a file that onnxruntime cannot load, or with other inputs than the model's.
    """
    reference = eval_copy(model)
    return max(compare(Path(path), reference, Signature(reference, example_inputs)).values())


def compare(path: Path, model: nn.Module, signature: Signature, batches: Sequence[int] = _parity.BATCHES) -> dict[int, float]:
    """Largest difference of a deterministic file from PyTorch for each batch size. model: an `eval_copy`."""
    module = Positional(model, signature, signature.resized(batches[0]))
    session = _parity.session(path)
    there = [value.name for value in session.get_inputs()]
    if set(there) - set(signature.names):
        raise ExportError(f"{path.name}: its inputs are {', '.join(there)}, not {', '.join(signature.names)}")
    result = {}
    for batch in batches:
        tensors, where = signature.varied(batch), f"at batch {batch}"
        feeds = {name: tensor.numpy() for name, tensor in zip(signature.names, tensors, strict=True) if name in there}
        with torch.no_grad():
            expected = module(*tensors)
        got = _parity.run(session, module.names, feeds, where)
        pairs = zip(module.names, got, expected, strict=True)
        result[batch] = max(_parity.difference(name, ours, theirs.numpy(), where) for name, ours, theirs in pairs)
    return result


def _versions(kind: str) -> dict[str, str]:
    from svdcompress import __version__

    return {"svdcompress_version": __version__, "torch_version": str(torch.__version__), "kind": kind}


def _refuse_random(graph: Any) -> None:
    drawn = sorted({node.op_type for node in graph.graph.all_nodes()} & RANDOM_OPS)
    if drawn:
        raise ExportError(f"the model draws random numbers in eval() ({', '.join(drawn)}), so that no file can agree with it")


def _sign(graph: Any, props: Mapping[str, str], name: str) -> None:
    graph.producer_name, graph.producer_version = "svdcompress", props["svdcompress_version"]
    graph.graph.name = name
    graph.metadata_props.update(props)
