"""Checks that compute again, from a run's files, what its report says; called by `_verify.py`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from svdcompress import cost, report
from svdcompress.checkpoint import read_manifest
from svdcompress.errors import UsageError
from svdcompress.export import check_parity
from svdcompress.layers import variance_parameters, variational_layers
from svdcompress.likelihoods import own_likelihood
from svdcompress.pipeline._baked import Baked, baked
from svdcompress.pipeline._onnx_model import OnnxModel, open_session, run
from svdcompress.pipeline._open import OpenRun
from svdcompress.pipeline._promised import sets_of
from svdcompress.pipeline._select import bare
from svdcompress.pipeline._some import some
from svdcompress.sources import Data, Examples, example_inputs, fitting
from svdcompress.train import evaluate
from svdcompress.uncertainty import mc_predict

MODEL, ONNX, MC_ONNX, DENSE, DENSE_ONNX = "model.safetensors", "model.onnx", "model_mc.onnx", "dense.safetensors", "dense.onnx"

BATCH = 250
"""Examples in a pass of a file, or fewer if they are large."""

RELATIVE = 1e-3
"""How far NLL and RMSE may be off: onnxruntime and PyTorch round differently, and so do a GPU and a CPU."""

ROUNDED = 1 / 5000
"""The share of answers that rounding may change, at least one answer; ten times as many if they were computed on a GPU."""

SIGMAS = 6.0
"""Standard errors by which two Monte-Carlo means may differ."""


@dataclass(frozen=True)
class Check:
    """One figure: what the report (or another file) says, and what was found. passed: None if it could not be checked."""

    name: str
    file: str
    stored: Any = None
    found: Any = None
    passed: bool | None = True
    note: str = ""


class Skip(Exception):
    """Raised, with the reason, when a figure cannot be checked."""


@dataclass
class Material:
    """What the checks work on: a run's opened folder, and its results.

    examples: the most test examples that errors are computed on; None: all. reference: the model that the files were made
    from, if at hand; figures of a part of the examples are compared with its own. rows, samples: of the Monte-Carlo means.
    """

    opened: OpenRun
    results: Mapping[str, Any]
    examples: int | None = None
    reference: nn.Module | None = None
    rows: int = 8
    samples: int = 400

    @property
    def loose(self) -> int:
        """How many times more rounding is allowed: figures of a GPU are computed again on a CPU."""
        return 1 if str(self.results.get("device", "cpu")).startswith("cpu") else 10

    def path(self, name: str) -> Path:
        """A file's path in the folder. Raises Skip if it is missing; a file deleted since the run fails the check of
        digests."""
        path = self.opened.folder / name
        if not os.path.isfile(path):
            raise Skip(f"there is no {name}")
        return path

    @cached_property
    def units(self) -> Baked:
        """The preprocessing that the ONNX files do themselves."""
        return baked(self.opened.preprocessing, self.opened.recipe.task, self.opened.dim)

    def inputs(self, path: Path) -> Any:
        """Inputs for the ONNX files: test examples if there are data, else noise. Raises Skip if neither can be had."""
        try:
            return self.units.inputs(example_inputs(self.opened.data.test, self.rows))
        except Exception as error:  # the data cannot be opened, for whatever reason
            if self.reference is not None:
                raise
            shapes = [value.shape[1:] for value in open_session(path).get_inputs() if value.name not in ("samples", "seed")]
            if len(shapes) != 1 or not all(isinstance(size, int) for size in shapes[0]):
                raise Skip(f"no inputs to try it with: {error}") from error
            return torch.randn(self.rows, *shapes[0], generator=torch.Generator().manual_seed(1))


def digests(material: Material) -> Iterator[Check]:
    """Each file's size and SHA-256."""
    files = material.results.get("files")
    if files is None:
        raise Skip("the report has no digests: the version that wrote it stored none")
    found = report.altered(material.opened.folder, files)
    for name, (stored, there) in found.items():
        what = "is missing" if there is None else "was changed after the run"
        now = None if there is None else _digest(there)
        yield Check("SHA-256", name, _digest(stored), now, False, f"the file {what}")
    if not found:
        yield Check("SHA-256", f"{len(files)} files", len(files), len(files))


def _digest(entry: Mapping[str, Any]) -> str:
    return f"{entry['sha256'][:12]}... ({entry['bytes']:,} bytes)"


def sizes(material: Material) -> Iterator[Check]:
    """Bytes of the ONNX files."""
    for side, name in (("sparse", ONNX), ("dense", DENSE_ONNX)):
        stored = (material.results.get(side) or {}).get("bytes")
        path = material.opened.folder / name
        if stored is not None:
            parts = [part for part in (path, path.with_name(f"{name}.data")) if os.path.isfile(part)]
            yield _equal("bytes", name, stored, sum(part.stat().st_size for part in parts))


def ratios(material: Material) -> Iterator[Check]:
    """`compression`, computed from the figures in the report."""
    stored = material.results.get("compression")
    sides = [material.results.get(side) for side in ("dense", "sparse")]
    if not stored or not all(sides):
        raise Skip("the report has no ratios")
    for name, value in cost.compression(sides[0] or {}, sides[1] or {}).items():
        alike = _alike(stored.get(name), value)
        yield Check(f"compression: {name}", "report.json", stored.get(name), value, alike)


