"""A smaller form of a run's exported file: without its zeros, in integers, or in two bytes per number."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from svdcompress.errors import ExportError
from svdcompress.export import Exported, write_compact, write_half
from svdcompress.pipeline._allowed import budget
from svdcompress.pipeline._baked import baked
from svdcompress.pipeline._four_bits import FourBits
from svdcompress.pipeline._integers import Integers, beside
from svdcompress.pipeline._open import OpenRun
from svdcompress.pipeline._weight_names import WeightNames


def reduced(opened: OpenRun, path: Path, precision: str, compact: bool) -> tuple[Exported, str]:
    """Replace a run's exported file with a smaller form; returns that, and a note about it.

    precision: "none", "int8" (needs the run's data to calibrate and to choose layers), "int4" (needs them to choose layers),
    "float16", or "auto": int8, or float16 if none of the layers can be in integers. compact: without zeros.
    """
    units = baked(opened.preprocessing, opened.recipe.task, opened.dim)
    known = {**budget(opened.recipe, (opened.results.get("dense") or {}).get("validation")), "compact": compact}
    with TemporaryDirectory(prefix="svdcompress") as folder:
        whole = Path(folder) / path.name
        for name in (path.name, f"{path.name}.data"):
            if path.with_name(name).is_file():
                shutil.move(path.with_name(name), whole.with_name(name))
        names = WeightNames(whole, opened.model) if precision in ("int8", "int4", "auto") else None
        if names and precision != "int4":
            try:
                return _chosen(Integers(whole, opened.data, units, **known), path, "int8", names)
            except ExportError:
                if precision == "int8":
                    raise
        if names and precision == "int4":
            known["importance"] = names.importance()
            return _chosen(FourBits(whole, opened.data, units, **known), path, "int4", names)
        if precision in ("float16", "auto"):
            return write_half(whole, path, compact=compact), "; numbers stored as float16"
        return dataclasses.replace(write_compact(whole, path), parity=None), "; same numbers as in the file with zeros"


def _chosen(work: Integers | FourBits, path: Path, kind: str, names: WeightNames) -> tuple[Exported, str]:
    file = work.write(path)
    found = beside(path, work.path, work.data, work.units)
    others: dict[str, list[str]] = {}
    for name, other in names.layers(work.report["layers"]).items():
        if other != kind:
            others.setdefault(other, []).append(name)
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in found["metrics"].items() if value is not None)
    stayed = "".join(f"; in {other}: {', '.join(names)}" for other, names in others.items())
    same = f"; {100 * found['agreement']:.2f}% of the answers as in float32" if "agreement" in found else ""
    return file, f"; on the test data {metrics}{same}{stayed}"
