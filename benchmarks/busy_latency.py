"""Whether other programs on the machine change how many times faster a small file counts: by wall-clock time, and by CPU time.

    python benchmarks/busy_latency.py RUN [RUN ...] [--busy 0 2] [--times 5] [--seconds 1]

RUN: the folder of a finished run, whose dense.onnx and model.onnx are measured as `cost.latencies` does it: one thread, in
turns, for --seconds (at least 10 calls of each, or 3 of slow files). Each call is timed by both clocks at once. The ratio of
the medians is what `--goal latency=2x` and the report go by. --times: measurements for each number of busy processes. Start it
on an idle machine. Results: benchmarks/results/busy_latency.json and busy_latency.md.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mnist import machine, read, write

from svdcompress import cost
from svdcompress.pipeline import feed, open_run

HERE = Path(__file__).resolve().parent
FILES = {"dense": "dense.onnx", "small": "model.onnx"}
CLOCKS = {"wall-clock time": time.perf_counter, "CPU time of the thread": time.thread_time}
BATCHES = (1, 128)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run so many processes that compute all the time."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def measured(runs: dict[str, Any], seconds: float) -> dict[str, dict[str, float]]:
    """The median milliseconds of each file, by each clock, from the same calls."""
    times: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in runs} for clock in CLOCKS}

    def timed(name: str) -> Any:
        def call() -> None:
            starts = {clock: now() for clock, now in CLOCKS.items()}
            runs[name]()
            for clock, now in CLOCKS.items():
                times[clock][name].append(now() - starts[clock])

        return call

    cost.take_turns({name: timed(name) for name in runs}, seconds)
    return {clock: {name: 1e3 * statistics.median(each) for name, each in found.items()} for clock, found in times.items()}


def measurements(folder: Path, counts: list[int], times: int, seconds: float) -> list[dict[str, Any]]:
    """A run's rows: {batch, busy, clocks: {clock: {dense, small: milliseconds of each measurement}}}."""
    opened = open_run(folder, trust_code=True)
    paths = {name: folder / file for name, file in FILES.items()}
    make_input, rows = feed(opened.data, paths["dense"]), []
    sessions = {name: cost._session(path, 1) for name, path in paths.items()}
    for batch in BATCHES:
        given = make_input(batch)
        runs = {name: cost._runner(paths[name], session, given, batch) for name, session in sessions.items()}
        for count in counts:
            with busy(count):
                time.sleep(1)
                found = [measured(runs, seconds) for _ in range(times)]
            clocks = {clock: {name: [each[clock][name] for each in found] for name in FILES} for clock in CLOCKS}
            rows.append({"batch": batch, "busy": count, "clocks": clocks})
            print(folder.name, batch, count, {clock: told(ratios(each)) for clock, each in clocks.items()}, flush=True)
    return rows


def ratios(each: dict[str, list[float]]) -> list[float]:
    """How many times faster the small file is, by each measurement."""
    return [dense / small for dense, small in zip(each["dense"], each["small"], strict=True)]


def told(values: list[float]) -> str:
    """A median, with the least and the largest."""
    return f"{statistics.median(values):.2f}x ({min(values):.2f} to {max(values):.2f})"


def table(results: dict[str, Any]) -> str:
    """Markdown: a row for each file, batch size and number of busy processes."""
    lines = [
        "# Latency on a busy machine",
        "",
        "Written by `benchmarks/busy_latency.py`, which says how. How many times faster the small file is than the dense one,",
        "by the ratio of two medians: the median of the measurements, the least and the largest one. ms: of the dense file.",
        "",
        f"{results['machine']['cpu']}, {results['machine']['cores']} cores; onnxruntime {results['onnxruntime']}, one thread; "
        f"{results['times']} measurements each. Busy processes: loops in Python.",
        "",
        "| run | batch | busy processes | " + " | ".join(f"{clock} | ms" for clock in CLOCKS) + " |",
        "|---|---|---|" + "---|---|" * len(CLOCKS),
    ]
    for run, rows in results["runs"].items():
        for row in rows:
            cells = [
                f"{told(ratios(row['clocks'][clock]))} | {statistics.median(row['clocks'][clock]['dense']):.3g}"
                for clock in CLOCKS
            ]
            lines.append(f"| {run} | {row['batch']} | {row['busy']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure the runs in order; write after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    path = HERE / "results" / "busy_latency.json"
    results = read(path)
    results |= {"machine": machine(), "onnxruntime": version("onnxruntime"), "times": options.times}
    results.setdefault("runs", {})
    for folder in options.runs:
        results["runs"][folder.name] = measurements(folder, options.busy, options.times, options.seconds)
        write(path, results)
        path.with_suffix(".md").write_text(table(results), encoding="utf-8")


if __name__ == "__main__":
    main()
