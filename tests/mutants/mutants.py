"""A hundred small mutations of the package, and which of them no test notices: `make mutants`.

Mutants are drawn from a seed, ten in each of ROOMS. Tests run against each, those nearest to the mutated function first
(nearest.py), until one fails or they have run for SECONDS. At the end the tests that failed run once without any mutant: a
test that fails then too does not count. results/mutants.md lists the survivors with their reasons from reasons.yaml here;
mutants.json stores the results, so that a stopped run can be continued. Exits with 1 if a survivor has no reason.

Why not mutmut or cosmic-ray: the first wraps each function, which breaks torch.compile and signatures; the second runs one
command for all mutants; and neither draws a hundred or picks a function's tests.
"""

from __future__ import annotations

import argparse
import compileall
import gc
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from marks import RESULTS
from mutate import Mutant, mutants
from nearest import Nearest

ROOT = Path(__file__).parents[2]
ROOMS = ("layers", "objective", "relevance", "prune", "export", "uncertainty", "train", "pipeline", "checkpoint", "likelihoods")
KEPT, PAGE = RESULTS / "mutants.json", RESULTS / "mutants.md"
REASONS = Path(__file__).with_name("reasons.yaml")

BESIDE = {
    "svdcompress/layers/_known.py": ("convert/test_subclasses.py",),
    "svdcompress/layers/_positions.py": ("uncertainty/test_shared_weights.py",),
    "svdcompress/pipeline/_checks.py": ("pipeline/test_checks.py",),
    "svdcompress/prune/_operators/_follow.py": ("prune/test_products.py",),
    "svdcompress/train/_loop.py": ("train/test_segments.py",),
    "svdcompress/train/_threads.py": ("train/test_thread_trial.py",),
    "svdcompress/train/_state.py": ("train/test_fit.py", "pipeline/test_hand_edited.py"),
}
"""The tests of files that are tested in another room, or whose tests mention none of their names."""

START = 5
"""Seconds of processor time that pytest may take to start."""

SECONDS = 30
"""Processor time for tests against a mutant. MOST_TESTS is their largest number:"""

MOST_TESTS = 60

BYTES = 12 * 2**30
"""Address space for the tests: a mutant may have lost the check that limits the memory a file can ask for."""

ENOUGH = 99
"""Pytest's exit status when the time is up."""

LIBRARIES = ("numpy", "torch", "onnx", "onnxruntime", "onnxscript", "safetensors.torch", "pydantic", "yaml", "accelerate",
             "torchmetrics", "rich.console", "typer", "pandas", "sklearn.datasets", "PIL.Image", "hypothesis", "pytest",
             "torch._dynamo", "torch.onnx._internal.exporter._core", "matplotlib.figure", "hypothesis.strategies",
             "_hypothesis_pytestplugin", "hypothesis.internal.conjecture.engine")  # fmt: skip
"""Imported once, before the forks that run the tests."""


