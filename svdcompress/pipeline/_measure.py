"""Measures what a candidate of the search costs, by the numbers of the model or of its file."""

from __future__ import annotations

import math
import platform
import shlex
import subprocess  # for the command that a user names  # nosec B404
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from svdcompress import cost
from svdcompress.errors import ExportError
from svdcompress.export import export_onnx
from svdcompress.pipeline._baked import baked
from svdcompress.pipeline._export import file_metadata
from svdcompress.pipeline._figures import feed
from svdcompress.pipeline._foreseen import foreseen
from svdcompress.recipe import Recipe
from svdcompress.sources import Data

COMMAND_SECONDS = 600
"""Seconds after which a latency command counts as hung."""

BATCHES = (1, 128)
"""Batch sizes over which latency is averaged (geometric mean) if the recipe sets none."""

AGREEING = 0.02
"""Calls of a file that differ by no more than this need no repetition: a search measures some ten files for each trial."""

THREADS = 1
"""Threads of onnxruntime."""


@dataclass(frozen=True)
class Measure:
    """Measures the costs of models. name: one of `MEASURES`; files are written only for `bytes` and `latency`. first: the
    dense model's latency in milliseconds, as the search first measured it."""

    name: str
    recipe: Recipe
    data: Data
    inputs: Any
    first: float | None = None
    _kept: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)  # the dense model's file, and its folder

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes at which latency is measured."""
        batch = self.recipe.search.latency_batch
        return BATCHES if batch is None else (batch,)

    def how(self) -> dict[str, Any]:
        """How latency is measured: {command}, or {batches, threads, clock, machine, onnxruntime}; {} for other measures."""
        if self.name != "latency":
            return {}
        if self.recipe.search.latency_command is not None:
            return {"command": self.recipe.search.latency_command}
        version = metadata.version("onnxruntime")
        where = {"machine": machine(), "onnxruntime": version}
        return {"batches": list(self.batches), "threads": THREADS, "clock": cost.clock_name(THREADS), **where}

    def of(self, **models: nn.Module) -> dict[str, dict[str, float]]:
        """The costs of models, by key: parameters, nonzero, macs; also bytes if files are written, and latency if that is
        `name`. The latencies of several models are measured in turns."""
        found: dict[str, dict[str, float]] = {}
        for key, model in models.items():
            counts = cost.measure(model, self.inputs)
            found[key] = {"parameters": counts.parameters, "nonzero": counts.nonzero, "macs": counts.macs}
        if self.name in ("bytes", "latency"):
            with TemporaryDirectory() as folder:
                files = {
                    key: self._dense_file(model) if key == "dense" else self._file(model, Path(folder) / f"{key}.onnx")
                    for key, model in models.items()
                }
                sizes = {key: cost.file_bytes(file) for key, file in files.items()}
                times = self._latencies(files) if self.name == "latency" else {}
            for key in models:
                found[key] |= {"bytes": float(sizes[key])} | ({"latency": times[key]} if times else {})
        return found

    def of_small(self, small: nn.Module, dense: nn.Module) -> dict[str, float]:
        """The costs of a small model. Its latency is measured in turns with the dense model's, and given as their ratio times
        `first`, so that neither the machine nor its load matters."""
        if self.name != "latency":
            return self.of(small=small)["small"]
        found = self.of(dense=dense, small=small)
        now = found["dense"]["latency"]
        return {**found["small"], "latency": found["small"]["latency"] * (self.first or now) / now}

    def _dense_file(self, model: nn.Module) -> Path:
        """The dense model's file, written once, as that model stays the same."""
        if "file" not in self._kept:
            self._kept["folder"] = TemporaryDirectory()
            self._kept["file"] = self._file(model, Path(self._kept["folder"].name) / "dense.onnx", dense=True)
        return self._kept["file"]

    def _file(self, model: nn.Module, path: Path, dense: bool = False) -> Path:
        """Write a model's file as the run's own will be: a temperature and prediction sets take bytes, and time."""
        units = baked(self.data.preprocessing, self.data.task, self.data.dim)
        inputs, export = units.inputs(self.inputs), self.recipe.export
        more: dict[str, Any] = {}
        if dense:
            more = {"metadata": file_metadata({}, units.preprocessing, self.data.classes, self.data.task)}
        else:
            more = foreseen(self.recipe, self.data, units)
        # The dense file is verified, so that what cannot be exported is known early; the run's own files are, when it ends.
        more |= {"opset": export.opset, "dynamic_axes": export.dynamic_axes, "verify": dense}
        return export_onnx(units.model(model), path, inputs, **more).path

    def _latencies(self, files: dict[str, Path]) -> dict[str, float]:
        """Milliseconds of each file: by the recipe's command, else the geometric mean over the batch sizes on this machine."""
        command = self.recipe.search.latency_command
        if command is not None:
            return {key: asked(command, file) for key, file in files.items()}
        make_input = partial(feed, self.data)(next(iter(files.values())))
        times = cost.latencies(files, make_input, self.batches, threads=THREADS, agreeing=AGREEING)
        return {key: math.prod(each.values()) ** (1 / len(each)) for key, each in times.items()}


def machine() -> str:
    """The name of this machine's processor, as far as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def asked(command: str, file: Path) -> float:
    """The milliseconds that a command prints for a file. Raises ExportError if it fails or prints no such number."""
    try:
        done = subprocess.run(  # what the user typed, without a shell  # nosec B603
            [*shlex.split(command), str(file)], capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise ExportError(f"search.latency_command: {command!r} could not be run ({error})") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no error output"])[-1]
        raise ExportError(f"search.latency_command: {command!r} failed with exit code {done.returncode} ({last[:200]})")
    words = done.stdout.split()
    try:
        found = float(words[-1])
    except (IndexError, ValueError):
        found = math.nan
    if not (math.isfinite(found) and found > 0):
        raise ExportError(
            f"search.latency_command: {command!r} printed {done.stdout.strip()[:80]!r}; its last word must be the "
            "milliseconds that the file took"
        )
    return found
