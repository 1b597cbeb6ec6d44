"""Integer files, made by onnxruntime's own quantizer and calibrators from a file that `export_onnx` wrote."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import tempfile
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from svdcompress.errors import ExportError, UsageError, shortened
from svdcompress.export._compact import compacted
from svdcompress.export._export import Exported
from svdcompress.export._metadata import read_metadata, rounded
from svdcompress.export._tidy import tidy
from svdcompress.export._written import written

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Operators whose weights become integers."""

BETWEEN = ("Add", "AveragePool", "Clip", "Concat", "Flatten", "GlobalAveragePool", "MaxPool", "Relu", "Reshape", "Transpose")
"""Operators between those that onnxruntime also runs on integers; all others stay in floating point."""

METHODS = {"minmax": "MinMax", "percentile": "Percentile", "entropy": "Entropy"}
"""Methods to find the ranges of activations, with the names of onnxruntime's calibrators."""


class Int8:
    """Integer forms of one ONNX file: weights int8, symmetric, with a scale for each channel; activations uint8; QDQ form.

    src: a deterministic float32 file written by `export_onnx`; it is prepared for the quantizer when that is first needed.
    feeds: batches of training data to calibrate with, each as {input name: array}.

    Raises UsageError without feeds and for a Monte-Carlo file (integers distort its draws: the mutual information was off by
    13% and more), and ExportError if onnxruntime's quantizer fails.

    Example: `Int8("model.onnx", [{"input": images}]).write("model_int8.onnx").bytes`
    """

    def __init__(self, src: str | Path, feeds: Sequence[Mapping[str, np.ndarray]]) -> None:
        self.src, self.feeds = Path(src), list(feeds)
        self.metadata = read_metadata(self.src)
        if self.metadata.get("kind") == "monte_carlo":
            raise UsageError(
                f"{self.src.name}: a Monte-Carlo file must stay in floating point: integers distort the uncertainty of its "
                "draws"
            )
        if not self.feeds:
            raise UsageError("feeds: at least one batch is needed to calibrate with")
        self._folder = tempfile.TemporaryDirectory(prefix="svdcompress")

    @cached_property
    def _prepared(self) -> Path:
        """The file, prepared for the quantizer: batch normalization is folded into convolutions, constants are folded."""
        import onnx
        from onnxruntime.quantization.shape_inference import quant_pre_process

        path = Path(self._folder.name) / "prepared.onnx"
        with _reported(self.src, "prepare"):
            quant_pre_process(str(self.src), str(path), skip_symbolic_shape=True)
        model = onnx.load(str(path))
        for index, node in enumerate(model.graph.node):  # nodes are left out by name
            node.name = node.name or f"node_without_name_{index}"
        onnx.save(model, str(path))
        return path

    @cached_property
    def layers(self) -> dict[str, str]:
        """Nodes whose weights can become integers, in order, as {layer: node}; a layer has the name of its weight."""
        import onnx

        graph = onnx.load(str(self._prepared)).graph
        constants = {tensor.name for tensor in graph.initializer}
        found: dict[str, str] = {}
        for node in graph.node:
            weight = _weight(node, constants)
            if weight is not None and node.name:
                name = weight.removesuffix(".weight")
                found[name if name not in found else node.name] = node.name
        return found

    @cached_property
    def _last(self) -> tuple[list[str], list[str]]:
        """Layers from which no other is reached, and what follows them, such as a return to the target's units, or
        temperatures; by the names of the nodes. Both give floating point: a range of the calibration's few examples would cut
        rarer values off, joined values of different size, such as a mean of thousands and a log variance, would get one scale,
        and nothing is gained by integers."""
        import onnx

        weighted, needed = set(self.layers.values()), set()
        layers: list[str] = []
        others: list[str] = []
        for node in reversed(onnx.load(str(self._prepared)).graph.node):
            led_on = not needed.isdisjoint(node.output)
            if led_on or node.name in weighted:
                needed.update(node.input)
            if not led_on and node.name in weighted:
                layers.append(node.name)
            elif not led_on and node.op_type in BETWEEN:
                others.append(node.name)
        return layers, others

    def write(self, dst: str | Path, *, leave: Collection[str] = (), method: str = "minmax", compact: bool = True) -> Exported:
        """Write the integer file.

        leave: layers that stay in floating point. method: one of METHODS. compact: in the form of `write_compact`, where
        that is smaller. Returns the file, with `parity` None: its difference from the float file has to be measured on data.
        """
        from onnxruntime import quantization as q

        if method not in METHODS:
            raise UsageError(f"method: {method!r} is unknown; one of {', '.join(METHODS)}")
        start, dst = time.perf_counter(), Path(dst)
        unknown = sorted(set(leave) - set(self.layers))
        if unknown:
            raise UsageError(f"leave: {unknown[0]!r} is not a layer of {self.src.name}; it has {', '.join(self.layers)}")
        raw = Path(self._folder.name) / "int8.onnx"
        more: dict[str, Any] = {}
        if "calibration_cache_path" in inspect.signature(q.quantize_static).parameters:  # onnxruntime 1.31
            more["calibration_cache_path"] = str(Path(self._folder.name) / f"{method}.json")
        reader: Any = _Feeds(self.feeds)
        with _reported(self.src, "quantise"):
            q.quantize_static(
                str(self._prepared),
                str(raw),
                reader,
                quant_format=q.QuantFormat.QDQ,
                op_types_to_quantize=[*WEIGHTED, *BETWEEN],
                per_channel=True,
                activation_type=q.QuantType.QUInt8,
                weight_type=q.QuantType.QInt8,
                nodes_to_exclude=[*(self.layers[name] for name in leave), *self._last[1]],
                calibrate_method=q.CalibrationMethod[METHODS[method]],
                **more,
            )
        model = self._signed(raw)
        _open_ends(model, self._last[0])
        if compact:
            tidy(model)
            compacted(model.graph)
        return written(model, dst, start)

    def _signed(self, raw: Path) -> ModelProto:
        """The quantizer's file, with the metadata of the original file and without the shapes of inner values."""
        import onnx

        before, model = onnx.load(str(self.src), load_external_data=False), onnx.load(str(raw))
        model.producer_name, model.producer_version = before.producer_name, before.producer_version
        model.graph.name = before.graph.name
        del model.metadata_props[:], model.graph.value_info[:]
        model.metadata_props.extend(before.metadata_props)
        rounded(model, "int8")
        return model


