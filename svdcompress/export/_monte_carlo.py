"""The Monte-Carlo file: the predictive distribution over `samples` draws, in one graph."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from svdcompress.errors import ExportError
from svdcompress.export import _loop, _parity
from svdcompress.export._copies import eval_copy
from svdcompress.export._draw import NOISE, SAMPLES, Draw, Traced, oracle
from svdcompress.export._inputs import Signature
from svdcompress.export._noise import active_layers, freeze, listen
from svdcompress.export._statistics import TASKS
from svdcompress.export._trace import trace
from svdcompress.export._write import write

if TYPE_CHECKING:
    import onnx_ir as ir

CHECKED_SAMPLES = 3
"""Draws of the comparison with PyTorch."""


@dataclass(frozen=True)
class Options:
    """See `export_onnx`."""

    task: str
    noise: str
    tau: float | None
    dim: int
    parts: bool


class MonteCarlo:
    """Trace and save one; see `export_onnx`. reference: an `eval_copy` of the model."""

    def __init__(self, reference: nn.Module, signature: Signature, options: Options) -> None:
        active = active_layers(reference)
        taken = {SAMPLES, NOISE} & set(signature.names)
        if taken:
            raise ExportError(f"monte_carlo: the model has an input named {taken.pop()!r}, which the file has for itself")
        self.signature, self.options = signature, options
        statistics = TASKS[options.task](options.tau, options.dim, options.parts)
        frozen = eval_copy(reference)
        self._reference = Draw(reference, listen(reference, active), signature, statistics)
        self._frozen = Draw(frozen, freeze(frozen, active), signature, statistics)
        self._reference.probe()
        self._frozen.probe()
        layout = [{"layer": call.layer, "shape": list(call.shape)} for call in self._frozen.calls]
        self.metadata: dict[str, Any] = {"kind": "monte_carlo", "task": options.task, "noise": layout}

    def graph(self, opset: int) -> ir.Model:
        """The graph with the noise as an input; `save` turns it into the form that is asked for."""
        module = Traced(self._frozen)
        graph = trace(module, module.examples, module.argument_names(), module.dynamic, opset)
        _loop.add_loop(graph, self._frozen.sums)
        return graph

    def save(self, graph: ir.Model, path: Path, verify: bool) -> tuple[int, dict[int, float]]:
        """Bytes written, and the largest difference from PyTorch for each batch size (if verified).

        Parity is that of the form with the noise as inputs; the other differs from it in the source of the noise alone.
        """
        parities: dict[int, float] = {}

        def check(file: Path) -> None:
            if verify:
                parities.update(self._compare(file))

        if self.options.noise == "input":
            return write(graph, path, check), parities
        with tempfile.TemporaryDirectory(prefix="svdcompress") as folder:
            write(graph, Path(folder) / path.name, check)
        calls = self._frozen.calls
        _loop.draw_inside(graph, sum(call.per_row for call in calls), sum(call.fixed for call in calls))
        return write(graph, path, self._try if verify else lambda file: None), parities

    def _compare(self, file: Path) -> dict[int, float]:
        session = _parity.session(file)
        result = {}
        for batch in _parity.BATCHES:
            tensors, where = self.signature.varied(batch), f"at batch {batch}"
            generator = torch.Generator().manual_seed(batch)
            noise = torch.randn(CHECKED_SAMPLES, self._reference.size(batch), generator=generator)
            expected = oracle(self._reference, tensors, noise)
            feeds = {**self._feeds(session, tensors), NOISE: noise.numpy()}
            got = _parity.run(session, list(expected), feeds, where)
            pairs = zip(expected.items(), got, strict=True)
            result[batch] = max(_parity.difference(name, ours, theirs.numpy(), where) for (name, theirs), ours in pairs)
        return result

    def _try(self, file: Path) -> None:
        """Run the form that draws: its outputs have the shapes of the batch."""
        session = _parity.session(file)
        names = [value.name for value in session.get_outputs()]
        for batch in _parity.BATCHES:
            got = _parity.run(session, names, self._feeds(session, self.signature.varied(batch)), f"at batch {batch}")
            if any(array.shape[:1] != (batch,) for array in got):
                raise ExportError(f"outputs have the shapes {[array.shape for array in got]} at batch {batch}")

    def _feeds(self, session: Any, tensors: list[Tensor]) -> dict[str, Any]:
        there = {value.name for value in session.get_inputs()}
        feeds = {name: tensor.numpy() for name, tensor in zip(self.signature.names, tensors, strict=True) if name in there}
        return {**feeds, SAMPLES: torch.tensor(CHECKED_SAMPLES).numpy()}
