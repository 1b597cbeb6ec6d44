"""Runs that are killed at moments drawn from a seed, resumed, and compared with the undisturbed run.

A run is a fork of a process that has imported everything, so that Python's startup does not dominate; some are a real
`svdc sparsify`. It is killed at a time within a stage, or just before or after its n-th file change.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from svdcompress.errors import SvdcError
from svdcompress.pipeline import run
from svdcompress.pipeline._context import Context
from svdcompress.recipe import Recipe, dump_recipe, load_recipe

TINY = [
    "model.args={sizes: [64, 24, 10]}",
    "data.limit=300",
    "data.transform=[flatten]",
    "dense.epochs=10",
    "dense.lr=0.01",
    "train.epochs=12",
    "train.lr=0.01",
    "train.batch_size=20",
    "train.beta={start: 0, stop: 2, final: 0.5}",
    "recover.epochs=8",
    "recover.beta=0.02",
    "prune.remove_inputs=true",
    "uncertainty={samples: 5, budget: none}",
    "report={html: false, latency: false}",
    "device=cpu",
]

SHRINK = ["train.shrink=2", "train.beta={start: 0, stop: 1, final: 1}"]
DISTILL = ["train.distill={weight: 0.5}", "recover.distill={weight: 0.5}"]

VARIANTS: dict[str, list[str]] = {
    "plain": [],
    "shrink": SHRINK,
    "distillation": DISTILL,
    "shrink and distillation": [*SHRINK, *DISTILL],
    "search": ["search.max_drop=30", "search.levels=2", "search.trials=2"],
    "thresholds tried, and the page": ["relevance.candidates=[1, 2, 3]", "report={html: true, latency: false}"],
}
"""The recipes of the runs, as settings added to TINY: {name: settings}."""

SIGNALS = {"KILL": signal.SIGKILL, "TERM": signal.SIGTERM, "INT": signal.SIGINT}

COMPARED = ("model.safetensors", "model.onnx", "model_mc.onnx", "dense.safetensors", "dense.onnx", "recipe.yaml")
"""Files that must be identical byte for byte."""

TIMES = {"seconds", "created", "latency", "latency_ms", "threads"}
"""Keys of `report.json` that may differ between equal runs."""

CHANGES = ("replace", "rename", "unlink", "mkdir", "rmdir", "fsync")
"""Functions of `os` that change files or that are called between writing and renaming them."""

PATIENCE = 3600.0
"""Seconds after which a run that is neither done nor killed counts as a fault; many, because machines may be busy."""


class Fault(Exception):
    """A killed run did not resume as it should."""


@dataclass
class Moment:
    """When a run is killed: `later` seconds into the stage `stage`, or at the file change number `change`."""

    signal: str
    stage: str = ""
    later: float = 0.0
    change: int = 0
    before: bool = True
    twice: bool = False  # a second signal at once, which does not allow a clean stop


@dataclass
class Whole:
    """The undisturbed run: its folder, its stages with their seconds, and how many file changes it made."""

    recipe: Recipe
    folder: Path
    stages: dict[str, float]
    changes: int
    seconds: float


@dataclass
class Record:
    """How one run ended. kills: when it was really killed. fault: "" if the result equals the undisturbed one."""

    number: int
    variant: str
    command: bool
    kills: list[dict[str, Any]] = field(default_factory=list)
    fault: str = ""


def warm(folder: Path) -> None:
    """Make a run with all figures in this process, so that its forks find everything imported and prepared."""
    run(
        load_recipe("digits", [*TINY, "report={html: true, latency: true}", "dense.epochs=1", "train.epochs=1"]),
        folder / "warm",
    )


def recipe_of(variant: str) -> Recipe:
    """The recipe of a variant."""
    return load_recipe("digits", [*TINY, *VARIANTS[variant]])


def undisturbed(variant: str, folder: Path) -> Whole:
    """The whole run of a variant, in its own process."""
    recipe = recipe_of(variant)
    stages: dict[str, float] = {}
    started = time.monotonic()
    one = Forked(recipe, folder / "run", resume=False, log=folder / "whole.log")
    code, said = one.wait(stages)
    if code:
        raise RuntimeError(f"the undisturbed run failed: {said}\n{(folder / 'whole.log').read_text()}")
    return Whole(recipe, folder / "run", stages, one.changes, time.monotonic() - started)


class Forked:
    """A run in a fork of this process. moment: when it is killed."""

    def __init__(self, recipe: Recipe, out: Path, *, resume: bool, log: Path, moment: Moment | None = None) -> None:
        self.moment, self.changes, self.done = moment, 0, False
        self.reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(writing)
            return
        code = 1
        try:
            with log.open("a") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            code = _inside(recipe, out, resume, moment, writing)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def wait(self, stages: dict[str, float] | None = None) -> tuple[int, str]:
        """Wait for the end, killing the run at its moment: (exit code, message). stages: receives the seconds of each."""
        buffer, said, last, began = b"", "", "start", time.monotonic()
        due = self._due(last)
        until = time.monotonic() + PATIENCE
        while True:
            ready = select.select([self.reading], [], [], max(0.0, min(until, due or until) - time.monotonic()))[0]
            if not ready:
                if due is None:
                    os.kill(self.pid, signal.SIGKILL)
                    os.waitpid(self.pid, 0)
                    raise Fault(f"nothing for {PATIENCE:g} s in the stage {last}")
                due = None
                self._kill()
                continue
            chunk = os.read(self.reading, 65536)
            if not chunk:
                break
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                name, _, rest = line.decode(errors="replace").partition(" ")
                if name == "stage":
                    now = time.monotonic()
                    if stages is not None:
                        stages[last] = now - began
                    last, began = rest, now
                    due = due or self._due(rest)
                elif name == "changes":
                    self.changes = int(rest)
                elif name == "change":
                    self.done = True
                elif name == "said":
                    said = rest
        os.close(self.reading)
        if stages is not None:
            stages[last] = time.monotonic() - began
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), said

    def _due(self, stage: str) -> float | None:
        moment = self.moment
        return time.monotonic() + moment.later if moment and moment.stage == stage and not self.done else None

    def _kill(self) -> None:
        assert self.moment is not None
        self.done = True
        for _ in range(1 + self.moment.twice):
            os.kill(self.pid, SIGNALS[self.moment.signal])
            time.sleep(0.02 if self.moment.twice else 0)


def _inside(recipe: Recipe, out: Path, resume: bool, moment: Moment | None, writing: int) -> int:
    """The forked process: reports its stages, kills itself at its file change; returns the exit code that `svdc` would."""

    def tell(text: str) -> None:
        os.write(writing, f"{text}\n".encode())

    changes = [0]

    def counted(work: Callable[..., Any], name: str) -> Callable[..., Any]:
        def change(*args: Any, **kwargs: Any) -> Any:
            changes[0] += 1
            here = moment is not None and moment.change == changes[0]
            if here and moment and moment.before:
                tell(f"change {name}")
                os.kill(os.getpid(), signal.SIGKILL)
            found = work(*args, **kwargs)
            if here:
                tell(f"change {name}")
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        return change

    for name in CHANGES:
        setattr(os, name, counted(getattr(os, name), name))
    stage = Context.stage

    def told(self: Context, name: str) -> Any:
        tell(f"stage {name}")
        return stage(self, name)

    Context.stage = told  # type: ignore[method-assign]
    try:
        run(recipe, out, resume=resume)
        return 0
    except SvdcError as error:
        tell(f"said {type(error).__name__}: {' '.join(str(error).split())}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    finally:
        tell(f"changes {changes[0]}")


class Command:
    """A run by `svdc sparsify`, with the interface of Forked. Its moment is in seconds since its start."""

    def __init__(self, recipe: Recipe, out: Path, *, resume: bool, log: Path, moment: Moment | None = None) -> None:
        self.moment, self.done = moment, False
        own = out.with_name("own.yaml")
        own.write_text(dump_recipe(recipe))
        what = ["--resume"] if resume else [str(own)]
        self.log = log.open("a+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "svdcompress", "sparsify", *what, "--out", str(out), "--quiet"],
            stdout=self.log,
            stderr=self.log,
        )

    def wait(self, stages: dict[str, float] | None = None) -> tuple[int, str]:
        try:
            self.process.wait(self.moment.later if self.moment else PATIENCE)
        except subprocess.TimeoutExpired:
            if self.moment is None:
                self.process.kill()
                raise Fault(f"not done after {PATIENCE:g} s") from None
            self.done = True
            for _ in range(1 + self.moment.twice):
                self.process.send_signal(SIGNALS[self.moment.signal])
                time.sleep(0.02 if self.moment.twice else 0)
        code = self.process.wait(PATIENCE)
        self.log.seek(0)
        lines = [line for line in self.log.read().splitlines() if line.startswith("error: ")]
        self.log.close()
        return code, lines[-1] if lines else ""


def moments(whole: Whole, rng: random.Random, command: bool) -> list[Moment]:
    """When a run is killed: one, two or three times."""
    found = []
    for _ in range(rng.choices((1, 2, 3), (55, 27, 18))[0]):
        name = rng.choices(tuple(SIGNALS), (70, 15, 15))[0]
        twice = name != "KILL" and rng.random() < 0.25
        if command:
            found.append(Moment(name, "start", rng.uniform(0, whole.seconds * 1.5), twice=twice))
        elif name == "KILL" and rng.random() < 0.5:
            found.append(Moment(name, change=rng.randint(1, whole.changes), before=rng.random() < 0.5))
        else:
            stage = rng.choice(list(whole.stages))
            found.append(Moment(name, stage, rng.uniform(0, whole.stages[stage]), twice=twice))
    return found


def one(number: int, variant: str, whole: Whole, folder: Path, seed: int, command: bool = False) -> Record:
    """A run that is killed at least once, resumed until it is done, and compared."""
    rng = random.Random(f"{seed}:{number}")
    record = Record(number, variant, command)
    kind = Command if command else Forked
    for _ in range(10):
        place = folder / "killed"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        try:
            record.kills = disturbed(kind, whole, place, moments(whole, rng, command))
            if not record.kills:  # it finished before any kill
                continue
            record.fault = difference(whole.folder, place / "run")
        except Fault as error:
            record.fault = str(error)
        break
    return record


def disturbed(kind: Any, whole: Whole, place: Path, wanted: list[Moment]) -> list[dict[str, Any]]:
    """Run, kill and resume, as a user would who follows the messages; returns when the run was really killed."""
    out, log, kills = place / "run", place / "log", []
    waiting: list[Moment | None] = [*wanted, None]
    resume = False
    for _ in range(12):
        moment = waiting.pop(0) if waiting else None
        running = kind(whole.recipe, out, resume=resume, log=log, moment=moment)
        code, said = running.wait()
        if moment is not None and running.done:
            kills.append({**asdict(moment), "resuming": resume, "code": code})
        if code == 0:
            return kills
        if "is finished" in said and resume:
            return kills
        stopped = running.done and (code < 0 or code == 130)
        if not stopped and not (resume and "holds no run" in said):
            raise Fault(
                f"exit code {code} when {'resumed' if resume else 'run'}, after {len(kills)} kills: {said or tail(log)}"
            )
        if code == 130 and "Continue with" in said and not (out / "recipe.yaml").is_file():
            raise Fault(f"it said how to go on, but left nothing to go on with: {said}")
        resume = (out / "recipe.yaml").is_file()
    raise Fault("not done after 12 tries")


def tail(log: Path) -> str:
    """The last lines that a run printed."""
    return " | ".join(log.read_text(errors="replace").strip().splitlines()[-3:])[-500:] if log.is_file() else ""


def difference(left: Path, right: Path) -> str:
    """What differs in a run's folder from the undisturbed one: names, bytes, numbers; "" if nothing does."""
    names = [sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) for folder in (left, right)]
    if names[0] != names[1]:
        return f"other files: {sorted(set(names[0]) ^ set(names[1]))}"
    for name in COMPARED:
        if (left / name).read_bytes() != (right / name).read_bytes():
            return f"{name} holds other bytes"
    reports = [json.loads((folder / "report.json").read_text()) for folder in (left, right)]
    return "; ".join(differing(*reports))[:1000]


def differing(left: Any, right: Any, where: str = "report.json") -> list[str]:
    """Places in which two values differ, except for TIMES."""
    if isinstance(left, dict) and isinstance(right, dict):
        if set(left) != set(right):
            return [f"{where}: other keys {sorted(set(left) ^ set(right))}"]
        return [line for key in left if key not in TIMES for line in differing(left[key], right[key], f"{where}.{key}")]
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = enumerate(zip(left, right, strict=True))
        return [line for index, pair in pairs for line in differing(*pair, f"{where}[{index}]")]
    same = left == right and type(left) is type(right)
    return [] if same else [f"{where}: {str(left)[:100]} and {str(right)[:100]}"]
