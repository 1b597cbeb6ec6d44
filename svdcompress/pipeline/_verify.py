"""Checks that a run's files agree with its report: for any folder, and by each run on itself before it finishes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from svdcompress import report
from svdcompress.errors import (
    CheckpointError,
    DataError,
    DependencyError,
    ExportError,
    Interrupted,
    ModelError,
    OutputError,
    RecipeError,
    TrustError,
    VerifyError,
    out_of_memory,
    shortened,
)
from svdcompress.pipeline import _certain_checks, _checks, _small_checks, _small_files
from svdcompress.pipeline._checks import Check, Material, Skip
from svdcompress.pipeline._open import OpenRun, open_run
from svdcompress.recipe import Recipe
from svdcompress.sources import Data

FAILED = "FAILED-"
"""The prefix that is put before the names of files that fail a run's own checks."""

HINDRANCES = (Skip, TrustError, DataError, ModelError, RecipeError, DependencyError)
"""Errors that prevent a check without being the fault of the files."""

EXAMPLES, ROWS, SAMPLES = 256, 4, 100
"""Sizes of a run's own checks: test examples, and the inputs and samples of the Monte-Carlo means."""

COSTLY = 10**9
"""A run's own checks use fewer examples for models with more multiply-accumulates per example than this."""

Step = tuple[str, str, Callable[[Material], Iterator[Check]]]

FILES: list[Step] = [
    ("SHA-256", "all files", _checks.digests),
    ("bytes", "ONNX files", _checks.sizes),
    ("bytes", "small ONNX files", _small_checks.small_sizes),
    ("compression", "report.json", _checks.ratios),
]
"""Checks that need only the files."""

MODELS: list[Step] = [
    ("shapes of layers", _checks.MODEL, _checks.shapes),
    ("parameters, nonzero", _checks.MODEL, _checks.counts),
    ("parameters, nonzero", _checks.DENSE, _checks.dense_counts),
    (f"difference from {_checks.MODEL}", _checks.ONNX, _checks.parity),
    ("error of the test data", _checks.ONNX, _checks.errors),
    ("error of the test data", _checks.DENSE_ONNX, _checks.dense_errors),
    ("Monte-Carlo mean", _checks.MC_ONNX, _checks.monte_carlo),
    ("promises", "ONNX files", _certain_checks.promises),
    ("promises on the test data", _checks.ONNX, _certain_checks.kept_by_mean),
    ("promises on the test data", _checks.MC_ONNX, _certain_checks.kept_by_samples),
    ("calibration on the test data", _checks.ONNX, _certain_checks.calibration),
    (f"difference from {_checks.MODEL}", _small_files.COMPACT, _small_checks.compact_parity),
    (f"difference from {_checks.MC_ONNX}", _small_files.MC_COMPACT, _small_checks.compact_draws),
    ("error of the test data", "files in fewer bits", _small_checks.small_errors),
]
"""Checks that need the run's model or its data."""


@dataclass
class Verification:
    """The result of all checks of a folder. failed, skipped: those that did not pass, and those that could not be made."""

    folder: Path
    checks: list[Check] = field(default_factory=list)

    @property
    def failed(self) -> list[Check]:
        """Checks whose figures differ from the stored ones."""
        return [check for check in self.checks if check.passed is False]

    @property
    def skipped(self) -> list[Check]:
        """Checks that could not be made."""
        return [check for check in self.checks if check.passed is None]

    def to_dict(self) -> dict[str, Any]:
        """All checks and their counts, JSON-able."""
        return {
            "passed": not self.failed,
            "failed": len(self.failed),
            "skipped": len(self.skipped),
            "checks": [asdict(check) for check in self.checks],
        }

    def raise_failed(self) -> None:
        """Raises VerifyError, which names each figure that differs, if any does."""
        if self.failed:
            raise VerifyError(f"{self.folder}: {told(self.failed)}")


def told(failed: list[Check]) -> str:
    """One line about all failed checks."""
    named = "; ".join(
        f"{check.file}: {check.name}: stored {_short(check.stored)}, found {_short(check.found)}"
        + (f" ({check.note})" if check.note else "")
        for check in failed
    )
    return f"{len(failed)} of the checks failed: {named}"


def verify_run(folder: str | Path, *, trust_code: bool = False, model: Any = None, data: Any = None) -> Verification:
    """Compute the figures in a run's `report.json` again, as far as its files allow, and compare; see docs/reliability.md.

    trust_code, model, data: see `open_run`. Checks that need untrusted code, or data that are missing, are in `skipped`.
    Raises OutputError if there is no report, or one with a newer layout; failed checks do not raise, but are in the result.
    """
    folder = Path(folder)
    results = report.load(folder)
    found = Verification(folder)
    asked: dict[str, Any] = {"trust_code": trust_code, "model": model, "data": data}
    experiment = "experiment" in results
    bare = Material(OpenRun(folder, _NO_RECIPE), results)
    _make(found, bare, FILES[:1] if experiment else FILES, strict=True)
    if experiment:
        return found
    try:
        opened = open_run(folder, **{name: value for name, value in asked.items() if value is not None})
    except (CheckpointError, OutputError, RecipeError) as error:
        found.checks.append(Check("can be opened", str(folder), None, None, False, shortened(str(error), 300)))
        return found
    opened.compared = False  # the check of digests has named those that differ
    _make(found, Material(opened, results), MODELS, strict=True)
    return found


_NO_RECIPE: Any = None  # the checks in FILES do not read it


def self_check(recipe: Recipe, folder: Path, results: dict[str, Any], model: nn.Module, data: Data) -> Verification:
    """A run's own checks, on some of the test examples, against the model that its files were made from."""
    opened = OpenRun(folder, recipe, trust_code=True, compared=False)
    opened.data = data
    costly = ((results.get("sparse") or {}).get("macs") or 0) > COSTLY
    rows, samples = (2, 30) if costly else (ROWS, SAMPLES)
    material = Material(opened, results, EXAMPLES // 8 if costly else EXAMPLES, model, rows, samples)
    own: Step = ("tensors as in the run", _checks.MODEL, _checks.reloaded)
    left_out = {_checks.digests, _checks.dense_counts, _checks.dense_errors, _small_checks.small_errors}  # just computed
    left_out |= {_certain_checks.kept_by_mean, _certain_checks.kept_by_samples, _certain_checks.calibration}
    found = Verification(folder)
    _make(found, material, [own, *(step for step in FILES + MODELS if step[2] not in left_out)], strict=False)
    return found


def set_aside(found: Verification) -> VerifyError:
    """Rename the files that failed, with the prefix FAILED; returns the error to end the run with."""
    moved = []
    for name in dict.fromkeys(check.file for check in found.failed):
        for path in (found.folder / name, found.folder / f"{name}.data"):
            if path.is_file() and path.name != "report.json":
                path.replace(path.with_name(FAILED + path.name))
                moved.append(FAILED + path.name)
    kept = f" They are kept as {', '.join(moved)}." if moved else ""
    return VerifyError(f"{found.folder}: the run's own checks of its files failed: {told(found.failed)}.{kept}")


def _make(found: Verification, material: Material, steps: list[Step], *, strict: bool) -> None:
    """Make checks. strict: an unexpected error fails the check; otherwise the check counts as skipped."""
    for name, file, work in steps:
        try:
            found.checks += list(work(material))
        except Interrupted:  # says nothing about the file
            raise
        except HINDRANCES as error:
            found.checks.append(Check(name, file, None, None, None, shortened(str(error), 300)))
        except (CheckpointError, ExportError) as error:
            found.checks.append(Check(name, file, None, None, False, shortened(str(error), 300)))
        except Exception as error:  # from a damaged file, another package or the user's model
            reason = shortened(f"{type(error).__name__}: {error}", 300)
            failed = strict and not out_of_memory(error)  # that says nothing about the file
            found.checks.append(Check(name, file, None, None, False if failed else None, reason))


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else shortened(str(value), 60)