def main() -> int:
    """Draw mutants, test them and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="*", default=list(ROOMS), metavar="ROOM", help=", ".join(ROOMS))
    parser.add_argument("--count", type=int, default=10, help="mutants of each room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--survivors", action="store_true", help="only those that survived the last time, and new ones")
    parser.add_argument("--again", action="store_true", help="all of them, also those that were tried already")
    parser.add_argument("--page", action="store_true", help="write the page from what is stored, and try nothing")
    given = parser.parse_args()
    drawn = [each for room in ROOMS for each in draw(room, given.count, given.seed)]
    stored = {entry["key"]: entry for entry in json.loads(KEPT.read_text())} if KEPT.is_file() else {}
    kept = {each.key: stored[each.key] for each in drawn if each.key in stored}
    for key, entry in list(kept.items()):
        if room_of(entry["file"]) in given.rooms and (given.again or (given.survivors and not entry["killed_by"])):
            del kept[key]
    todo = [each for each in drawn if each.key not in kept and room_of(each.file) in given.rooms]
    if not given.page and (todo or any("sure" not in entry for entry in kept.values())):
        with tempfile.TemporaryDirectory(prefix="svdc-mutants-") as name:
            place = copied(Path(name) / "broken")
            nearest = Nearest(place)
            for library in LIBRARIES:
                __import__(library)
            for each in todo:
                kept[each.key] = entry = tried(each, place, nearest)
                print(f"{each.file}:{each.line} {entry['killed_by'] or 'SURVIVED'}  {each.key}", flush=True)
                write(drawn, kept, given)
            sift(place, kept)
    missing = write(drawn, kept, given)
    print(f"{len(missing)} survivors without a reason in {REASONS.name}")
    return 1 if missing else 0


def room_of(file: str) -> str:
    """The room of a file: its folder or its own name."""
    return file.split("/")[1].removesuffix(".py")


def draw(room: str, count: int, seed: int) -> list[Mutant]:
    """Draw `count` random mutants of a room, with no two in the same function as far as possible."""
    single = ROOT / "svdcompress" / f"{room}.py"
    files = [single] if single.is_file() else sorted((ROOT / "svdcompress" / room).rglob("*.py"))
    found = sorted((each for file in files for each in mutants(file, ROOT)), key=lambda each: each.order(seed))
    first: dict[tuple[str, str], Mutant] = {}
    for each in found:
        first.setdefault((each.file, each.function), each)
    return [*first.values(), *(each for each in found if each not in first.values())][:count]


def copied(place: Path) -> Path:
    """Copy the repository's files to another folder, with bytecode that is checked by the source's hash.

    With the source's time (the default), a mutant of the same size made within the same second would go unnoticed.
    """
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in names.stdout.splitlines():
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name)
    compileall.compile_dir(place / "svdcompress", quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    return place


def own_tests(file: str) -> tuple[str, ...]:
    """The test files and folders of a file's room, or of a file whose tests are elsewhere."""
    room = room_of(file)
    return BESIDE.get(file) or (room, f"test_{room}.py")


def tried(mutant: Mutant, place: Path, nearest: Nearest) -> dict[str, Any]:
    """Test one mutant; returns its entry."""
    path = place / mutant.file
    source = path.read_text(encoding="utf-8")
    started = time.monotonic()
    tests = nearest.tests(mutant.file, mutant.function, mutant.line, own_tests(mutant.file))[:MOST_TESTS]
    path.write_text(mutant.applied(source), encoding="utf-8")
    try:
        passed, failed = forked(place, tests)
    finally:
        path.write_text(source, encoding="utf-8")
    entry = {"key": mutant.key, "file": mutant.file, "line": mutant.line, "function": mutant.function}
    found = {"killed_by": failed[0] if failed else "", "tests": passed + len(failed)}
    return {**entry, **found, "seconds": round(time.monotonic() - started, 1)}


def sift(place: Path, kept: dict[str, dict[str, Any]]) -> None:
    """Drop new mutants whose test also fails in the unmodified copy; mark the others as sure."""
    new = {key: entry for key, entry in kept.items() if "sure" not in entry}
    tests = sorted({entry["killed_by"] for entry in new.values() if "::" in entry["killed_by"]})
    _, failed = forked(place, tests, seconds=SECONDS * len(tests), first=False) if tests else (0, [])
    for key, entry in new.items():
        if entry["killed_by"] in failed:
            print(f"fails without the mutant too: {kept.pop(key)['killed_by']}; try again", flush=True)
        else:
            entry["sure"] = True