def shapes(material: Material) -> Iterator[Check]:
    """The layers' shapes, from the tensors of the checkpoint."""
    path = material.path(MODEL)
    aliases = read_manifest(path)["ties"]
    rows = material.results.get("layers") or ()
    right = 0
    with safe_open(str(path), "pt") as file:
        names = set(file.keys())
        for row in rows:
            name = f"{row['name']}.weight"
            name = aliases.get(name, name)
            there, stored = list(file.get_slice(name).get_shape()) if name in names else None, row.get("shape_after")
            right += there == stored
            if there != stored:
                yield Check(f"shape of {row['name']}", MODEL, stored, there, False)
    yield Check("shapes of layers", MODEL, len(rows), right, right == len(rows))


def counts(material: Material) -> Iterator[Check]:
    """Parameters and non-zeros, counted in the checkpoint's tensors; the model only gives their names and the masks."""
    stored = material.results.get("sparse") or {}
    path = material.path(MODEL)
    model = bare(material.opened.model)
    layers = dict(variational_layers(model))
    relevant = {f"{name}.weight".lstrip("."): layer.relevant() for name, layer in layers.items()}
    variances = {id(own) for own in variance_parameters(model)}
    aliases = read_manifest(path)["ties"]
    parameters, nonzero = 0, 0
    with safe_open(str(path), "pt") as file:
        for name, parameter in model.named_parameters():
            if id(parameter) not in variances:
                tensor = file.get_tensor(aliases.get(name, name))
                kept = tensor * relevant[name] if name in relevant else tensor
                parameters, nonzero = parameters + tensor.numel(), nonzero + int(torch.count_nonzero(kept))
    for name, value in (("parameters", parameters), ("nonzero", nonzero)):
        if stored.get(name) is not None:
            yield _equal(name, MODEL, stored[name], value)
    rows = [row for row in material.results.get("layers") or () if "weights" in row]
    if rows:
        left = {name: int(layer.relevant().sum()) for name, layer in layers.items()}
        wrong = [row["name"] for row in rows if row["weights"] != left.get(row["name"], 0)]
        total = sum(left.get(row["name"], 0) for row in rows)
        yield Check("weights of layers", MODEL, sum(row["weights"] for row in rows), total, not wrong, ", ".join(wrong))


def dense_counts(material: Material) -> Iterator[Check]:
    """Parameters and non-zeros of the dense model's file."""
    stored = material.results.get("dense") or {}
    material.path(DENSE)
    parameters = list(material.opened.dense.parameters())
    found = {"parameters": sum(p.numel() for p in parameters), "nonzero": sum(int(torch.count_nonzero(p)) for p in parameters)}
    for name, value in found.items():
        if stored.get(name) is not None:
            yield _equal(name, DENSE, stored[name], value)


def reloaded(material: Material) -> Iterator[Check]:
    """The checkpoint, loaded into a fresh model, compared with the model that it was written from."""
    assert material.reference is not None
    material.path(MODEL)
    there, found = (bare(model).state_dict() for model in (material.reference, material.opened.model))
    wrong = [name for name in there if name not in found or not _same(there[name], found[name])]
    more = ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
    yield Check(
        "tensors as in the run", MODEL, len(there), len(there) - len(wrong), not wrong and len(there) == len(found), more
    )


def _same(first: Any, second: Any) -> bool:
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return first == second
    return first.shape == second.shape and torch.equal(first.cpu(), second.cpu())


def parity(material: Material, name: str = ONNX) -> Iterator[Check]:
    """A deterministic file compared with the checkpoint, on other inputs than the run's own comparison."""
    path = material.path(name)
    stored = (material.results.get("parity") or {}).get(name)
    model = material.units.model(material.opened.model)
    further = None
    if material.opened.recipe.export.sets:
        own = own_likelihood(model, material.opened.recipe.task, material.opened.dim)
        further = sets_of(material.results, "mean", own)
    found = check_parity(path, model, material.inputs(path), further=further)  # raises ExportError beyond its tolerance
    yield Check(f"difference from {MODEL}", name, stored, found)


def errors(material: Material) -> Iterator[Check]:
    """Error (or RMSE) and NLL on the test data, of the deterministic file in onnxruntime."""
    path = material.path(ONNX)
    data, opened = material.opened.data, material.opened
    test = data.test if material.examples is None else some(data.test, material.examples)
    what = {"task": data.task, "scale": data.target_scale, "dim": data.dim, "tau": opened.tau}
    what["batch_size"] = _fitting(lambda: material.reference or opened.model, path, material, test)
    if material.reference is None:
        stored = (material.results.get("sparse") or {}).get("metrics") or {}
    else:
        own = own_likelihood(material.reference, data.task, data.dim).of_mean()
        stored = evaluate(material.reference, test, **{**what, "task": own})
    if not stored:
        raise Skip("the report has no figures for the test data")
    yield from _as_stored(stored, ONNX, path, material, test, what)


