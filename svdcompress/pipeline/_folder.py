"""A run's folder: never another run's, with files that are written whole, and a state from which a stopped run resumes."""

from __future__ import annotations

import shutil
import signal
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from svdcompress.errors import OutputError, SvdcError, explained, shortened
from svdcompress.files import is_temporary, make_folder, not_made, sealed, sweep, unsealed, write_atomically
from svdcompress.pipeline._extra import Facts
from svdcompress.pipeline._lock import THERE, holding, is_held
from svdcompress.recipe import HEADING, Recipe, dump_recipe, load_recipe
from svdcompress.sources import code_of_run
from svdcompress.sources.given import is_given

STATE = "state"
LOCK = f"{STATE}/lock"


def free_folder(name: str, parent: Path = Path("runs")) -> Path:
    """`runs/NAME`, or the first of `runs/NAME-2`, ... that does not exist yet."""
    folder, number = parent / name, 2
    while folder.exists():
        folder, number = parent / f"{name}-{number}", number + 1
    return folder


def prepare(out: Path, *, resume: bool = False, overwrite: bool = False) -> str:
    """Make a run's folder usable; returns a line to tell the user, or "".

    resume: the folder holds a stopped run; without its state, all stages are run again, and what earlier ones wrote is moved
        aside.
    overwrite: move what it holds aside, under a new name.
    Raises OutputError if it holds something else, cannot be made or cannot be written.
    """
    if resume:
        if not (out / "recipe.yaml").is_file() and not _restored(out):
            raise OutputError(f"--resume: {out} holds no run (it has no recipe.yaml)")
        if not (out / STATE).is_dir():
            if _reported(out):
                raise _over(out)
            if not _written_by_a_run(out / "recipe.yaml"):
                raise OutputError(f"--resume: {out} holds no run (no run wrote its recipe.yaml); leave out --resume")
        again = "" if (out / STATE).is_dir() else f"{out / STATE} is gone, so all stages of {out / 'recipe.yaml'} are run again"
        if again and (aside := _moved_aside(out)):
            again += f"; what they had written is now in {aside}"
        _make_state(out)
        if not (out / STATE / "run.json").is_file() and not _finished(out) and (left := _left(out)):
            raise OutputError(
                f"--resume: {out / STATE / 'run.json'} is missing, so it is not known what {', '.join(left)} there were made "
                f"with; remove {out / STATE} and resume to run all stages again"
            )
        if _finished(out):  # killed before its state was cleared
            RunState(out, writer=True).finish()
            raise _over(out)
        if not (out / STATE / "run.json").is_file():
            _begin_state(out)
        return again
    moved, aside = "", None
    if is_held(out / LOCK):
        raise OutputError(f"--out: a run is under way in {out}; wait for it, or choose another --out")
    if out.exists() and (not out.is_dir() or not _free(out)):
        if not overwrite:
            raise OutputError(_occupied(out))
        if Path.cwd().is_relative_to(out.resolve()):  # it would still be the working folder once it is moved
            raise OutputError(f"--overwrite: {out} is the working folder, or holds it; start the command in another folder")
        aside = _aside(out)
        try:
            out.rename(aside)
        except OSError as error:
            raise OutputError(f"--overwrite: {out} cannot be moved to {aside} ({error.strerror})") from error
        moved = f"what was in {out} is now in {aside}"
    _make_state(out)
    _begin_state(out, aside)  # writable, with some space?
    return moved


def _begin_state(out: Path, aside: Path | None = None) -> None:
    """Write the first `run.json`: the run's name, which its states of training carry, so that another run's are noticed; and
    where the former contents of its folder are."""
    text = sealed({"run": uuid.uuid4().hex, **({"aside": aside.name} if aside is not None else {})})
    write_atomically(out / STATE / "run.json", lambda path: path.write_text(text))