def forked(place: Path, tests: list[str], seconds: float = SECONDS, first: bool = True) -> tuple[int, list[str]]:
    """How many tests of a repository copy passed, and which failed (first: stop at the first failure); run in a fork.

    No test starts after `seconds` of processor time. After four times that plus START the fork is killed, which counts as a
    failure, as does any other abnormal end.
    """
    most = int(4 * seconds) + START
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            gc.freeze()  # pytest collects garbage several times as it ends: among what was here before, that takes seconds
            resource.setrlimit(resource.RLIMIT_CPU, (most, most))  # a fork's time starts at zero
            resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
            _inside(place, tests, writing, seconds, first)
        finally:
            os._exit(3)
    os.close(writing)
    with os.fdopen(reading) as file:
        said = file.read().splitlines()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    failed = [line.removeprefix("failed ") for line in said if line.startswith("failed ")]
    if code not in (0, 1, ENOUGH) and not failed:
        failed = [f"no end within {most} s" if code in (-signal.SIGXCPU, -signal.SIGKILL) else f"pytest ended with {code}"]
    return said.count("passed"), failed


def _inside(place: Path, tests: list[str], writing: int, until: float, first: bool) -> None:
    import pytest

    class Tells:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                os.write(writing, f"failed {report.nodeid}\n".encode())
            elif report.when == "call" and report.passed:
                os.write(writing, b"passed\n")

        def pytest_runtest_setup(self) -> None:
            if time.process_time() > until:
                pytest.exit("enough", ENOUGH)

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                os.write(writing, f"failed {report.nodeid} (collection)\n".encode())

    os.chdir(place)
    os.environ["PYTHONPATH"] = str(place)
    sys.path[:] = [
        str(place),
        *(each for each in sys.path if Path(each or ".").resolve() not in (ROOT, *Path(__file__).parents[:2])),
    ]
    sys.dont_write_bytecode = False  # pytest needs it, so that each test file is rewritten only once
    for name in [each for each in sys.modules if each.partition(".")[0] in ("svdcompress", "nearest", "marks", "mutate")]:
        del sys.modules[name]
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    random.seed(0)
    options = ["-q", "--no-header", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist", *(["-x"] if first else [])]
    code = pytest.main([*options, *tests], plugins=[Tells()])
    os._exit(int(code))


def write(drawn: list[Mutant], kept: dict[str, dict[str, Any]], given: argparse.Namespace) -> list[str]:
    """Write mutants.json and mutants.md; returns the keys of survivors without a reason."""
    entries = [kept[each.key] for each in drawn if each.key in kept]
    KEPT.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    reasons = (yaml.safe_load(REASONS.read_text(encoding="utf-8")) if REASONS.is_file() else None) or {}
    alive = [entry for entry in entries if not entry["killed_by"]]
    missing = [entry["key"] for entry in alive if entry["key"] not in reasons]
    lines = [
        "# Mutants",
        "",
        f"`make mutants` (`python tests/mutants/mutants.py --count {given.count} --seed {given.seed}`): small breaks of",
        f"the code, and whether the quick tests notice. The {MOST_TESTS} tests nearest to the broken function run until one",
        f"fails, for {SECONDS} s of the processor's time. A survivor has a reason why it changes nothing that can be told,",
        "or gets a test.",
        "",
        "| room | mutants | tried | noticed | survivors | without a reason |",
        "|---|---|---|---|---|---|",
    ]
    for room in ROOMS:
        count = sum(room_of(each.file) == room for each in drawn)
        own = [entry for entry in entries if room_of(entry["file"]) == room]
        left = [entry for entry in own if not entry["killed_by"]]
        open_ = sum(entry["key"] in missing for entry in left)
        lines.append(f"| {room} | {count} | {len(own)} | {len(own) - len(left)} | {len(left)} | {open_} |")
    lines.append(f"| all | {len(drawn)} | {len(entries)} | {len(entries) - len(alive)} | {len(alive)} | {len(missing)} |")
    lines += ["", "## Survivors", ""]
    for entry in alive:
        change = entry["key"].removeprefix(f"{entry['file']} {entry['function']}: ")
        place = f"`{entry['file']}`, `{entry['function'] or 'module'}`"
        lines.append(f"- {place}: `{change}` ({entry['tests']} tests). {reasons.get(entry['key'], 'No reason yet.')}")
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return missing


if __name__ == "__main__":
    sys.exit(main())
