"""Checks of a run's report on the small forms of its ONNX files, computed again from the files; `_verify.py` calls these."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from svdcompress.pipeline._allowed import told
from svdcompress.pipeline._checks import MC_ONNX, Check, Material, parity, rounded
from svdcompress.pipeline._onnx_model import OnnxModel, open_session, run
from svdcompress.pipeline._small_files import COMPACT, FLOAT16, INT4, INT8, MC_COMPACT
from svdcompress.train import evaluate

SAMPLES = 5


def small_sizes(material: Material) -> Iterator[Check]:
    """The sizes of the files in bytes."""
    results = material.results
    entries = (("sparse", "bytes_compact", COMPACT), ("int8", "bytes", INT8), ("int4", "bytes", INT4))
    entries += (("float16", "bytes", FLOAT16),)
    entries += (("monte_carlo_file", "bytes", MC_ONNX), ("monte_carlo_file", "bytes_compact", MC_COMPACT))
    for section, key, name in entries:
        stored = (results.get(section) or {}).get(key)
        path = material.opened.folder / name
        if stored is not None:
            parts = [part for part in (path, path.with_name(f"{name}.data")) if part.is_file()]
            if not parts:  # a missing file fails the check of its digest
                continue
            found = sum(part.stat().st_size for part in parts)
            yield Check("bytes", name, stored, found, stored == found)


def compact_parity(material: Material) -> Iterator[Check]:
    """The compact file against the checkpoint."""
    if (material.results.get("parity") or {}).get(COMPACT) is not None:  # else the run wrote none
        yield from parity(material, COMPACT)


def compact_draws(material: Material) -> Iterator[Check]:
    """The compact Monte-Carlo file against the plain one, with the same noise."""
    if MC_COMPACT not in (material.results.get("parity") or {}):
        return
    path, other = material.path(MC_COMPACT), material.path(MC_ONNX)
    inputs = material.inputs(path)
    more = {"samples": np.array(SAMPLES, np.int64), "seed": np.array(1, np.int64)}
    ours, theirs = (run(open_session(each), inputs, each, **more) for each in (path, other))
    gap = max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))
    yield Check(f"difference from {MC_ONNX}, the same noise", MC_COMPACT, 0.0, gap, gap <= 1e-6)


def small_errors(material: Material) -> Iterator[Check]:
    """Error (or RMSE) and NLL of the files in fewer bits on the test data, in onnxruntime."""
    for key, name in (("int8", INT8), ("int4", INT4), ("float16", FLOAT16)):
        stored = (material.results.get(key) or {}).get("metrics") or {}
        if stored:
            data = material.opened.data
            found = evaluate(OnnxModel(material.path(name), material.units), data.test, **told(data))
            for figure, value in found.items():
                if stored.get(figure) is not None and value is not None:
                    one = 100 / len(data.test) + 1e-6  # another processor may round one answer differently
                    allowed = one if figure == "error" else rounded(figure, stored[figure], data)
                    close = abs(value - stored[figure]) <= allowed
                    yield Check(f"{figure} of the test data", name, stored[figure], value, close)