def _make_state(out: Path) -> None:
    try:
        (out / STATE).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"--out: {out}: {not_made(out, error, 'created')}") from error
    for folder in (out, out / STATE):
        sweep(folder)


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """While the body runs, no other process can resume the run in a folder, which `prepare` made. A kill releases the lock.

    Raises OutputError if another process holds the lock, or if the run has just finished. Where the system has no such locks,
    nothing is locked.
    """
    if not THERE or not (out / STATE).is_dir():
        yield
        return
    with ExitStack() as stack:
        try:
            free = stack.enter_context(holding(out / LOCK))
        except FileNotFoundError:  # it has just finished
            raise _over(out) from None
        except OSError as error:
            raise OutputError(f"{out}: cannot be written ({error.strerror})") from error
        if not free:
            raise OutputError(f"{out}: another process is working on this run; wait until it is done")
        if not (out / LOCK).exists():
            raise _over(out)
        yield


def _over(out: Path) -> OutputError:
    """The error for a run whose state is gone."""
    if _reported(out):
        return OutputError(f"--resume: the run in {out} is finished; its figures: svdc report {out}")
    return OutputError(f"--resume: {out / STATE} has just been removed; give the command again to run all stages again")


def _written_by_a_run(recipe: Path) -> bool:
    """Whether a recipe has the heading of those in runs' folders; without a state, nothing else tells it from a user's own."""
    try:
        return recipe.read_bytes().startswith(HEADING.partition(":")[0].encode())
    except OSError:
        return False


def _restored(out: Path) -> bool:
    """Write a run's lost recipe.yaml again, as `state/run.json` holds it; returns whether there was one."""
    if not (out / STATE / "run.json").is_file():
        return False
    text = RunState(out, writer=False).facts.get("recipe")
    if not isinstance(text, str):
        return False
    write_atomically(out / "recipe.yaml", lambda path: path.write_text(text, encoding="utf-8"))
    return True


def _moved_aside(out: Path) -> Path | None:
    """Move all files but the recipe, which a run without its state would write again, to a new folder; None if there are
    none."""
    files = [path for path in out.iterdir() if path.name != "recipe.yaml" and not is_temporary(path)]
    if not files:
        return None
    aside = make_folder(_aside(out.resolve()))  # "." has no name
    for path in files:
        try:
            path.rename(aside / path.name)
        except OSError as error:
            raise OutputError(f"--resume: {path} cannot be moved to {aside} ({error.strerror})") from error
    shutil.copy2(out / "recipe.yaml", aside / "recipe.yaml")
    return aside


def _reported(out: Path) -> bool:
    return (out / "report.json").is_file()


def _finished(out: Path) -> bool:
    """Whether a run wrote all its files, and only the clearing of its state was cut off."""
    if not _reported(out):
        return False
    if (out / STATE / "run.json").is_file():
        return RunState(out, writer=False).facts.get("finished") is True
    return not _left(out)


def _left(out: Path) -> list[str]:
    """What a run's state holds besides `run.json` and the lock."""
    return sorted(
        path.name for path in (out / STATE).iterdir() if not is_temporary(path) and path.name not in ("run.json", "lock")
    )


def has_trained(out: Path) -> bool:
    """Whether a run's folder holds anything trained."""
    return (out / "dense.safetensors").exists() or any((out / STATE).glob("*.pt"))


def discard(out: Path) -> str:
    """Undo what `prepare` did for a run that failed before it trained anything, so that the name is free again, or holds again
    what was moved aside; returns a line to tell the user then, else ""."""
    if has_trained(out):
        return ""
    aside = None
    with suppress(OutputError):
        aside = RunState(out, writer=False).facts.get("aside")
    shutil.rmtree(out / STATE, ignore_errors=True)
    with suppress(OSError):  # what failed may be the folder itself
        (out / "recipe.yaml").unlink(missing_ok=True)
        if out.is_dir() and not any(out.iterdir()):
            out.rmdir()
        if aside is not None and not out.exists():
            out.with_name(aside).rename(out)
            return f"what was moved to {out.with_name(aside)} is back in {out}"
    return ""


def _free(out: Path) -> bool:
    """Whether a folder is empty, or holds only leftovers of a run that was killed before it wrote its recipe."""
    inside = [path.relative_to(out) for path in out.rglob("*")]
    left = {path.as_posix() for path in inside if not any(is_temporary(part) for part in (path, *path.parents))}
    return left <= {STATE, f"{STATE}/run.json", LOCK}


