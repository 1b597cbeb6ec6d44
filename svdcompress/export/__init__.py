"""ONNX: deterministic files, Monte-Carlo files, and their parity with PyTorch.

    exported = export_onnx(small, "model.onnx", example_inputs)
    exported = export_onnx(small, "model_mc.onnx", example_inputs, monte_carlo=True)
    exported = write_compact("model.onnx", "model_compact.onnx")

onnx, onnxscript and onnxruntime are imported when a file is written or checked, not with this package.
"""

from svdcompress.export._axes import Axes
from svdcompress.export._bits import added_error, allocated_bits, importance, round_weights, suggested_bits
from svdcompress.export._compact import write_compact
from svdcompress.export._export import Exported, check_open, check_parity, export_onnx
from svdcompress.export._few_bits import FEW_BITS_OPSET, weight_shapes, weights_of, write_few_bits
from svdcompress.export._half import write_half
from svdcompress.export._int8 import Int8
from svdcompress.export._metadata import read_metadata
from svdcompress.export._outputs import as_given
from svdcompress.export._pack import PRECISIONS, Packed, pack
from svdcompress.export._unpack import unpack

__all__ = [
    "FEW_BITS_OPSET",
    "PRECISIONS",
    "Axes",
    "Exported",
    "Int8",
    "Packed",
    "added_error",
    "allocated_bits",
    "as_given",
    "check_open",
    "check_parity",
    "export_onnx",
    "importance",
    "pack",
    "read_metadata",
    "round_weights",
    "suggested_bits",
    "unpack",
    "weight_shapes",
    "weights_of",
    "write_compact",
    "write_few_bits",
    "write_half",
]
