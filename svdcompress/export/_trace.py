"""From PyTorch to a clean onnx_ir model: torch.export, with a dynamic batch as a check of the model, then torch.onnx."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from svdcompress.errors import ExportError
from svdcompress.export._axes import BATCH, OpenAxes
from svdcompress.export._silent import without_silent_branches

if TYPE_CHECKING:
    import onnx_ir as ir

TRACE_BATCH = 3
"""Batch size of the trace: torch.export would take 0 and 1 for constants."""

OWN = "mc_"
"""Prefix of the names of what is added to a traced graph."""

RANDOM_OPS = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial", "Dropout"}


DEPENDS = (
    "the model computes something else there than at the example's sizes (a branch on x.shape, or a slice or loop of fixed "
    "length), and a graph holds one way only. Leave these dimensions out, or write the model without"
)


class Traceable(Protocol):
    """A module with the names of its outputs."""

    names: list[str]

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]: ...


def check_sizes(module: Traceable, tensors: Sequence[Tensor], axes: OpenAxes) -> None:
    """Check that what torch.export traces from a module holds at other sizes of the open dimensions, too.

    tensors: examples of TRACE_BATCH rows. Raises ExportError if the module's Python code depends on these sizes.
    """
    with _quiet(), torch.no_grad():
        try:
            program = _unguarded(_export(module, tensors, axes.dynamic(torch.export.Dim("batch"))))
        except ExportError as error:
            raise ExportError(f"dynamic_axes: the model's code fixes these sizes ({_first_line(error)})") from error
        for sizes in axes.nearby():
            told = " and ".join(f"{name} {size}" for name, size in sizes.items())
            given = axes.at(tensors, sizes)
            try:
                expected = module(*given)
            except Exception:  # the model does not take them, so the file need not
                continue
            try:
                same = all(_close(one, other) for one, other in zip(program(*given), expected, strict=True))
            except Exception as error:
                raise ExportError(f"dynamic_axes: {told}: {DEPENDS} ({_first_line(error)})") from error
            if not same:
                raise ExportError(f"dynamic_axes: {told}: {DEPENDS}")


def trace(
    module: Traceable,
    examples: Callable[[int], Sequence[Tensor]],
    names: Sequence[str],
    dynamic: Callable[[Any], Sequence[Mapping[int, Any]]],
    axes: Sequence[Mapping[int, str]],
    opset: int,
) -> ir.Model:
    """The module's graph, with its batch dimension called "batch" and nothing in it about the machine that made it.

    examples: arguments of a batch size. names: of the arguments. dynamic: for each argument {dimension: size}, in terms of
    the batch dimension that is passed to it. axes: for the first arguments {dimension: name}. Raises ExportError for a model
    whose Python code depends on the batch size or on values of tensors.
    """
    import torch.onnx  # before `_quiet`, which silences only the loggers that exist then

    with _quiet(), torch.no_grad():
        program = _export(module, examples(TRACE_BATCH), dynamic(torch.export.Dim("batch")))
        _check_single_row(program, module, examples(1))
        try:
            onnx_program: Any = torch.onnx.export(
                program, (), dynamo=True, opset_version=opset, input_names=list(names), output_names=module.names, verbose=False
            )
        except Exception as error:
            raise ExportError(f"ONNX opset {opset} cannot hold this model: {_first_line(error)}") from error
    model = onnx_program.model
    _refuse_random(model)
    _rename(model, axes)
    without_silent_branches(model)
    _clean(model)
    return model


def _export(module: Any, tensors: Sequence[Tensor], dynamic: Sequence[Mapping[int, Any]]) -> torch.export.ExportedProgram:
    try:
        return torch.export.export(module, tuple(tensors), dynamic_shapes=(tuple(map(dict, dynamic)),), strict=False)
    except ExportError:
        raise
    except Exception as error:
        text = str(error)
        if "batch" in text and ("Constraints violated" in text or "specialized" in text):
            detail = re.search(r"^\s*- (.*)$", text, re.M)
            raise ExportError(
                "the model depends on its batch size, which an ONNX graph would make permanent: a branch on x.shape[0], "
                f"int(x.shape[0]) or a reshape to a constant batch ({detail.group(1) if detail else _first_line(error)})"
            ) from error
        if type(error).__name__ == "GuardOnDataDependentSymNode":
            raise ExportError(
                "the model's Python code depends on values of tensors (an `if` on a tensor, .item(), int(tensor)), which an "
                f"ONNX graph cannot hold: use torch.where or torch.cond ({_first_line(error)})"
            ) from error
        raise ExportError(f"torch.export cannot trace this model: {_first_line(error)}") from error


def _unguarded(program: torch.export.ExportedProgram) -> Callable[..., Any]:
    """What was traced, as a function without torch's guards: these also refuse sizes for which the graph is right."""
    known = inspect.signature(program.module).parameters
    return program.module(**({"check_guards": False} if "check_guards" in known else {}))


