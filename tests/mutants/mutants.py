"""A hundred small breaks of the package, and which of them no test notices: `make mutants`.

Mutants are drawn by a seed, ten in each of ROOMS. The tests that call the broken function run against each, those of its own
room and then those AROUND it, the quick ones first, until one fails. results/mutants.md lists the survivors with what
reasons.yaml here says of them; mutants.json keeps what was found, and goes on from there after a stop. Exits with 1 where a
survivor has no reason.

Why not mutmut or cosmic-ray: the first wraps each function, which torch.compile and signatures do not survive; the second runs
one command for all mutants, and neither draws a hundred or picks a function's tests by what they call.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from calls import instrument
from marks import RESULTS
from mutate import Mutant, mutants

ROOT = Path(__file__).parents[2]
AROUND = {
    "layers": ("test_objective.py", "test_relevance.py", "test_convert.py", "uncertainty"),
    "objective": ("convert/test_past.py", "train"),
    "relevance": ("prune", "train/test_shrink.py"),
    "prune": ("test_relevance.py", "test_checkpoint.py", "zoo"),
    "export": ("predict", "pipeline/test_export_model.py"),
    "uncertainty": ("likelihoods", "cli/test_memory.py"),
    "train": ("interop", "pipeline/test_parts.py"),
    "pipeline": ("predict", "cli"),
    "checkpoint": ("test_fixtures.py", "predict"),
    "likelihoods": ("uncertainty", "train"),
}
"""Rooms whose code is broken, and the tests beside their own that may notice."""

ROOMS = tuple(AROUND)
KEPT, PAGE = RESULTS / "mutants.json", RESULTS / "mutants.md"
REASONS = Path(__file__).with_name("reasons.yaml")

TESTS_SECONDS = 60.0
"""Seconds of tests of its own room, and as many around it, that run against a mutant at most, as they take without it."""

LIBRARIES = ("numpy", "torch", "onnx", "onnxruntime", "onnxscript", "safetensors.torch", "pydantic", "yaml", "accelerate",
             "torchmetrics", "rich.console", "typer", "pandas", "sklearn.datasets", "PIL.Image", "hypothesis", "pytest",
             "torch._dynamo", "torch.onnx._internal.exporter._core", "matplotlib.figure")  # fmt: skip
"""Imported once, before the forks that run the tests."""


def main() -> int:
    """Draw, break, test, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="*", default=list(ROOMS), metavar="ROOM", help=", ".join(ROOMS))
    parser.add_argument("--count", type=int, default=10, help="mutants of each room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=Path, help="keep which test calls what in this file, and take it from there")
    parser.add_argument("--own", action="store_true", help="the tests of a mutant's own room alone")
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
    if todo and not given.page:
        with tempfile.TemporaryDirectory(prefix="svdc-mutants-") as name:
            folder = Path(name)
            calls = Calls(given.calls, folder / "told")
            place = copied(folder / "broken")
            for library in LIBRARIES:
                __import__(library)
            for each in todo:
                kept[each.key] = entry = tried(each, place, calls, given.own)
                print(f"{each.file}:{each.line} {entry['killed_by'] or 'SURVIVED'}  {each.key}", flush=True)
                write(drawn, kept, given)
    missing = write(drawn, kept, given)
    print(f"{len(missing)} survivors without a reason in {REASONS.name}")
    return 1 if missing else 0


def room_of(file: str) -> str:
    """The room that a file is in, or is."""
    return file.split("/")[1].removesuffix(".py")


def draw(room: str, count: int, seed: int) -> list[Mutant]:
    """So many mutants of a room, by chance, and as far as it goes no two of one function."""
    single = ROOT / "svdcompress" / f"{room}.py"
    files = [single] if single.is_file() else sorted((ROOT / "svdcompress" / room).rglob("*.py"))
    found = sorted((each for file in files for each in mutants(file, ROOT)), key=lambda each: each.order(seed))
    first: dict[tuple[str, str], Mutant] = {}
    for each in found:
        first.setdefault((each.file, each.function), each)
    return [*first.values(), *(each for each in found if each not in first.values())][:count]


def copied(place: Path) -> Path:
    """The files of the repository, in another folder."""
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in names.stdout.splitlines():
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name)
    return place


