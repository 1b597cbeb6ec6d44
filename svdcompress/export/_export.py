"""`export_onnx`, and the check of a file against a model."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.batch import unwrapped
from svdcompress.errors import ExportError, UsageError
from svdcompress.export._axes import Axes
from svdcompress.export._copies import eval_copy, unmask_past
from svdcompress.export._deterministic import Deterministic, check_sizes_of, compare
from svdcompress.export._inputs import Signature
from svdcompress.export._metadata import encode, read_metadata
from svdcompress.export._monte_carlo import MonteCarlo, Options
from svdcompress.export._tempered import Further, finished
from svdcompress.likelihoods import Likelihood, resolve
from svdcompress.recipe import LAST_RANDOM_OPSET

OPSETS = range(18, 24)
NOISES = ("random", "seed", "input")


@dataclass(frozen=True, repr=False)
class Exported:
    """An ONNX file, as `export_onnx` and the other functions that write one return it.

    path, bytes: where it is, and its size (with the external weights, if it has any).
    inputs, outputs: their names, in order.
    parity: largest absolute difference from PyTorch over all outputs and batch sizes, or None if it was not verified.
    parities: the same for each batch size.
    metadata: what `metadata_props` holds. seconds: total time spent.
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
        """As a JSON-able dict, with the file's name in place of the path."""
        return {**dataclasses.asdict(self), "path": self.path.name, "parities": {str(b): p for b, p in self.parities.items()}}

    def __repr__(self) -> str:
        checked = "not verified" if self.parity is None else f"off by {self.parity:.1e} at most"
        return f"Exported({str(self.path)!r}, {self.bytes:,} bytes, {checked})"


