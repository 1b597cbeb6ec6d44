"""`svdc pack` and `svdc unpack`: a run's model as one small archive, for sending."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from svdcompress.cli._common import Debug, Json, ModelAgain, Run, TrustCode, check_file, opened_run, out_console, print_json
from svdcompress.errors import CheckpointError, DataError, OutputError, SvdcError, UsageError, shortened

ARCHIVE = "model.svdc"

MEGABYTE = 10**6


def pack(
    run: Run,
    out: Annotated[Path | None, typer.Option(help="The archive to write (RUN/model.svdc).")] = None,
    precision: Annotated[
        str,
        typer.Option(
            metavar="FORM",
            help="float32 (exact), float16, int8, int4; posterior: for each layer the bits that its variances allow; auto: the "
            "fewest that the validation error allows.",
        ),
    ] = "float32",
    codec: Annotated[str, typer.Option(help="xz, or zstd (needs the package zstandard).")] = "xz",
    model: ModelAgain = None,
    trust_code: TrustCode = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a run's model.onnx as one small archive, and say what it loses on the test data.

    Example: svdc pack runs/digits --precision int8 --out digits.svdc
    """
    from svdcompress import export
    from svdcompress.pipeline import WeightNames, bare, fewest_bits

    src, path = run / "model.onnx", out or run / ARCHIVE
    if not src.is_file():
        raise CheckpointError(f"{src}: no such file; write it with: svdc export {run} --out {src}")
    if path.exists():
        raise OutputError(f"--out: {path} exists already; name another file")
    check_file(path)
    opened = opened_run(run, trust_code, model)
    src = opened.file(src.name)
    bits: dict[str, int] = {}
    if precision == "posterior":
        bits = {row.name: row.bits for row in export.suggested_bits(bare(opened.model))}
    elif precision == "auto":
        bits = fewest_bits(opened)
    elif precision not in export.PRECISIONS:
        raise UsageError(f"--precision: {precision!r} is unknown; one of {', '.join(export.PRECISIONS)}, posterior, auto")
    names = WeightNames(src, opened.model)
    known = {names.weight(layer): count for layer, count in bits.items()}
    packed = export.pack(src, path, "int8" if bits else precision, bits=known, importance=names.importance(), codec=codec)
    found: dict[str, Any] = {"file": path.name, "bytes": packed.bytes, "precision": precision, "codec": codec}
    used = {name: count for name, count in known.items() if name not in packed.missing}
    found |= {"bytes_before": packed.before, "largest": packed.largest, "bits": used, "missing": list(packed.missing)}
    dense = run / "dense.onnx"
    if dense.is_file():
        found["ratio"] = dense.stat().st_size / packed.bytes
    try:
        found |= _figures(opened, path, src)
    except (DataError, SvdcError) as error:
        found["note"] = f"not measured on the test data: {shortened(str(error))}"
    if json:
        print_json(found)
        return
    ratio = f", {found['ratio']:,.1f} times smaller than dense.onnx" if "ratio" in found else ""
    figures = ", ".join(f"{name} {value:.4g}" for name, value in (found.get("metrics") or {}).items() if value is not None)
    same = f", {100 * found['agreement']:.2f}% of the answers as before" if "agreement" in found else ""
    told = f"; on the test data {figures}{same}" if figures else f"; {found.get('note', '')}"
    each = ", ".join(f"{name} {count}" for name, count in bits.items() if names.weight(name) not in packed.missing)
    told += f"; bits: {shortened(each)}" if each else ""
    if packed.missing:
        told += f"; in eight bits: {shortened(', '.join(packed.missing))}, for which {src.name} has no weight of that name"
    out_console().print(f"{path}: {packed.bytes:,} bytes{ratio}{told}", markup=False, highlight=False)


def _figures(opened: Any, path: Path, src: Path) -> dict[str, Any]:
    """The figures of the archive's ONNX file on the test data."""
    from svdcompress.export import unpack as unpacked
    from svdcompress.pipeline import baked, beside

    with TemporaryDirectory(prefix="svdcompress") as folder:
        again = Path(folder) / "model.onnx"
        unpacked(path, again)
        return beside(again, src, opened.data, baked(opened.preprocessing, opened.recipe.task, opened.dim))


def unpack(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An archive made by svdc pack.")],
    out: Annotated[Path | None, typer.Option(help="The ONNX file to write (FILE with .onnx).")] = None,
    most: Annotated[int, typer.Option(metavar="MB", help="Most megabytes that it may expand to.")] = 2000,
    compact: Annotated[bool, typer.Option("--compact", help="Without zeros; they come back as the file is loaded.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write the ONNX file that an archive holds. Archives may come from anybody: no code of theirs runs.

    Example: svdc unpack digits.svdc --out model.onnx
    """
    from svdcompress import export

    path = out or file.with_suffix(".onnx")
    if path.exists():
        raise OutputError(f"--out: {path} exists already; name another file")
    check_file(path)
    written = export.unpack(file, path, most * MEGABYTE)
    if compact:
        written = export.write_compact(path, path)
    if json:
        print_json(written.to_dict())
        return
    names = f"inputs {', '.join(written.inputs)}; outputs {', '.join(written.outputs)}"
    out_console().print(f"{path}: {written.bytes:,} bytes; {names}", markup=False, highlight=False)
