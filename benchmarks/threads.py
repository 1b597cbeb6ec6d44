"""The digits' run beside busy processes: with threads that spin while they wait, that sleep, and as set by the command.

    python benchmarks/threads.py [--busy 0 1 2 4] [--epochs 10] [--table]

Each row is a whole short run (`svdc sparsify digits`) in a process of its own, and the ways alternate; the busy processes run
an empty loop. Besides a run's wall-clock seconds, the table has its CPU time: on an idle machine, a run with one thread takes
hardly longer than that. What else ran on the machine is noted in each row: a machine that others use is not idle at 0.
Written to benchmarks/results/threads.json and threads.md; --table: only threads.md, from the stored rows.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TRAINING = ("dense", "train", "recover")

WAYS: dict[str, dict[str, str]] = {
    "all threads, spinning": {"OMP_NUM_THREADS": str(os.cpu_count()), "GOMP_SPINCOUNT": "300000"},  # GNU's own default
    "all threads, sleeping": {"OMP_NUM_THREADS": str(os.cpu_count())},
    "as the command runs": {},
}


def others() -> str:
    """The processes that are running at this moment, by niceness."""
    found: Counter[int] = Counter()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, *fields = stat.read_text().rpartition(") ")[2].split()
        except OSError:  # it has ended
            continue
        if state == "R" and int(stat.parent.name) != os.getpid():
            found[int(fields[15])] += 1
    return ", ".join(f"{count} of niceness {nice}" for nice, count in sorted(found.items())) or "none"


def measured(way: str, busy: int, epochs: int) -> dict[str, Any]:
    """The figures of one run."""
    background, loads = others(), os.getloadavg()
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    env = {name: value for name, value in os.environ.items() if name not in names}
    env |= {"PYTHONPATH": str(ROOT), **WAYS[way]}
    sets = [f"dense.epochs={epochs}", f"train.epochs={2 * epochs}", f"recover.epochs={max(1, epochs // 3)}"]
    sets += ["report.html=false", "report.latency=false"]
    try:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "svdcompress", "sparsify", "digits", "--quiet", "--out", f"{folder}/run"]
            before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
            subprocess.run([*command, *(f"--set={one}" for one in sets)], env=env, check=True, cwd=folder)
            wall, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
            report = json.loads((Path(folder) / "run" / "report.json").read_text(encoding="utf-8"))
    finally:
        for loop in loops:
            loop.kill()
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    for loop in loops:
        loop.wait()
    return {
        "way": way,
        "busy": busy,
        "threads": report["torch_threads"],
        "seconds": round(wall, 1),
        "training": round(sum(report["seconds"][stage] for stage in TRAINING), 1),
        "cpu": round(cpu, 1),
        "beside": background,
        "load": round(loads[0], 1),
    }


def fair_share(row: dict[str, Any], processors: int) -> float:
    """How many times its CPU time a run with one thread takes at least, beside this many processes of its own niceness."""
    first = row["beside"].split(", ")[0]
    others_at_start = int(first.split()[0]) if first.endswith("niceness 0") else 0
    return max(1.0, (row["busy"] + others_at_start + 1) / processors)


def table(found: dict[str, Any]) -> str:
    """All rows as Markdown."""
    lines = [
        "# Threads beside busy processes",
        "",
        f"Written by `benchmarks/threads.py`: the digits' run with {found['epochs']} dense epochs and {2 * found['epochs']} of "
        f"fine-tuning, {found['processors']} processors, PyTorch {found['torch']}; one run each. Seconds on the clock of the "
        'run and of its training, and its time of the processors. "Times" is the run\'s seconds over the processor time of a '
        'run of one thread, which is about its time on an idle machine; "fair share" is what that would be if the processors '
        "were divided among all that ran when it began (processes of niceness 0; the others count for little).",
        "",
        "| busy | way | threads | seconds | training | processor time | times | fair share | already running | load |",
        "|---" * 10 + "|",
    ]
    alone = min(row["cpu"] for row in found["rows"] if row["threads"] == 1)
    for row in found["rows"]:
        cells = [row[name] for name in ("busy", "way", "threads", "seconds", "training", "cpu")]
        cells += [f"{row['seconds'] / alone:.1f}", f"{fair_share(row, found['processors']):.1f}", row["beside"], row["load"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--table", action="store_true", help="write threads.md from the rows that are there")
    given = parser.parse_args()
    if given.table:
        rows = json.loads((RESULTS / "threads.json").read_text(encoding="utf-8"))
        (RESULTS / "threads.md").write_text(table(rows), encoding="utf-8")
        return
    from importlib.metadata import version

    found: dict[str, Any] = {"epochs": given.epochs, "processors": os.cpu_count(), "torch": version("torch"), "rows": []}
    for busy in given.busy:
        for way in reversed(given.ways):  # one thread first: the table's yardstick
            found["rows"].append(measured(way, busy, given.epochs))
            print(found["rows"][-1], flush=True)
            (RESULTS / "threads.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            (RESULTS / "threads.md").write_text(table(found), encoding="utf-8")


if __name__ == "__main__":
    main()