def export_onnx(
    model: nn.Module,
    path: str | Path,
    example_inputs: Any,
    *,
    monte_carlo: bool = False,
    task: str | Likelihood | None = None,
    noise: str = "random",
    tau: float | None = None,
    dim: int | None = None,
    parts: bool = False,
    target_scale: tuple[float, float] | None = None,
    further: Further | None = None,
    dynamic_axes: Axes | None = None,
    metadata: Mapping[str, Any] | None = None,
    opset: int = 20,
    verify: bool = True,
) -> Exported:
    """Write a model as ONNX; the model itself is not changed.

    Deterministic: the model in `eval()`, with the means of the weights and irrelevant ones at 0. The main output is
    "output": logits are divided by the temperature of the mean model, if the likelihood has one. Other outputs keep their
    key, or are numbered from "output_1". With `monte_carlo`: the predictive distribution over `samples` draws, as from
    `mc_predict`; see the notes below.

    The first dimension of every input and output is the dynamic "batch"; other dimensions are those of the example, except
    for those in `dynamic_axes`. The file is checked by onnx.checker and, with `verify`, run in onnxruntime and compared with
    PyTorch at batches of 1, 3 and 7 rows, of which only 3 was traced; whether the model computes the same way at other sizes
    in `dynamic_axes` is tried first. Of a Monte-Carlo file, the form with the noise as an input is compared; the one that
    draws differs from it only in the source of its noise. Only once all checks have passed does the file appear under `path`
    and replace what was there. Everything is in one file; weights above 2 GiB, which protobuf cannot hold, go to
    `<path>.data`. Numbers are float32.

    example_inputs: a tensor (its name in the file: "input"), a tuple of positional inputs or a dict of keyword inputs
        (names: those of the arguments), batch first; values that are not tensors are fixed in the graph.
    monte_carlo: inputs are the model's and `samples` (int64 scalar, 1 or more); outputs `mean`, `variance`, and
        `predictive_entropy`, `expected_entropy`, `mutual_information` (classification, binary; in nats) or `aleatoric`,
        `epistemic` (regression, gaussian). Shapes: those of `mc_predict`'s results.
    task: "classification" (logits), "binary" (one logit per question), "regression" or "gaussian" (means and log variances),
        or a `Likelihood`. None: the one attached to the model (`set_likelihood`; models of a run have one), or
        classification.
    noise: "random": the file draws, and has an optional input `seed` (int64 scalar). "seed": the same, but the seed is
        required; for runtimes that cannot handle an optional input, such as onnxruntime-web. "input": one more input `noise`
        (samples, numbers), float32, standard normal: the same noise gives the same outputs. Its layout is in the metadata as
        "noise": a list of what one sample draws, in order and each flattened, with the layer, what is drawn of it ("output",
        "weight" or "bias"), and the shape (None: the batch). With "kept", only relevant weights have noise, in the weight's
        order.
    tau: precision of the observations, for regression. dim: the class dimension of the model's output, which is not the
        first. None: those of the likelihood, or no tau, and dimension 1.
    parts: outputs `aleatoric` and `epistemic` for classification and binary, too.
    target_scale: mean and standard deviation of the targets if the model gives standardized values, as those of tau are: the
        Monte-Carlo file then gives values in the targets' own units. Its variances keep their precision, however large the
        targets are. The mean is float32, so it is only as exact as numbers of its size can be.
    further: a function from the file's outputs by name to more outputs, float32; it becomes part of the graph.
    dynamic_axes: dimensions whose size the file leaves open, by input and dimension, with a name for each: {"input": {2:
        "height", 3: "width"}}. Dimensions of one name have one size. At batches of 1 and 7 rows the file is then compared
        with PyTorch at other sizes than the example's. The metadata says which they are.
    metadata: for the file's `metadata_props`; text or anything JSON-able. Versions are added and, if pruning removed input
        features, "inputs": which features of the original model are still read, and along which dimension.
    opset: 18 to 23, but at most 21 for a file that draws.

    A branch that adds a constant, because no weight of its last layer is left, is not in the file: the constant is.

    A Monte-Carlo file computes once what does not depend on noise, and loops over draws for the rest: its memory does not
    grow with `samples`. Sums are float64. A layer whose weights are each used once per row has noise on its output, for each
    row; a layer whose weights are used at several positions (convolutions, tokens, a layer called twice, tied weights) has
    its weights drawn, once for each sample and the same for all rows.

    The random generator is part of the graph. A `seed` of 0 or more gives the same draws again, in any session, process and
    runtime (except for the last bits of log, sin and cos). Without a seed, or with one below 0, each call makes new draws,
    in any session, thread and process: the graph takes a fresh seed from onnxruntime's process-wide counter.

    `samples` or a batch below 1, inputs that are not finite, and a mean or variance that is not finite fail in a node whose
    name says so.

    Raises ExportError for a model that branches on its batch size or on values, that ONNX cannot hold (such as a copy made
    by `to_sparse`), that has nothing to sample (monte_carlo), or whose file disagrees with PyTorch; UsageError for options
    that are unknown or do not go together; OutputError for a path that cannot be written.
    """
    start = time.perf_counter()
    path = Path(path)
    _check_options(monte_carlo, noise, tau is not None or target_scale is not None or parts, opset)
    likelihood = resolve(unwrapped(model), task, dim, tau)
    if monte_carlo:
        _check_tau(likelihood)
    _check_dense(model)
    reference = eval_copy(model)
    unmask_past(reference, example_inputs)
    signature = Signature(reference, example_inputs, dynamic_axes)
    if signature.open and verify:
        check_sizes_of(reference, signature)
    if monte_carlo:
        options = Options(likelihood, noise, parts, further, target_scale)
        work: MonteCarlo | Deterministic = MonteCarlo(reference, signature, options)
    else:
        work = Deterministic(finished(reference, likelihood, further), signature)
    props = {
        **_inputs(model),
        **(metadata or {}),
        **_axes(dynamic_axes),
        **_versions(),
        **work.metadata,
        **_temperature(likelihood, monte_carlo),
    }
    encoded = encode(props)
    graph = work.graph(opset, verify)
    _sign(graph, encoded, type(reference).__name__)
    size = work.save(graph, path, verify)
    parities = work.parities
    inputs, outputs = ([str(value.name) for value in values] for values in (graph.graph.inputs, graph.graph.outputs))
    parity = max(parities.values()) if verify else None
    return Exported(path, size, inputs, outputs, parity, parities, props, time.perf_counter() - start)