class Calls:
    """Which test calls which functions, by files or folders of tests: looked at once, when they are asked for."""

    def __init__(self, file: Path | None, place: Path) -> None:
        self.file, self.place = file, place
        self.known: dict[str, Any] = json.loads(file.read_text()) if file is not None and file.is_file() else {}

    def of(self, tests: str) -> dict[str, Any]:
        """{test: whether it passed, seconds, functions that it calls} of the quick tests of a file or folder."""
        if tests not in self.known:
            self.known[tests] = self._look(tests) if (ROOT / "tests" / tests).exists() else {}
            if self.file is not None:
                self.file.write_text(json.dumps(self.known))
        return self.known[tests]

    def _look(self, tests: str) -> dict[str, Any]:
        print(f"which of tests/{tests} calls what ...", flush=True)
        if not self.place.exists():
            instrument(copied(self.place))
        told = self.place / "told"
        shutil.rmtree(told, ignore_errors=True)
        told.mkdir()
        path = os.pathsep.join(map(str, (self.place, self.place / "tests" / "mutants")))
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "calls", "-p", "no:xdist", f"tests/{tests}"]
        environment = {**os.environ, "PYTHONPATH": path, "CALLS_TO": str(told)}
        subprocess.run(command, cwd=self.place, env=environment, check=False, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = {}
        for each in told.iterdir():
            found |= json.loads(each.read_text())
        return found


def own_tests(room: str) -> tuple[str, ...]:
    """The files and folders of a room's own tests."""
    return (room, f"test_{room}.py")


def chosen(mutant: Mutant, calls: dict[str, Any]) -> list[str]:
    """Tests that call a mutant's function (or its file's, where it is in none), the quick ones first."""
    function = f"{mutant.file} {mutant.function}"

    def concerned(entry: dict[str, Any]) -> bool:
        return any(each == function or each.startswith(f"{function}.") for each in entry["functions"])

    names = [name for name, entry in calls.items() if entry["passed"] and concerned(entry)]
    if not names:  # what runs when the module is imported
        names = [name for name, entry in calls.items() if entry["passed"] and any(mutant.file in f for f in entry["functions"])]
    return sorted(names, key=lambda name: calls[name]["seconds"])


def tried(mutant: Mutant, place: Path, calls: Calls, own: bool) -> dict[str, Any]:
    """What the tests say of one mutant."""
    room = room_of(mutant.file)
    path = place / mutant.file
    source = path.read_text(encoding="utf-8")
    started, killed, ran, of = time.monotonic(), "", 0, 0
    for groups in (own_tests(room), () if own else AROUND[room]):
        known = {name: entry for group in groups for name, entry in calls.of(group).items()}
        names, tests, spent = chosen(mutant, known), [], 0.0
        for name in names:
            spent += known[name]["seconds"]
            if spent > TESTS_SECONDS and tests:
                break
            tests.append(name)
        ran, of = ran + len(tests), of + len(names)
        path.write_text(mutant.applied(source), encoding="utf-8")
        try:
            killed = forked(place, tests) if tests else ""
        finally:
            path.write_text(source, encoding="utf-8")
        if killed:
            break
    entry = {"key": mutant.key, "file": mutant.file, "line": mutant.line, "function": mutant.function, "killed_by": killed}
    return {**entry, "tests": ran, "of": of, "seconds": round(time.monotonic() - started, 1)}


def forked(place: Path, tests: list[str], patience: float = 600.0) -> str:
    """The first of some tests that fails in a copy of the repository, or ""; in a fork of this process."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            _inside(place, tests, writing)
        finally:
            os._exit(3)
    os.close(writing)
    before = signal.signal(signal.SIGALRM, lambda number, frame: os.kill(pid, signal.SIGKILL))
    signal.alarm(int(patience))
    try:
        with os.fdopen(reading) as file:
            said = file.read()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    if code == -signal.SIGKILL:
        return f"no end within {patience:g} s"
    failed = [line for line in said.splitlines() if line]
    return failed[0] if failed else "" if code == 0 else f"pytest ended with {code}"


def _inside(place: Path, tests: list[str], writing: int) -> None:
    import pytest

    class Tells:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                os.write(writing, f"{report.nodeid}\n".encode())

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                os.write(writing, f"{report.nodeid} (collection)\n".encode())

    os.chdir(place)
    os.environ["PYTHONPATH"] = str(place)
    sys.path[:] = [
        str(place),
        *(each for each in sys.path if Path(each or ".").resolve() not in (ROOT, *Path(__file__).parents[:2])),
    ]
    sys.dont_write_bytecode = True
    for name in [each for each in sys.modules if each.partition(".")[0] in ("svdcompress", "calls", "marks", "mutate")]:
        del sys.modules[name]
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    random.seed(0)
    code = pytest.main(["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", *tests], plugins=[Tells()])
    os._exit(int(code))


def write(drawn: list[Mutant], kept: dict[str, dict[str, Any]], given: argparse.Namespace) -> list[str]:
    """mutants.json and mutants.md; gives the keys of survivors without a reason."""
    entries = [kept[each.key] for each in drawn if each.key in kept]
    KEPT.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    reasons = (yaml.safe_load(REASONS.read_text(encoding="utf-8")) if REASONS.is_file() else None) or {}
    alive = [entry for entry in entries if not entry["killed_by"]]
    missing = [entry["key"] for entry in alive if entry["key"] not in reasons]
    lines = [
        "# Mutants",
        "",
        f"`make mutants` (`python tests/mutants/mutants.py --count {given.count} --seed {given.seed}`): small breaks of",
        "the code, and whether the quick tests notice. The tests that call the broken function run, of its own room first,",
        "until one fails. A survivor has a reason why it changes nothing that can be told, or gets a test.",
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
