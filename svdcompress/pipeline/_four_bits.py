"""A run's file with weights in four bits, or in eight where the validation error requires it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from svdcompress.errors import ExportError
from svdcompress.export import Exported, weights_of, write_few_bits
from svdcompress.pipeline._allowed import Allowed

FEW, MORE = 4, 8


@dataclass
class FourBits(Allowed):
    """Writes the form of `path` whose weights have four bits, or eight where four lose too much.

    importance: how much an error of each number counts, by the weight's name (`export.importance` of the model).
    """

    importance: Mapping[str, np.ndarray] = field(default_factory=dict)
    compact: bool = True
    report: dict[str, Any] = field(default_factory=dict)

    def write(self, dst: Path) -> Exported:
        """Write the file, and what was done into `report`. Raises ExportError if even eight bits lose too much."""
        with TemporaryDirectory(prefix="svdcompress") as folder:
            bits = self._choose(Path(folder) / "trial.onnx")
        file = write_few_bits(self.path, dst, bits, importance=self.importance, compact=self.compact)
        self.check_deviations(dst, "fewer bits")
        self.report |= {
            "file": dst.name,
            "bytes": file.bytes,
            "layers": {name.removesuffix(".weight"): f"int{count}" for name, count in bits.items()},
            "validation": {"float": self.float_error, "int4": self.error(dst), "limit": self.limit},
        }
        return file

    def _choose(self, trial: Path) -> dict[str, int]:
        """Choose the bits of each weight: the costliest get eight, one after the other, until the error is allowed."""
        weights = weights_of(self.path)
        if not weights:
            raise ExportError("it has no weight that four bits would make smaller")

        def tried(bits: dict[str, int], **more: Any) -> float:
            write_few_bits(self.path, trial, bits, importance=self.importance, compact=False)
            return self.error(trial, **more)

        bits = dict.fromkeys(weights, FEW)
        if tried(bits) <= self.limit:
            return bits
        rest = dict.fromkeys(weights, MORE)
        whole = tried(rest)
        if not whole <= self.limit:
            found = f"with all weights in eight bits the error is {whole:.4g}, and the limit is {self.limit:.4g}"
            raise ExportError(f"its weights need more than eight bits ({found})")
        alone = {name: tried({**rest, name: FEW}, examples=self.few, figure="nll") for name in weights}
        for name in sorted(weights, key=lambda name: -alone[name]):
            bits[name] = MORE
            if tried(bits) <= self.limit:
                break
        return bits
