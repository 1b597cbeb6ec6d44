"""Ten thousand mutations of each file format: `make fuzz`, or `python tests/fuzz/fuzz.py [FORMAT ...] [--count N]`.

After every CHUNK mutations, the table is written to benchmarks/results/reliability.md, between its marks, and all results to
reliability_fuzz.json: --resume continues from there. --only NUMBER repeats a fault and shows its traceback. Exits with 1 if
there are faults.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from formats import NAMES, formats
from harness import fuzz, mutate
from marks import RESULTS, put

KEPT = RESULTS / "reliability_fuzz.json"
CHUNK = 250
AND_LESS = " Rows with fewer than 10,000 are not finished: `--resume` goes on."


def main() -> int:
    """Run the mutations, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("formats", nargs="*", default=list(NAMES), metavar="FORMAT", help=", ".join(NAMES))
    parser.add_argument("--count", type=int, default=10_000, help="mutations of each format")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="make this mutation alone, and let its error through")
    parser.add_argument("--resume", action="store_true", help="go on from the stored counts of the same seed")
    parser.add_argument("--faults", action="store_true", help="try the stored faults again, and correct the counts")
    parser.add_argument("--no-results", action="store_true", help="write no files")
    given = parser.parse_args()
    stored = json.loads(KEPT.read_text()) if KEPT.is_file() else {}
    faults = 0
    with tempfile.TemporaryDirectory(prefix="svdc-fuzz-") as name:
        folder = Path(name)
        known = formats(folder)
        for each in given.formats:
            if given.only is not None:
                return again(known[each], given, folder)
            before = stored.get(each, {})
            entry = {"seed": given.seed, "tried": 0, "refused": 0, "right": 0, "faults": [], "seconds": 0.0}
            if before.get("seed") == given.seed and (given.resume or given.faults):
                entry = before
            for _ in further(known[each], entry, given, folder):
                if not given.no_results:
                    write(each, entry)
            print(line(each, entry), flush=True)
            faults += len(entry["faults"])
    return 1 if faults else 0


def further(form, entry: dict[str, Any], given: argparse.Namespace, folder: Path) -> Iterator[None]:
    """Add mutations to an entry's counts, or retry its faults; yields after each chunk so that it can be saved."""
    chunks = [(number, 1) for number, _ in entry["faults"]]
    if not given.faults:
        chunks = [(first, min(CHUNK, given.count - first)) for first in range(entry["tried"], given.count, CHUNK)]
    else:
        entry["tried"] -= len(chunks)
        entry["faults"] = []
    for first, size in chunks:
        started = time.monotonic()
        count = fuzz(form, size, folder, given.seed, first=first, limit_memory=True)
        for part, value in vars(count).items():
            entry[part] += value
        entry["seconds"] = round(entry["seconds"] + time.monotonic() - started, 1)
        for number, what in count.faults[:20]:
            print(f"    {form.name} {number}: {what}", flush=True)
        yield


def again(form, given: argparse.Namespace, folder: Path) -> int:
    """Repeat one mutation without catching its error."""
    good, place = folder / "good", folder / "again"
    good.mkdir()
    form.make(good)
    shutil.copytree(good, place)
    rng = random.Random(f"{form.name}:{given.seed}:{given.only}")
    mutate(form, place, rng)
    form.read(place, rng)
    return 0


def line(name: str, entry: dict[str, Any]) -> str:
    """A row of the table."""
    return f"| {name} | {entry['tried']:,} | {entry['refused']:,} | {entry['right']:,} | {len(entry['faults']):,} |"


def write(name: str, entry: dict[str, Any]) -> None:
    """Write a format's counts to reliability_fuzz.json, and all counts to reliability.md, between its own marks."""
    found = {**(json.loads(KEPT.read_text()) if KEPT.is_file() else {}), name: entry}
    found = {each: found[each] for each in NAMES if each in found}
    KEPT.write_text(json.dumps(found, indent=1) + "\n")
    rows = [line(each, of) for each, of in found.items()]
    put("fuzz", [
        "## Damaged and hostile files",
        "",
        f"`make fuzz` (`python tests/fuzz/fuzz.py --count 10000 --seed {entry['seed']}`): mutations of good files,",
        "of bytes and of values. Refused: an error of a kind of its own. Right: read, and looked at. A fault is",
        "anything else: an error of the program itself, more than 10 s of the processor or 1 GiB, a wrong result, or a model",
        "changed by a file that was refused." + (AND_LESS if any(of["tried"] < 10_000 for of in found.values()) else ""),
        "",
        "| format | tried | refused clearly | right | faults |",
        "|---|---|---|---|---|",
        *rows,
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
