"""Places that make a run fail: a full disk, a folder moved away or removed, a read-only disk; part of `make test-kill`.

Each run is on a small disk in memory (if none can be mounted: only full disks, through a limit on file size). Expected are an
error of its own kind, with exit code 7, and, once the trouble is fixed, the same result as the undisturbed run's.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from killing import Whole, difference, undisturbed, warm
from marks import RESULTS, put

from svdcompress.errors import OutputError, SvdcError
from svdcompress.pipeline import run
from svdcompress.pipeline._context import Context

KEPT = RESULTS / "reliability_places.json"
SIZES = (4, 12, 20, 28, 40, 60, 80, 100, 150, 200, 260, 320, 380, 440)
"""Sizes in kilobytes of disks that are too small for a run."""

AT = ("data", "dense", "train", "prune", "export", "report")
TROUBLES = {"moved away": AT[1:], "removed": AT, "can only be read": AT[1:]}


@dataclass
class Disk:
    """A small disk in memory, mounted at a folder."""

    place: Path

    def mount(self, kilobytes: int) -> bool:
        """Mount it; returns whether this worked."""
        return not self._call("mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(self.place))

    def grow(self) -> None:
        """Make it large enough."""
        self._call("mount", "-o", "remount,size=100m", str(self.place))

    def close(self, folder: Path) -> None:
        """Make a folder on it read-only."""
        if self._call("mount", "--bind", str(folder), str(folder)) or self._call("mount", "-o", "remount,bind,ro", str(folder)):
            raise RuntimeError(f"{folder} cannot be mounted for reading")

    def open(self, folder: Path) -> None:
        """Make the folder writable again."""
        self._call("umount", str(folder))

    def unmount(self) -> None:
        """Unmount it, which discards its contents."""
        self._call("umount", str(self.place))

    def _call(self, *command: str) -> int:
        return subprocess.run(command, capture_output=True, check=False).returncode


def main() -> int:
    """Try each trouble, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--resume", action="store_true", help="go on from what is stored")
    given = parser.parse_args()
    tried: list[dict[str, Any]] = json.loads(KEPT.read_text()) if given.resume and KEPT.is_file() else []
    done = {(entry["trouble"], entry["where"]) for entry in tried}
    with tempfile.TemporaryDirectory(prefix="svdc-places-") as name:
        folder = Path(name)
        warm(folder)
        whole = undisturbed("thresholds tried, and the page", folder)
        disk = Disk(folder / "disk")
        disk.place.mkdir()
        mounts = disk.mount(1000)
        disk.unmount()
        cases = [("full", f"{size} kB", size) for size in SIZES]
        if mounts:
            cases += [(trouble, stage, 100_000) for trouble, stages in TROUBLES.items() for stage in stages]
        for trouble, where, size in cases:
            if (trouble, where) not in done:
                tried.append(one(trouble, where, whole, disk, mounts, size))
                KEPT.write_text(json.dumps(tried, indent=1) + "\n")
                put("places", page(tried, mounts))
    return 1 if any(entry["fault"] for entry in tried) else 0


def one(trouble: str, where: str, whole: Whole, disk: Disk, mounts: bool, size: int) -> dict[str, Any]:
    """A run that meets a trouble (at the start of a stage, except for a full disk), and how it ended."""
    out, away = disk.place / "run", disk.place / "away"
    if mounts:
        disk.mount(size)
    happens: dict[str, Callable[[], Any]] = {
        "full": lambda: None,
        "moved away": lambda: out.rename(away),
        "removed": lambda: subprocess.run(["rm", "-r", str(out)], check=True),
        "can only be read": lambda: disk.close(out),
    }
    limit = None if mounts else size * 1024
    said = forked(lambda: met(whole, out, where, happens[trouble], limit)).replace(f"{disk.place}/", "")
    if trouble == "can only be read":
        disk.open(out)
    elif trouble == "full" and mounts:
        disk.grow()
    elif away.exists():
        away.rename(out)
    resume = (out / "recipe.yaml").is_file()
    fault = "" if said.startswith("OutputError") else f"it ended with {said}"
    again = forked(lambda: run(whole.recipe, out, resume=resume))
    fault = fault or (f"afterwards: {again}" if again != "done" else difference(whole.folder, out))
    if mounts:
        disk.unmount()
    else:
        subprocess.run(["rm", "-r", str(out)], check=False)
    print(f"{trouble}, {where}: {said[:160]}; {'went on' if resume else 'ran anew'}: {fault or 'the same'}", flush=True)
    return {"trouble": trouble, "where": where, "said": said, "resumed": resume, "fault": fault}


def met(whole: Whole, out: Path, where: str, happens: Callable[[], Any], limit: int | None) -> None:
    """Make the run, in the forked process."""
    stage = Context.stage

    def begins(self: Context, name: str) -> Any:
        if name == where:
            happens()
        return stage(self, name)

    Context.stage = begins  # type: ignore[method-assign]
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    run(whole.recipe, out)


def forked(work: Callable[[], Any]) -> str:
    """Do the work in a fork; returns "done" or the error."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        said = "done"
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            work()
        except OutputError as error:
            said = f"OutputError: {error}"
        except SvdcError as error:
            said = f"exit code {error.exit_code}: {error}"
        except BaseException:
            said = traceback.format_exc()[-500:]
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        said = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return said or f"the process ended with {code}"


def page(tried: list[dict[str, Any]], mounts: bool) -> list[str]:
    """Returns the table for reliability.md."""
    rows = []
    for trouble in dict.fromkeys(entry["trouble"] for entry in tried):
        own = [entry for entry in tried if entry["trouble"] == trouble]
        refused = sum(entry["said"].startswith("OutputError") for entry in own)
        faults = sum(bool(entry["fault"]) for entry in own)
        resumed = sum(entry["resumed"] for entry in own)
        rows.append(f"| {trouble} | {len(own)} | {refused} | {len(own) - faults} | {resumed} | {faults} |")
    how = "on a disk in memory" if mounts else "by a limit on the size of files"
    return [
        "## Places that fail a run",
        "",
        f"`make test-kill` (`python tests/kill/places.py`), {how}: full disks of {SIZES[0]} to {SIZES[-1]} kB; a folder",
        "that is moved away, removed, or can only be read from some stage on. Refused: an error of a kind of its own. Right:",
        "the result of the undisturbed run once that is mended. Gone on with: by `--resume`; the others had nothing left.",
        "",
        "| the disk or folder is | tried | refused clearly | right in the end | gone on with | faults |",
        "|---|---|---|---|---|---|",
        *rows,
    ]


if __name__ == "__main__":
    sys.exit(main())
