"""A hundred runs killed at random moments, each compared with the undisturbed one: `make test-kill`.

After each run, the table is written to benchmarks/results/reliability.md and all moments to reliability_kill.json: --resume
continues from there. --only NUMBER repeats a fault, as far as timings repeat. Exits with 1 if there are faults.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from killing import VARIANTS, Whole, one, undisturbed, warm
from marks import RESULTS, put

KEPT = RESULTS / "reliability_kill.json"
COMMANDS = 21
"""One run in this many is a real command; not a multiple of the number of variants."""


def main() -> int:
    """Kill the runs, compare and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variants", nargs="*", default=list(VARIANTS), metavar="VARIANT", help=", ".join(VARIANTS))
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="this run alone; nothing is written")
    parser.add_argument("--resume", action="store_true", help="go on from the stored runs of the same seed")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    given = parser.parse_args()
    stored: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.is_file() else {}
    records = stored["records"] if given.resume and stored.get("seed") == given.seed else []
    done = {record["number"] for record in records}
    numbers = [number for number in range(given.runs) if number not in done] if given.only is None else [given.only]
    with tempfile.TemporaryDirectory(prefix="svdc-kill-") as name:
        folder = Path(name)
        warm(folder)
        whole = {}
        for variant in dict.fromkeys(given.variants[number % len(given.variants)] for number in numbers):
            place = folder / f"whole-{len(whole)}"
            place.mkdir()
            whole[variant] = undisturbed(variant, place)
        gc.freeze()  # otherwise each fork copies the pages that the collector touches
        for record in in_workers(numbers, whole, folder, given):
            kills = ", ".join(f"{k['signal']} {k['stage'] or 'change ' + str(k['change'])}" for k in record["kills"])
            print(f"{record['number']:3d} {record['variant']}: {kills}: {record['fault'] or 'the same'}", flush=True)
            records.append(record)
            if given.only is None:
                KEPT.write_text(json.dumps({"seed": given.seed, "records": records}, indent=1) + "\n")
                put("kill", page(records, given))
    return 1 if any(record["fault"] for record in records) else 0


def in_workers(
    numbers: list[int], whole: dict[str, Whole], folder: Path, given: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """The runs of these numbers, as they finish; each worker is a fork with its own folder."""
    reading, writing = os.pipe()
    workers = []
    for worker in range(given.workers):
        place = folder / f"worker-{worker}"
        place.mkdir()
        pid = os.fork()
        if pid:
            workers.append(pid)
            continue
        try:
            os.close(reading)
            for number in numbers[worker :: given.workers]:
                variant = given.variants[number % len(given.variants)]
                record = one(number, variant, whole[variant], place, given.seed, command=number % COMMANDS == COMMANDS - 1)
                os.write(writing, json.dumps(asdict(record)).encode() + b"\n")  # a single write keeps lines whole
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        for line in file:
            yield json.loads(line)
    for pid in workers:
        os.waitpid(pid, 0)


def page(records: list[dict[str, Any]], given: argparse.Namespace) -> list[str]:
    """Returns the table for reliability.md."""
    rows = []
    for variant in dict.fromkeys(record["variant"] for record in records):
        rows.append(row(variant, [record for record in records if record["variant"] == variant]))
    kills = [kill for record in records for kill in record["kills"]]
    where = Counter(kill["stage"] or "a change of files" for kill in kills)
    several = sum(len(record["kills"]) > 1 for record in records)
    commands = sum(record["command"] for record in records)
    return [
        "## Killed runs",
        "",
        f"`make test-kill` (`python tests/kill/kill.py --runs {given.runs} --seed {given.seed}`): runs killed at random",
        "moments and resumed until they are done. Right: the same bytes of each model and ONNX file, the same numbers in",
        "`report.json` but for times, and no other files in the folder.",
        *([f"{len(records)} of the {given.runs} were done so far: `--resume` goes on."] if len(records) < given.runs else []),
        f"{several} runs were killed more than once; {commands} were commands of their own, the others forks of one process.",
        "",
        "| recipe | runs | kills | while resuming | SIGKILL / SIGTERM / SIGINT | right | faults |",
        "|---|---|---|---|---|---|---|",
        *rows,
        row("all", records),
        "",
        "Where they were: " + ", ".join(f"{name} {count}" for name, count in where.most_common()) + ".",
    ]


def row(name: str, records: list[dict[str, Any]]) -> str:
    """A row of the table."""
    kills = [kill for record in records for kill in record["kills"]]
    signals = Counter(kill["signal"] for kill in kills)
    faults = sum(bool(record["fault"]) for record in records)
    counts = " / ".join(str(signals[each]) for each in ("KILL", "TERM", "INT"))
    resuming = sum(kill["resuming"] for kill in kills)
    return f"| {name} | {len(records)} | {len(kills)} | {resuming} | {counts} | {len(records) - faults} | {faults} |"


if __name__ == "__main__":
    sys.exit(main())