def check_parity(
    path: str | Path, model: nn.Module, example_inputs: Any, task: Likelihood | None = None, further: Further | None = None
) -> float:
    """Largest absolute difference of a deterministic file from a model in `eval()`, over batches of 1, 3 and 7 rows.

    task: the likelihood whose temperature is in the file; None: the one attached to the model. further: as for the file.
    Raises ExportError beyond the tolerance, and for a file that onnxruntime cannot load or whose inputs are not the model's.
    """
    reference = eval_copy(model)
    unmask_past(reference, example_inputs)
    finished(reference, resolve(unwrapped(model), task), further)
    signature = Signature(reference, example_inputs, read_metadata(path).get("dynamic_axes"))
    return max(compare(Path(path), reference, signature).values())


def check_open(model: nn.Module, example_inputs: Any, dynamic_axes: Axes) -> list[set[int]]:
    """The open dimensions of each tensor of the inputs, after a check that the model takes other sizes of them.

    Raises UsageError for dimensions that the inputs do not have, and ExportError if it takes no other sizes.
    """
    reference = eval_copy(model)
    signature = Signature(reference, example_inputs, dynamic_axes)
    check_sizes_of(reference, signature)
    return [set(dims) for dims in signature.open.axes]


def _check_dense(model: nn.Module) -> None:
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and value.layout != torch.strided:
            raise ExportError(f"{name}: a sparse tensor, which ONNX cannot hold; export the model that was passed to to_sparse")


def _check_options(monte_carlo: bool, noise: str, of_draws: bool, opset: int) -> None:
    if opset not in OPSETS:
        raise UsageError(f"opset: {opset} is not in {OPSETS.start} to {OPSETS.stop - 1}")
    if monte_carlo and noise != "input" and opset > LAST_RANDOM_OPSET:
        raise UsageError(f"opset: a file that draws can have {OPSETS.start} to {LAST_RANDOM_OPSET} (onnxruntime), not {opset}")
    if noise not in NOISES:
        raise UsageError(f"noise: {noise!r} is unknown; one of {', '.join(NOISES)}")
    if not monte_carlo and (noise != NOISES[0] or of_draws):
        raise UsageError("noise, tau, target_scale and parts belong to monte_carlo=True")


def _check_tau(likelihood: Likelihood) -> None:
    tau = getattr(likelihood, "tau", None)
    if isinstance(tau, Tensor) and tau.numel() > 1:
        raise UsageError(
            "tau: a file has one number for all outputs, not one for each; without it, add 1 / tau to the variances"
        )
    if tau is not None and not (isinstance(tau, int | float) and 0 < tau < float("inf")):
        raise UsageError(f"tau: {tau!r} is not a precision; it is one number, 1 over the noise's variance, above 0")


def _temperature(likelihood: Likelihood, monte_carlo: bool) -> dict[str, float]:
    """Metadata on the temperature that is in the file; {} if it is 1."""
    found = likelihood.temperature if monte_carlo else likelihood.of_mean().temperature
    return {} if found == 1 else {"temperature": found}


def _axes(dynamic_axes: Axes | None) -> dict[str, Any]:
    """Metadata on the open dimensions; {} if there are none."""
    found = {name: {str(dim): axis for dim, axis in dims.items()} for name, dims in (dynamic_axes or {}).items() if dims}
    return {"dynamic_axes": found} if found else {}


def _versions() -> dict[str, str]:
    from svdcompress.version import __version__

    return {"svdcompress_version": __version__, "torch_version": str(torch.__version__)}


def _sign(graph: Any, props: Mapping[str, str], name: str) -> None:
    graph.producer_name, graph.producer_version = "svdcompress", props["svdcompress_version"]
    graph.graph.name = name
    graph.metadata_props.update(props)


def _inputs(model: nn.Module) -> dict[str, Any]:
    """Metadata on the input features that pruning left, as the model or, for a wrapper, a module within it records them."""
    for module in model.modules():
        kept = (getattr(module, "surgery", None) or {}).get("inputs")
        if kept:
            return {"inputs": kept}
    return {}