def _check_single_row(program: torch.export.ExportedProgram, module: Traceable, tensors: Sequence[Tensor]) -> None:
    """Check a batch of one row: torch.export assumes that a dynamic dimension is not 1, and misses `if batch == 1`."""
    try:
        found = _unguarded(program)(*tensors)
    except Exception as error:
        raise ExportError(f"the traced model fails for a batch of one row ({_first_line(error)})") from error
    for name, traced, expected in zip(module.names, found, module(*tensors), strict=True):
        if not _close(traced, expected):
            raise ExportError(
                f"{name!r} of the traced model differs from PyTorch's for a batch of one row: the model branches on its batch "
                "size or draws random numbers in eval(), which an ONNX graph would make permanent"
            )


def _close(traced: Tensor, expected: Tensor) -> bool:
    return traced.shape == expected.shape and torch.allclose(traced, expected, 1e-3, 1e-4, equal_nan=True)


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    return next((line.strip() for line in str(cause).splitlines() if line.strip()), type(cause).__name__)


def _refuse_random(model: ir.Model) -> None:
    drawn = sorted({node.op_type for node in model.graph.all_nodes()} & RANDOM_OPS)
    if drawn:
        raise ExportError(f"the model draws random numbers in eval() ({', '.join(drawn)}), so no file can agree with it")


def _rename(model: ir.Model, axes: Sequence[Mapping[int, str]]) -> None:
    """Rename dimensions, which torch.export calls s0, s77 ..., to "batch" and the names in `axes`, also within expressions."""
    inputs: Any = model.graph.inputs
    names = {str(inputs[0].shape[0]): BATCH}
    for value, dims in zip(inputs, axes, strict=False):
        names |= {str(value.shape[dim]): name for dim, name in dims.items()}
    rename_dimensions(model, names)


def rename_dimensions(model: ir.Model, names: Mapping[str, str]) -> None:
    """Rename symbolic dimensions, also within expressions."""
    import onnx_ir as ir

    pattern = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")

    def renamed(dim: Any) -> Any:
        return dim if isinstance(dim, int) else pattern.sub(lambda found: names[found.group()], str(dim))

    inner = (value for node in model.graph.all_nodes() for value in node.outputs)
    for value in (*model.graph.inputs, *model.graph.outputs, *inner):
        if value.shape is not None:
            value.shape = ir.Shape([renamed(dim) for dim in value.shape])


def _contiguous(model: ir.Model) -> None:
    """Copy constants that are not contiguous: folded transposed weights are views, which the pass that finds tied weights
    cannot hash."""
    import numpy as np
    import onnx_ir as ir

    for value in model.graph.initializers.values():
        array = value.const_value.numpy() if value.const_value is not None else None
        if array is not None and not array.flags["C_CONTIGUOUS"]:
            value.const_value = ir.tensor(np.ascontiguousarray(array), name=value.name)


def _clean(model: ir.Model) -> None:
    """Remove what identifies the machine (stack traces with paths), and rename values that clash with names of the file."""
    import onnx_ir.passes.common as passes

    passes.ClearMetadataAndDocStringPass()(model)
    merge_constants(model)
    passes.RemoveUnusedNodesPass()(model)
    passes.RemoveUnusedOpsetsPass()(model)
    outer = {*model.graph.inputs, *model.graph.outputs}
    taken = {value.name for value in outer}
    inner = [value for node in model.graph.all_nodes() for value in node.outputs if value not in outer]
    for value in outer:
        value.metadata_props.clear()
    for value in (*inner, *list(model.graph.initializers.values())):
        value.metadata_props.clear()
        name = re.sub(r"^(draw\.)?model\.", "", str(value.name))
        # x.mean() is called "mean", which may be an output's name, too
        value.name = f"inner_{name}" if name in taken or name.startswith(OWN) else name


def merge_constants(model: ir.Model) -> None:
    """Merge equal constants, such as tied weights; the defaults of inputs are left alone."""
    import onnx_ir.passes.common as passes

    _contiguous(model)
    with _quiet():  # it warns of each default that it leaves alone
        passes.DeduplicateHashedInitializersPass()(model)


def strip_shapes(model: ir.Model) -> None:
    """Remove the shapes and types of inner values and constants, which nothing in the file needs."""
    constants = model.graph.initializers.values()
    for value in (*constants, *(value for node in model.graph.all_nodes() for value in node.outputs)):
        if not value.is_graph_output():
            value.shape = value.type = None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch.export and torch.onnx: warnings, log lines, prints."""
    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] in ("torch", "onnxscript", "onnx_ir")]
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger, logger.handlers, logger.propagate) for logger in loggers]
    for logger in loggers:  # loggers created meanwhile pass their lines on to these
        logger.handlers, logger.propagate = [logging.NullHandler()], False
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, handlers, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate
