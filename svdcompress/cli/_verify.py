"""`verify`: whether a run's files are what its report says."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table

from svdcompress.cli._common import Debug, Json, ModelAgain, Run, TrustCode, announce_code, out_console, print_json
from svdcompress.errors import VerifyError

VERDICTS = {True: "[green]as stored[/]", False: "[red]FAILED[/]", None: "[yellow]not checked[/]"}


def verify(
    run: Run,
    model: ModelAgain = None,
    trust_code: TrustCode = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Recompute a run's figures from its files alone, and compare them with report.json; name files that were changed.

    Checks: SHA-256 and size of each file; parameters and non-zeros in the tensors of model.safetensors; model.onnx against the
    reloaded checkpoint; its test error, calibration and kept promises in onnxruntime; the mean of model_mc.onnx against
    PyTorch. What needs missing data or untrusted code is skipped, and the table says so. Exits with 13 if anything differs.
    """
    from svdcompress.pipeline import stored_recipe, verify_run
    from svdcompress.sources import code_in

    if trust_code and (run / "recipe.yaml").is_file():
        announce_code(run, code_in(stored_recipe(run)))
    found = verify_run(run, trust_code=trust_code, model=model)
    if json:
        print_json(found.to_dict())
    else:
        console = out_console()
        console.print(_table(found.checks))
        passed = len(found.checks) - len(found.failed) - len(found.skipped)
        console.print(f"\n{passed} as stored, {len(found.failed)} failed, {len(found.skipped)} not checked", highlight=False)
    if found.failed:
        files = ", ".join(dict.fromkeys(check.file for check in found.failed))
        raise VerifyError(f"{run} does not match its report: {files}")


def _table(checks: list[Any]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for heading in ("file", "figure", "stored", "found", "", "note"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        row = (check.file, check.name, _value(check.stored), _value(check.found))
        table.add_row(*map(escape, row), VERDICTS[check.passed], escape(check.note))
    return table


def _value(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_value(part)}" for key, part in value.items())
    return f"{value:.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
