"""The small forms of a run's ONNX files compared with the float file, in a sentence each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from svdcompress.report._rows import metric, milliseconds, size, times

LITTLE = 0.01
"""Share of model.onnx that the compact form has to save; below that it is said to save nothing."""

SAME = 0.005
"""Ratios this close to 1 count as the same size."""

WORDS = {"int8": "In integers", "int4": "In four bits", "float16": "In float16"}


def small_files(results: Mapping[str, Any]) -> list[str]:
    """Sentences on the compact file and on those in fewer bits; [] if there are none."""
    lines = []
    dense, sparse = results.get("dense") or {}, results.get("sparse") or {}
    if compact := sparse.get("bytes_compact"):
        saved = 1 - compact / sparse["bytes"] if sparse.get("bytes") else 1.0
        if saved < LITTLE:
            lines.append(
                f"model_compact.onnx saves nothing ({size(compact)}): too few weights are 0 to gain from leaving them out."
            )
        else:
            words = "Without its zeros" if has_zeros(results) else "With shorter names, as there are no zeros to leave out"
            lines.append(f"{words} (model_compact.onnx): {_beside(compact, dense)}.")
    for key, words in WORDS.items():
        if found := results.get(key):
            lines.append(_precision(words, found, sparse, dense))
    return lines


def has_zeros(results: Mapping[str, Any]) -> bool:
    """Whether the small model has zeros that a compact file can leave out; True if that is unknown."""
    sparse = results.get("sparse") or {}
    parameters, nonzero = sparse.get("parameters"), sparse.get("nonzero")
    return parameters is None or nonzero is None or nonzero < parameters


def _beside(own: float, dense: Mapping[str, Any]) -> str:
    """A file's size, and how much smaller or larger it is than the dense file."""
    if not dense.get("bytes"):
        return size(own)
    ratio = dense["bytes"] / own
    if abs(ratio - 1) < SAME:
        return f"{size(own)}, as large as the dense file"
    return f"{size(own)}, {times(max(ratio, 1 / ratio))} {'smaller' if ratio > 1 else 'larger'} than the dense file"


def _precision(words: str, found: Mapping[str, Any], sparse: Mapping[str, Any], dense: Mapping[str, Any]) -> str:
    parts = []
    own, whole = found.get("metrics") or {}, sparse.get("metrics") or {}
    for name in ("error", "rmse", *(["nll"] if "rmse" in own else [])):  # the RMSE says nothing of deviations
        if own.get(name) is not None:
            parts.append(f"{name} {metric(name, own[name])} ({metric(name, whole.get(name))} in float32)")
    if found.get("agreement") is not None:
        parts.append(f"{100 * found['agreement']:.2f}% of the answers are the same")
    if found.get("bytes"):
        parts.append(_beside(found["bytes"], dense))
    for batch, value in (found.get("latency_ms") or {}).items():
        other = (sparse.get("latency_ms") or {}).get(batch)
        parts.append(f"{milliseconds(value)} at batch {batch.removeprefix('batch_')} ({milliseconds(other)} in float32)")
    layers = found.get("layers") or {}
    kinds = Counter(layers.values())
    for kind, words_ in (("float32", "stay in float32"), *((("int8", "need eight bits"),) if words == WORDS["int4"] else ())):
        if kinds[kind]:
            parts.append(f"{kinds[kind]} of {len(layers)} layers {words_}")
    if words == WORDS["int4"] and layers and not kinds["int4"]:
        words = "No layer could be stored in four bits"
    return f"{words} ({found.get('file', '')}): {'; '.join(parts)}."
