"""Ten thousand mutations of each format that is read: `make fuzz`, or `python tests/fuzz/fuzz.py [FORMAT ...] [--count N]`.

The table goes into benchmarks/results/reliability.md, between its marks, and the whole into reliability_fuzz.json. A fault is
made again by --only NUMBER, with its traceback. Exits with 1 where there are faults.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from formats import NAMES, formats
from harness import Count, fuzz, mutate

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
BEGIN, END = "<!-- fuzz -->", "<!-- /fuzz -->"


def main() -> int:
    """Fuzz, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("formats", nargs="*", default=list(NAMES), metavar="FORMAT", help=", ".join(NAMES))
    parser.add_argument("--count", type=int, default=10_000, help="mutations of each format")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="make this mutation alone, and let its error through")
    parser.add_argument("--no-results", action="store_true", help="write no files")
    given = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="svdc-fuzz-") as name:
        folder = Path(name)
        known = formats(folder)
        for each in given.formats:
            if given.only is not None:
                return again(known[each], given, folder)
            started = time.monotonic()
            count = fuzz(known[each], given.count, folder, given.seed, limit_memory=True)
            found[each] = {**vars(count), "seconds": round(time.monotonic() - started, 1)}
            print(line(each, count), flush=True)
            for number, what in count.faults[:20]:
                print(f"    {number}: {what}", flush=True)
    if not given.no_results:
        write(found, given)
    return 1 if any(entry["faults"] for entry in found.values()) else 0


def again(form, given: argparse.Namespace, folder: Path) -> int:
    """One mutation, its error not caught."""
    good, place = folder / "good", folder / "again"
    good.mkdir()
    form.make(good)
    shutil.copytree(good, place)
    rng = random.Random(f"{form.name}:{given.seed}:{given.only}")
    mutate(form, place, rng)
    form.read(place, rng)
    return 0


def line(name: str, count: Count) -> str:
    """A row of the table."""
    return f"| {name} | {count.tried:,} | {count.refused:,} | {count.right:,} | {len(count.faults):,} |"


def write(found: dict[str, dict[str, Any]], given: argparse.Namespace) -> None:
    """The table into reliability.md, between marks of its own, and everything into reliability_fuzz.json."""
    path, kept = RESULTS / "reliability.md", RESULTS / "reliability_fuzz.json"
    before = json.loads(kept.read_text()) if kept.is_file() else {}
    found = {name: {**before, **found}[name] for name in NAMES if name in {**before, **found}}
    kept.write_text(json.dumps(found, indent=1) + "\n")
    counts = {name: Count(*(entry[key] for key in ("tried", "refused", "right", "faults"))) for name, entry in found.items()}
    rows = [line(name, count) for name, count in counts.items()]
    text = "\n".join([
        BEGIN,
        "## Damaged and hostile files",
        "",
        f"`make fuzz` (`python tests/fuzz/fuzz.py`, last with `--count {given.count} --seed {given.seed}`): mutations of",
        "good files, of bytes and of values. Refused: an error of a kind of its own. Right: read, and looked at. A fault is",
        "anything else: an error of the program itself, more than 10 s of the processor or 1 GiB, a wrong result, or a model",
        "changed by a file that was refused.",
        "",
        "| format | tried | refused clearly | right | faults |",
        "|---|---|---|---|---|",
        *rows,
        END,
    ])  # fmt: skip
    old = path.read_text(encoding="utf-8") if path.is_file() else "# Reliability\n\n"
    head, begin, rest = old.partition(BEGIN)
    tail = rest.partition(END)[2] if begin else "\n"
    path.write_text(head + text + tail, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