def _occupied(out: Path) -> str:
    if not out.is_dir():
        return f"--out: {out} is a file; name a folder"
    if (out / STATE / "run.json").is_file() or (_written_by_a_run(out / "recipe.yaml") and not _reported(out)):
        recipe = None
        with suppress(SvdcError):
            recipe = stored_recipe(out)
        how = f"continue with `{resume_command(out, recipe)}`"
        return f"--out: {out} holds a run that is not finished: {how}, or choose another --out"
    kind = "another run" if (out / "recipe.yaml").is_file() else "other files"
    return f"--out: {out} holds {kind}; choose another --out (or --overwrite, which moves the old folder aside)"


def resume_command(out: Path, recipe: Recipe | None = None, *more: str) -> str:
    """The command that resumes a run, with --trust-code if its recipe names code. It is a Python call if its model, data or
    loss were handed over in Python. more: further options."""
    if recipe is not None and any(map(is_given, (recipe.model.name, recipe.data.name, recipe.loss.name))):
        changed = [each.removeprefix("--set ").partition("=") for each in more if each.startswith("--set ")]
        settings = f"settings={{{', '.join(f'{name!r}: {value}' for name, _, value in changed)}}}, " if changed else ""
        return f"svdcompress.sparsify(..., {settings}out={str(out)!r}, resume=True)"
    trust = ("--trust-code",) if recipe is not None and code_of_run(recipe) else ()
    return " ".join(("svdc sparsify --resume --out", str(out), *more, *trust))


def _aside(out: Path) -> Path:
    number = 1
    while (aside := out.with_name(f"{out.name}.old-{number}")).exists():
        number += 1
    return aside


class RunState:
    """Small facts of a run that a later process needs (such as the seconds of each stage), as JSON in `state/`."""

    def __init__(self, out: Path, writer: bool) -> None:
        self.folder = out / STATE
        self.out = out
        self.writer = writer
        self.facts: dict[str, Any] = {}
        file = self.folder / "run.json"
        if file.is_file():
            try:
                self.facts = unsealed(file.read_bytes())
                Facts.model_validate(self.facts)
            except (ValueError, OSError) as error:  # a ValidationError is a ValueError
                reason = explained(error) if isinstance(error, ValidationError) else shortened(str(error))
                raise OutputError(
                    f"{file}: damaged ({reason}); remove {self.folder} and resume to run all stages again"
                ) from error

    def put(self, **facts: Any) -> None:
        """Remember facts, also on disk."""
        self.facts.update(facts)
        if self.writer:
            text = sealed(self.facts)
            write_atomically(self.folder / "run.json", lambda path: path.write_text(text))

    def write_recipe(self, recipe: Recipe) -> None:
        """Write the resolved recipe into the run's folder, and into `state/run.json`, where no one edits it by hand."""
        if self.writer:
            text = HEADING + dump_recipe(recipe)
            write_atomically(self.out / "recipe.yaml", lambda path: path.write_text(text, encoding="utf-8"))
            self.put(recipe=text)

    def finish(self) -> None:
        """Mark the run as finished, and remove what only a resumed run needs and what killed ones left half-written.

        `run.json` is marked first and removed last, so that a kill in between leaves no run that looks unfinished.
        """
        if not self.writer:
            return
        self.put(finished=True)
        sweep(self.out)
        for path in self.out.glob("*.all-inputs.onnx*"):  # from a comparison that was killed
            path.unlink(missing_ok=True)
        for path in list(self.folder.iterdir()):
            if path.name not in ("run.json", "lock"):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        for name in ("run.json", "lock"):
            (self.folder / name).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def stored_recipe(out: Path) -> Recipe:
    """The recipe of a run's folder. Raises OutputError if there is none."""
    if not (out / "recipe.yaml").is_file():
        raise OutputError(f"{out}: not a run's folder (it has no recipe.yaml)")
    return load_recipe(out / "recipe.yaml")


class Stop:
    """Whether a signal has asked the run to stop; callable."""

    def __init__(self) -> None:
        self.signal: str = ""

    def __call__(self) -> bool:
        return bool(self.signal)


@contextmanager
def signals() -> Iterator[Stop]:
    """While the body runs, the first SIGINT or SIGTERM asks for an orderly stop; a second one acts as usual."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: Any) -> None:
        stop.signal = signal.Signals(number).name
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