def _weight(node: NodeProto, constants: Collection[str]) -> str | None:
    """Name of a node's weight if that is a constant, otherwise None."""
    if node.op_type not in WEIGHTED or len(node.input) < 2:
        return None
    return next((name for name in (node.input[1], node.input[0]) if name in constants), None)


def _open_ends(model: ModelProto, layers: Collection[str]) -> None:
    """Let these layers give their sums as they are, without the range that the quantizer found for them. onnxruntime has such
    an integer kernel for matrix products, but none for convolutions, which keep their range."""
    graph = model.graph
    readers: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for value in node.input:
            readers.setdefault(value, []).append(node)
    for layer in [node for node in graph.node if node.name in layers and node.op_type in ("Gemm", "MatMul")]:
        pair = [layer, *readers.get(layer.output[0], [])]
        if len(pair) == 2:
            pair += readers.get(pair[1].output[0], [])
        if [node.op_type for node in pair[1:]] == ["QuantizeLinear", "DequantizeLinear"]:
            layer.output[0] = pair[2].output[0]
            for node in pair[1:]:
                graph.node.remove(node)
    read = {value for node in graph.node for value in node.input}
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in read]:
        graph.initializer.remove(tensor)


class _Feeds:
    """The batches, in the form that onnxruntime's calibrators read."""

    def __init__(self, feeds: Sequence[Mapping[str, np.ndarray]]) -> None:
        self.feeds = iter(feeds)

    def get_next(self) -> dict[str, np.ndarray] | None:
        """The next batch, or None."""
        return next((dict(feed) for feed in self.feeds), None)

    def set_range(self, start_index: int, end_index: int) -> None:
        """Not needed: all batches are read."""


@contextlib.contextmanager
def _reported(src: Path, what: str) -> Iterator[None]:
    """Silence the quantizer's prints and log lines, and raise its errors as ExportError."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    except Exception as error:  # from onnx, onnxruntime or numpy
        reason = shortened(f"{type(error).__name__}: {error}".partition("\n")[0])
        raise ExportError(f"{src.name}: onnxruntime's quantizer cannot {what} it ({reason})") from error
    finally:
        logging.disable(disabled)
