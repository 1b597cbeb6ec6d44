"""The small forms of a run's ONNX files: without zeros, in integers, or in two bytes per number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from svdcompress import cost
from svdcompress.errors import ExportError, shortened
from svdcompress.export import added_error, check_parity, suggested_bits, write_compact, write_half
from svdcompress.pipeline._allowed import budget
from svdcompress.pipeline._baked import Baked
from svdcompress.pipeline._four_bits import FourBits
from svdcompress.pipeline._integers import Integers, beside, slower
from svdcompress.pipeline._onnx_model import open_session, run
from svdcompress.pipeline._results import RunResults
from svdcompress.pipeline._select import bare
from svdcompress.pipeline._weight_names import WeightNames
from svdcompress.recipe import Recipe
from svdcompress.sources import Data, example_inputs

COMPACT, MC_COMPACT = "model_compact.onnx", "model_mc_compact.onnx"
INT8, INT4, FLOAT16 = "model_int8.onnx", "model_int4.onnx", "model_float16.onnx"

HALF = 1e-3
"""The largest allowed difference between a Monte-Carlo file stored in float16 and the one in float32, with the same noise,
relative to the largest output or to 1."""

BITS = {"int8": 8, "int4": 4}
"""Bits of a weight, by the kind that the two reports give its layer."""

SAMPLES, ROWS = 20, 7
"""Samples and examples in the comparison of float16 with float32."""


@dataclass
class SmallFiles:
    """Writes the small files to `out`, next to model.onnx and model_mc.onnx, and their figures to `results`.

    measured: the files whose latencies are to be measured together with those of the float files, by their key in the results.
    figures: the entries of the results under these keys.
    """

    recipe: Recipe
    data: Data
    inputs: Any
    out: Path
    results: RunResults
    parity: dict[str, float | None]
    warn: Callable[[str], None]
    units: Baked
    measured: dict[str, Path] = field(default_factory=dict)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)

    def compact(self, small: nn.Module, further: Any) -> None:
        """Write model_compact.onnx, checked against the model. further: the function for further outputs of model.onnx."""
        path = self.out / COMPACT
        try:
            file = write_compact(self.out / "model.onnx", path)
            parity = check_parity(path, self.units.model(small), self.units.inputs(self.inputs), further=further)
        except ExportError as error:
            path.unlink(missing_ok=True)
            self.warn(f"{COMPACT} was not written: {error}")
            return
        self.results.sparse.bytes_compact = file.bytes
        self.parity[COMPACT] = parity

    def monte_carlo(self) -> None:
        """Convert model_mc.onnx to two bytes per number, and write its compact form, as far as the recipe asks for these."""
        export, path = self.recipe.export, self.out / "model_mc.onnx"
        if not path.is_file() or not (export.compact_monte_carlo or export.monte_carlo_dtype == "float16"):
            return
        found: dict[str, Any] = {"bytes": path.stat().st_size}
        try:
            if export.monte_carlo_dtype == "float16":
                found |= self._halved(path)
            if export.compact_monte_carlo:
                file = write_compact(path, self.out / MC_COMPACT)
                found["bytes_compact"] = file.bytes
                self.parity[MC_COMPACT] = self.parity[path.name]
        except ExportError as error:
            self.warn(f"{MC_COMPACT} was not written: {error}")
        self.results.monte_carlo_file = found

    def _halved(self, path: Path) -> dict[str, Any]:
        inputs = self.units.inputs(example_inputs(self.data.train, ROWS))
        more = {"samples": np.array(SAMPLES, np.int64), "seed": np.array(1, np.int64)}
        worst = 0.0

        def check(file: Path) -> None:
            nonlocal worst
            for ours, theirs in zip(run(open_session(file), inputs, file, **more), before, strict=True):
                worst = max(worst, float(np.abs(ours - theirs).max()) / max(1.0, float(np.abs(theirs).max())))
            if not worst <= HALF:
                raise ExportError(f"its outputs would be off by {worst:.2g} relative to the largest (allowed: {HALF:g})")

        size = path.stat().st_size
        try:
            before = run(open_session(path), inputs, path, **more)
            file = write_half(path, path, compact=False, check=check)
        except ExportError as error:
            self.warn(f"model_mc.onnx stays in float32: {error}")
            return {"dtype": "float32", "difference": worst}
        return {"dtype": "float16", "difference": worst, "bytes": file.bytes, "bytes_float32": size}

    def precision(self, small: nn.Module) -> None:
        """Write the file in fewer bits that the recipe asks for, and the bits that the posterior suggests for each layer."""
        asked = self.recipe.export.precision
        if asked == "none":
            return
        names = WeightNames(self.out / "model.onnx", small)
        if asked == "int4":
            try:
                self._bits(bare(small), self._four_bits(names))
            except ExportError as error:
                self.warn(f"{INT4} was not written: {error}")
        if asked in ("int8", "auto"):
            try:
                self._bits(bare(small), self._integers(names))
                return
            except ExportError as error:
                then = f"; {FLOAT16} is written instead" if asked == "auto" else ""
                self.warn(f"{INT8} was not written: {error}{then}")
        if asked in ("float16", "auto"):
            self._half()

    def _integers(self, names: WeightNames) -> dict[str, str]:
        """Write model_int8.onnx; returns the kind of each layer."""
        work = Integers(self.out / "model.onnx", self.data, self.units, **self._allowed())
        path = self.out / INT8
        work.write(path)
        work.report["layers"] = names.layers(work.report["layers"])
        found = beside(path, self.out / "model.onnx", self.data, self.units)
        self.results.int8 = self.figures["int8"] = {**work.report, **found}
        self.measured["int8"] = path
        left = [name for name, kind in work.report["layers"].items() if kind != "int8"]
        if left:
            self.warn(f"{INT8}: {', '.join(left)} stayed in floating point: integers raised the validation error too much")
        return work.report["layers"]

    def _four_bits(self, names: WeightNames) -> dict[str, str]:
        """Write model_int4.onnx; returns the kind of each layer."""
        more = {"importance": names.importance(), **self._allowed()}
        work = FourBits(self.out / "model.onnx", self.data, self.units, **more)
        path = self.out / INT4
        work.write(path)
        work.report["layers"] = names.layers(work.report["layers"])
        found = beside(path, self.out / "model.onnx", self.data, self.units)
        self.results.int4 = self.figures["int4"] = {**work.report, **found}
        self.measured["int4"] = path
        return work.report["layers"]

    def _allowed(self) -> dict[str, Any]:
        """The arguments that determine which layers of a file are in fewer bits."""
        return {**budget(self.recipe, self.results.dense.validation), "compact": self.recipe.export.compact}

    def _bits(self, small: nn.Module, kinds: dict[str, str]) -> None:
        """Fill in `bits` of the results: for each layer, the bits that the posterior suggests, those used, and the added
        error."""
        rows = [row for row in suggested_bits(small) if row.weights]
        used = {row.name: BITS.get(kinds.get(row.name, "float32"), 32) for row in rows}
        added = added_error(small, {name: bits for name, bits in used.items() if bits < 32})
        self.results.bits = [
            {"name": r.name, "weights": r.weights, "suggested": r.bits, "used": used[r.name], "added": added.get(r.name, 0.0)}
            for r in rows
        ]

    def _half(self) -> None:
        path = self.out / FLOAT16
        try:
            file = write_half(self.out / "model.onnx", path, compact=self.recipe.export.compact)
        except ExportError as error:
            self.warn(f"{FLOAT16} was not written: {error}")
            return
        found = beside(path, self.out / "model.onnx", self.data, self.units)
        self.results.float16 = self.figures["float16"] = {"file": path.name, "bytes": file.bytes, **found}
        self.measured["float16"] = path

    def latencies(self, times: dict[str, dict[str, float]], note: Callable[[str], None]) -> None:
        """Store the latencies that were measured for the small files and the float file. note: takes a line for the user."""
        for name, path in self.measured.items():
            found = self.figures[name]
            found["latency_ms"], float_ = times[name], times["sparse"]
            found["faster"] = cost.quicker(times[name], float_)
            words = slower(times[name], float_)
            if words and name == "int8":
                note(shortened(f"{path.name} is not faster than model.onnx on this machine: {words}", 400))
