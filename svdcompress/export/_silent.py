"""Removes branches of a graph in which all weights of a layer are zero, so that no input reaches what they give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnx_ir as ir

JOINING = frozenset(("Add", "Div", "Max", "Min", "Mul", "Sub"))
"""Operators in which a branch meets the rest of the model, and that broadcast a smaller constant."""

ACTIVATIONS = ("Celu", "Clip", "Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "PRelu", "Relu", "Selu")
SMOOTH = ("Sigmoid", "Softplus", "Softsign", "Tanh")
NUMBERS = ("Abs", "Cast", "Erf", "Exp", "Identity", "Log", "Neg", "Pow", "Reciprocal", "Sqrt")
CHOICES = ("And", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "Or", "Where")
MEANS = ("BatchNormalization", "GlobalAveragePool", "LayerNormalization", "ReduceMean")

FOLLOWED = frozenset((*ACTIVATIONS, *SMOOTH, *NUMBERS, *CHOICES, *MEANS, *JOINING, "Transpose"))
"""Operators that give the same if a dimension along which all inputs are constant has size 1."""


def without_silent_branches(model: ir.Model) -> None:
    """Replace branches whose value depends on no input by constants, in place.

    A convolution or matrix product with weights of zero gives its bias at every position. What activations and normalizations
    make of that is computed here, with a size of 1 along all dimensions along which it is constant. Where it is added to a
    value of full shape (or multiplied with it, and so on), the constant is read instead, and the nodes that nothing reads any
    more are removed. An added zero goes with the addition. Values without a known shape are left alone.

    The one difference: an input that is not finite would have made such a product NaN.
    """
    import onnx_ir.passes.common as passes

    known: dict[ir.Value, np.ndarray] = {}
    names = (name for number in count() if (name := f"silent-branch-{number}") not in model.graph.initializers)
    joined = False
    for node in list(model.graph):
        if node.domain not in ("", "ai.onnx") or len(node.outputs) != 1:
            continue
        found = _of_zeros(node)
        if found is None and node.op_type in FOLLOWED and any(value in known for value in node.inputs):
            given = [_constant(value, known) for value in node.inputs]
            if all(array is not None for value, array in zip(node.inputs, given, strict=True) if value is not None):
                found = _computed(node, given, model.opset_imports.get("", 20))
            elif node.op_type in JOINING:
                joined |= _joined(model.graph, node, known, names)
        if found is not None and _stands_for(found, node.outputs[0]):
            known[node.outputs[0]] = found
    if joined:
        passes.RemoveUnusedNodesPass()(model)


def _constant(value: ir.Value | None, known: dict[ir.Value, np.ndarray]) -> np.ndarray | None:
    if value is None or value in known:
        return None if value is None else known[value]
    fixed = value.is_initializer() and not value.is_graph_input() and value.const_value is not None
    return value.const_value.numpy() if fixed and value.const_value is not None else None


def _of_zeros(node: ir.Node) -> np.ndarray | None:
    """What a convolution or matrix product gives at every position if its weights are all zero; None if they are not."""
    shape = node.outputs[0].shape
    if node.op_type not in ("Conv", "ConvTranspose", "Gemm", "MatMul") or shape is None:
        return None
    weight = _constant(node.inputs[1], {})
    if weight is None or weight.ndim < 2 or weight.any():
        return None
    bias = None
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        bias = _constant(node.inputs[2], {})
        if bias is None:
            return None
    if node.op_type == "MatMul":
        return np.zeros((*[1] * (len(shape) - 1), weight.shape[-1]), weight.dtype) if weight.ndim == 2 else None
    if node.op_type == "Gemm":
        columns = weight.shape[0 if node.attributes.get_int("transB", 0) else 1]
        beta = np.asarray(node.attributes.get_float("beta", 1.0), weight.dtype)
        return np.zeros((1, columns), weight.dtype) if bias is None else np.broadcast_to(beta * bias, (1, columns))
    channels = shape[1]
    if not isinstance(channels, int):
        return None
    flat = np.zeros(channels, weight.dtype) if bias is None else bias
    return flat.reshape(1, channels, *[1] * (len(shape) - 2))


def _computed(node: ir.Node, given: Sequence[np.ndarray | None], opset: int) -> np.ndarray | None:
    """What a node gives for constants, by onnxruntime; None if that can't be computed, or isn't finite."""
    import onnx
    import onnx_ir as ir
    import onnxruntime

    proto = ir.to_proto(node)
    feeds = {name: array for name, array in zip(proto.input, given, strict=True) if array is not None}
    value = onnx.helper.make_tensor_value_info
    inputs = [value(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape) for name, array in feeds.items()]
    output = onnx.helper.make_empty_tensor_value_info(proto.output[0])
    graph = onnx.helper.make_graph([proto], "constant", inputs, [output])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        found = session.run(None, feeds)[0]
    except Exception:  # one of onnxruntime's: an operator that it doesn't have, or not for these numbers
        return None
    return found if isinstance(found, np.ndarray) and np.isfinite(found).all() else None


def _stands_for(array: np.ndarray, value: ir.Value) -> bool:
    """Whether an array gives a value when it is broadcast along the dimensions in which it has size 1."""
    shape = value.shape
    return (
        shape is not None
        and array.ndim == len(shape)
        and all(size in (1, dim) for size, dim in zip(array.shape, shape, strict=True))
    )


def _joined(graph: ir.Graph, node: ir.Node, known: dict[ir.Value, np.ndarray], names: Iterator[str]) -> bool:
    """Make a node read the constant in place of the branch, if its other inputs have the full shape; whether it does."""
    import onnx_ir as ir

    output = node.outputs[0]
    others = [value for value in node.inputs if value is not None and value not in known]
    if output.shape is None or not others or any(value.shape is None or value.shape != output.shape for value in others):
        return False

    def stored(array: np.ndarray) -> ir.Value:
        value = ir.Value(name=next(names), const_value=ir.Tensor(np.ascontiguousarray(array)))
        graph.register_initializer(value)
        return value

    added = [known[value] for value in node.inputs if value is not None and value in known] if node.op_type == "Add" else []
    plain = len(others) == len(added) == 1 and not output.is_graph_output()
    if plain and not added[0].any():
        output.replace_all_uses_with(others[0])
        return True
    if plain and _by_channel(added[0], output.shape):
        # onnxruntime adds a constant to its blocked layout of channels only in this form
        one, zero = (np.full(added[0].shape[1], number, added[0].dtype) for number in (1, 0))
        parts = [stored(one), stored(added[0].reshape(-1)), stored(zero), stored(one)]
        norm = ir.node("BatchNormalization", [others[0], *parts], {"epsilon": 0.0})
        made = norm.outputs[0]
        made.shape, made.type, made.name = output.shape, output.type, f"{output.name}_shifted"
        graph.insert_before(node, norm)
        output.replace_all_uses_with(made)
        return True
    for place, value in enumerate(node.inputs):
        if value is not None and value in known:
            node.replace_input_with(place, stored(known[value]))
    return True


def _by_channel(array: np.ndarray, shape: ir.Shape) -> bool:
    """Whether a value of a shape has channels in its second dimension, and an array is constant along all others."""
    return array.ndim == len(shape) > 2 and array.size == array.shape[1] == shape[1] and array.dtype == np.float32
