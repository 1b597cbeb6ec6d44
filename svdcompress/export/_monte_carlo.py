"""The Monte-Carlo file: the predictive distribution over `samples` draws, in one graph."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from svdcompress.errors import ExportError
from svdcompress.export import _loop, _parity
from svdcompress.export._copies import eval_copy
from svdcompress.export._draw import NOISE, SAMPLES, SEED, SUM, DrawModule, Traced, oracle
from svdcompress.export._generator import draw_inside
from svdcompress.export._inputs import Signature
from svdcompress.export._noise import active_layers, freeze, listen
from svdcompress.export._posterior import drawn_whole
from svdcompress.export._rows import RowsError
from svdcompress.export._tempered import Completed, Further
from svdcompress.export._trace import TRACE_BATCH, rename_dimensions, strip_shapes, trace
from svdcompress.export._write import write
from svdcompress.likelihoods import Likelihood

if TYPE_CHECKING:
    import onnx_ir as ir

CHECKED_SAMPLES = 3
"""Number of draws in the comparison with PyTorch."""


@dataclass(frozen=True)
class Options:
    """Options of a Monte-Carlo file; see `export_onnx`."""

    likelihood: Likelihood
    noise: str
    parts: bool
    further: Further | None = None
    target_scale: tuple[float, float] | None = None


class MonteCarlo:
    """Traces and saves a Monte-Carlo file; see `export_onnx`. reference: an `eval_copy` of the model."""

    def __init__(self, reference: nn.Module, signature: Signature, options: Options) -> None:
        active = active_layers(reference)
        taken = {SAMPLES, NOISE, SEED} & set(signature.names)
        if taken:
            raise ExportError(
                f"monte_carlo: the model has an input named {taken.pop()!r}, a name that the file needs for its own input"
            )
        self.signature, self.options = signature, options
        statistics = options.likelihood.statistics(options.parts)
        if options.further is not None or options.target_scale is not None:
            statistics = Completed(statistics, options.target_scale, options.further)
        frozen = eval_copy(reference)
        whole = drawn_whole(reference, signature, (TRACE_BATCH, TRACE_BATCH + 2))
        self._reference = DrawModule(reference, listen(reference, active, whole), signature, statistics)
        self._frozen = DrawModule(frozen, freeze(frozen, active, whole), signature, statistics)
        self._reference.probe()
        self._frozen.probe()
        if taken := set(Traced(self._frozen).names) & set(signature.names):
            raise ExportError(
                f"monte_carlo: the model has an input named {taken.pop()!r}, a name that the file needs for its own output"
            )
        layout = [call.to_dict() for call in self._frozen.calls]
        self.metadata: dict[str, Any] = {"kind": "monte_carlo", "task": options.likelihood.name, "noise": layout}
        self.parities: dict[int, float] = {}
        self._cases: dict[int, tuple[list[Tensor], dict[str, Tensor]]] = {}

    def graph(self, opset: int, verify: bool) -> ir.Model:
        """The graph to save. With `verify`, also sets the parities of the form with the noise as an input, from which a file
        that draws differs only in the source of its noise.

        A round of the loop makes several draws if that is possible and agrees with PyTorch, which is checked even without
        `verify`.
        """
        for several in (True, False):
            graph = self._traced(opset)
            try:
                rounds = _loop.add_loop(graph, self._frozen, several)
                strip_shapes(graph)
                if several or verify:
                    self._verify(graph)
                break
            except (RowsError, ExportError):
                if not several:
                    raise
        if not verify:
            self.parities.clear()
        if self.options.noise != "input":
            draw_inside(graph, rounds, self.options.noise == "seed")
        _loop.finish(graph)
        return graph

    def save(self, graph: ir.Model, path: Path, verify: bool) -> int:
        """Write the file; returns its size in bytes."""
        return write(graph, path, self._try if verify else lambda file: None)

    def _traced(self, opset: int) -> ir.Model:
        module = Traced(self._frozen)
        graph = trace(module, module.examples, module.argument_names(), module.dynamic, self.signature.open.axes, opset)
        _name_sums(graph, self._frozen.sums)
        return graph

    def _verify(self, graph: ir.Model) -> None:
        with tempfile.TemporaryDirectory(prefix="svdcompress") as folder:
            write(graph, Path(folder) / "model.onnx", self._compare)

    def _inputs(self, batch: int) -> list[Tensor]:
        return self._case(batch)[0]

    def _noise(self, batch: int) -> Tensor:
        generator = torch.Generator().manual_seed(batch)
        return torch.randn(CHECKED_SAMPLES, self._reference.size(batch), generator=generator)

    def _case(self, batch: int) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Inputs of a batch size, and PyTorch's outputs for them with `_noise`."""
        if batch not in self._cases:
            noise = self._noise(batch)
            self._cases[batch] = self.signature.tried(batch, lambda tensors: oracle(self._reference, tensors, noise))
        return self._cases[batch]

    def _compare(self, file: Path) -> None:
        session = _parity.session(file)
        self.parities.clear()
        expected = {batch: self._case(batch)[1] for batch in _parity.BATCHES}

        def got(batch: int) -> list[np.ndarray]:
            feeds = {**self._feeds(session, self._inputs(batch)), NOISE: self._noise(batch).numpy()}
            return _parity.run(session, list(expected[batch]), feeds, f"at batch {batch}")

        def double(batch: int) -> dict[str, Tensor]:
            wide = copy.deepcopy(self._reference).double()
            return oracle(wide, _parity.widened(self._inputs(batch)), self._noise(batch).double())

        floor = 1.0 if self.options.likelihood.probabilities else 0.0  # probabilities and nats are measured against 1
        self.parities.update(_parity.differences(expected, got, double, floor))

    def _try(self, file: Path) -> None:
        """Run the file itself, and check that its outputs have a row for each input."""
        session = _parity.session(file)
        names = [value.name for value in session.get_outputs()]
        for batch in _parity.BATCHES:
            feeds = self._feeds(session, self._inputs(batch))
            if self.options.noise == "input":
                feeds[NOISE] = torch.zeros(CHECKED_SAMPLES, self._reference.size(batch)).numpy()
            got = _parity.run(session, names, feeds, f"at batch {batch}")
            if any(array.shape[:1] != (batch,) for array in got):
                raise ExportError(f"outputs have the shapes {[array.shape for array in got]} at batch {batch}")

    def _feeds(self, session: Any, tensors: list[Tensor]) -> dict[str, Any]:
        there = {value.name for value in session.get_inputs()}
        feeds = {name: tensor.numpy() for name, tensor in zip(self.signature.names, tensors, strict=True) if name in there}
        seed = {SEED: torch.tensor(1).numpy()} if SEED in there else {}
        return {**feeds, **seed, SAMPLES: torch.tensor(CHECKED_SAMPLES).numpy()}


def _name_sums(graph: ir.Model, shapes: list[tuple[int | None, ...]]) -> None:
    """Give the open dimensions of the sums, and so of the outputs, the names that they have in the statistics of a draw."""
    sums: Any = [value for value in graph.graph.inputs if str(value.name).startswith(SUM)]
    names = {}
    statistics: Any = graph.graph.outputs
    for total, statistic, shape in zip(sums, statistics, shapes, strict=False):
        names |= {str(total.shape[dim]): str(statistic.shape[dim]) for dim, size in enumerate(shape, 1) if size is None}
    if names:
        rename_dimensions(graph, names)