def dense_errors(material: Material) -> Iterator[Check]:
    """The same of the dense model's file, but for the NLL of a regression, whose noise is not stored for it."""
    path, data = material.path(DENSE_ONNX), material.opened.data
    stored = dict((material.results.get("dense") or {}).get("metrics") or {})
    if data.task == "regression":
        stored.pop("nll", None)
    if not stored:
        raise Skip("the report has no figures for the test data")
    what = {"task": data.task, "scale": data.target_scale, "dim": data.dim}
    what["batch_size"] = _fitting(lambda: material.opened.dense, path, material, data.test)
    yield from _as_stored(stored, DENSE_ONNX, path, material, data.test, what)


def _fitting(model: Callable[[], nn.Module], file: Path, material: Material, test: Examples) -> int:
    """Examples in a pass of a file, judged by the PyTorch model, or by the size of the inputs if that cannot be loaded."""
    try:
        made = model()
    except Exception:  # damaged or missing: other checks say so
        made = OnnxModel(file, material.units)
    return fitting(made, test, BATCH)


def _as_stored(
    stored: Mapping[str, Any], file: str, path: Path, material: Material, test: Examples, what: Mapping[str, Any]
) -> Iterator[Check]:
    """Whether a file's figures on test examples are those that are stored."""
    data, found = material.opened.data, evaluate(OnnxModel(path, material.units), test, **what)
    for name in found:
        if stored.get(name) is not None and found[name] is not None:
            allowed = may_differ(name, stored[name], test, data, material.loose)
            passed = abs(found[name] - stored[name]) <= allowed
            yield Check(f"{name} of {len(test):,} test examples", file, stored[name], found[name], passed)


def may_differ(name: str, stored: float, examples: Examples, data: Data, loose: int) -> float:
    """How much rounding may change a metric of these examples. loose: how many times more is allowed than on a CPU."""
    one = 100 * max(1 / len(examples), loose * ROUNDED) + 1e-6
    return one if name == "error" else loose * rounded(name, stored, data)


def rounded(name: str, stored: float, data: Data) -> float:
    """How much rounding may change a metric other than the error. The limit for an RMSE, whose unit may be small, is relative
    to the RMSE itself, plus a term for the size of the targets; for an NLL it is relative to 1 nat at least."""
    if name != "rmse":
        return RELATIVE * max(1.0, abs(stored))
    targets = getattr(data.test, "targets", None)
    size = sum(map(abs, data.target_scale)) if data.target_scale else 0.0 if targets is None else float(targets.abs().max())
    return RELATIVE * abs(stored) + 1e-6 * size


def monte_carlo(material: Material) -> Iterator[Check]:
    """The mean of the Monte-Carlo file compared with PyTorch's, each over its own draws."""
    path = material.path(MC_ONNX)
    opened, samples, inputs = material.opened, material.samples, material.inputs(path)
    session = open_session(path)
    seeded = "seed" in [value.name for value in session.get_overridable_initializers()]
    more = {"samples": np.array(samples, np.int64), **({"seed": np.array(1, np.int64)} if seeded else {})}
    names = [value.name for value in session.get_outputs()]
    mean = torch.from_numpy(run(session, inputs, path, **more)[names.index("mean")]).double()
    task = opened.recipe.task
    generator = torch.Generator().manual_seed(1)
    tau, local = material.units.tau(opened.tau if task == "regression" else None), not seeded  # files of 0.1.0 draw differently
    model = material.units.model(opened.model)
    own = own_likelihood(model, task, opened.dim, tau)
    try:
        torchs = mc_predict(model, inputs, samples, task=own, generator=generator, local=local)
    except UsageError as error:
        raise Skip(str(error)) from error
    ours, spread = torchs.mean.double(), torchs.epistemic.double().clamp_min(0)
    if ours.shape != mean.shape:
        yield Check("Monte-Carlo mean", MC_ONNX, list(ours.shape), list(mean.shape), False, "shapes of the means")
        return
    rare = 2.0 / samples * (1.0 if task in ("classification", "binary") else 6 * float(spread.max().sqrt()))
    size = ours.abs().clamp_min(1.0) if own.probabilities else ours.abs().max().clamp_min(1e-30)  # values have a unit
    limit = SIGMAS * (2 * spread / samples).sqrt() + rare + 1e-4 * size
    gap = (mean - ours).abs() / limit
    worst = int(gap.nan_to_num(nan=torch.inf).argmax())
    passed = bool((gap <= 1).all())
    note = f"the largest of {gap.numel()} differences, {samples} samples; allowed: {float(limit.flatten()[worst]):.2g}"
    yield Check("Monte-Carlo mean", MC_ONNX, float(ours.flatten()[worst]), float(mean.flatten()[worst]), passed, note)


def _equal(name: str, file: str, stored: Any, found: Any) -> Check:
    return Check(name, file, stored, found, stored == found)


def _alike(stored: Any, found: Any) -> bool:
    if isinstance(found, Mapping):
        return isinstance(stored, Mapping) and all(_alike(stored.get(key), value) for key, value in found.items())
    return isinstance(stored, int | float) and abs(stored - found) <= 1e-6 * max(1.0, abs(found))
