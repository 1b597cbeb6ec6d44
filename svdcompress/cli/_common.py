"""What the commands share: consoles, options, errors as one line."""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from svdcompress.errors import ModelError, OutputError, SvdcError, UsageError, out_of_memory
from svdcompress.files import not_made

MOST_SAMPLES = 1_000_000
"""More draws than this add nothing but time."""

Function = TypeVar("Function", bound=Callable[..., Any])

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel="Output")]
Json = Annotated[bool, typer.Option("--json", help="Print only the result, as JSON.", rich_help_panel="Output")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A finished run's folder.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")]
Samples = Annotated[int, typer.Option(help="Draws of the weights.", min=1, max=MOST_SAMPLES)]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-code", help="Allow the Python code that RUN's files name, if you trust it. See THREATS.md."),
]
ModelAgain = Annotated[
    str | None, typer.Option("--model", help="The model, named as for sparsify, instead of the one RUN names.")
]

WIDE = 160
"""Width in characters of tables written to a file or a pipe."""


def out_console() -> Console:
    """The console for results. In a file or a pipe, tables need not fit a screen."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE)


def err_console() -> Console:
    """The console for progress, warnings and errors."""
    return Console(file=sys.stderr)


def command(work: Function) -> Function:
    """Wrap a command so that an error becomes one clear line and the exit code of its kind; `--debug` shows the traceback."""

    @functools.wraps(work)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            with _warnings_as_lines(bool(kwargs.get("debug"))):
                return work(*args, **kwargs)
        except SvdcError as error:
            if kwargs.get("debug"):
                err_console().print_exception()
            else:
                _say(f"error: {error}")
            raise typer.Exit(error.exit_code) from None
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except (typer.Exit, typer.Abort, KeyboardInterrupt):
            raise
        except Exception as error:
            if type(error).__module__.startswith(("click", "typer")):
                raise
            if kwargs.get("debug"):
                err_console().print_exception()
            elif out_of_memory(error):
                _say("error: out of memory: use a machine or device with more")
            else:
                _say(f"error: {type(error).__name__}: {error} (this is a bug: please report it; --debug shows where)")
            raise typer.Exit(ModelError.exit_code if out_of_memory(error) else 1) from None

    return run  # type: ignore[return-value]


@contextmanager
def _warnings_as_lines(debug: bool) -> Iterator[None]:
    """Within this context, each of our own Python warnings is printed as one line; those of other packages are unchanged.

    debug: whether the traceback of an error that a warning tells of follows.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")  # torch's, about vmap and attention
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_globals.get("__name__") == "warnings":
                frame = frame.f_back
            if str(frame.f_globals.get("__name__")).startswith("svdcompress."):
                text = Text.assemble(("warning:", "yellow"), f" {message}")
                err_console().print(text, highlight=False, soft_wrap=True)
                if debug and isinstance(message, Warning) and (error := message.__cause__) is not None:
                    err_console().print("".join(traceback.format_exception(error)), markup=False, highlight=False)
            else:
                others(message, category, *where, **more)

        warnings.showwarning = show
        yield


def _say(text: str) -> None:
    err_console().print(text, style="red", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def short_of_memory(advice: str) -> Iterator[None]:
    """Within this context, an out-of-memory error becomes a ModelError with advice on what to lower."""
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            raise ModelError(f"out of memory: {advice}") from error
        raise


def on_device(device: str | None) -> Any:
    """The torch.device of a `--device`. Raises UsageError for one that is not available."""
    from svdcompress.train import find_place

    return find_place(device or "auto").device


def opened_run(run: Path, trust_code: bool, model: str | None = None) -> Any:
    """Open the run in a folder; with --trust-code, print a line that names the code that may run."""
    from svdcompress.pipeline import open_run
    from svdcompress.sources import code_in

    asked: dict[str, Any] = {"trust_code": trust_code, "model": model}
    opened = open_run(run, **{name: value for name, value in asked.items() if value})
    if trust_code:
        announce_code(run, code_in(opened.recipe))
    return opened


def announce_code(folder: Path, code: dict[str, str]) -> None:
    """Print which code named by a folder's files runs because of --trust-code."""
    if code:
        named = ", ".join(f"{name} ({field})" for field, name in code.items())
        err_console().print(
            f"--trust-code: running the code that {folder} names: {named}", markup=False, highlight=False, soft_wrap=True
        )


def made_folder(folder: Path, option: str = "--out") -> Path:
    """Make a folder if needed and try to write to it, before the work whose results go there. Raises OutputError."""
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise OutputError(f"{option}: {folder} is a file; name a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(f"{option}: {folder}: {not_made(folder, error, 'written')}") from error
    return folder


def check_file(path: Path, option: str = "--out") -> Path:
    """Check a file to be written, before the work. Raises OutputError if its folder is missing or if it is a folder itself."""
    if os.path.isdir(path):
        raise OutputError(f"{option}: {path} is a folder; name a file")
    if not os.path.isdir(path.absolute().parent):
        raise OutputError(f"{option}: {path}: there is no folder {path.parent}")
    made_folder(path.absolute().parent, option)
    return path


def print_json(value: Any) -> None:
    """Print a result to standard output as JSON."""
    from svdcompress.report import plain

    print(json.dumps(plain(value), indent=1, allow_nan=False))


def key_values(pairs: list[str], option: str) -> dict[str, Any]:
    """`key=value` options as a dict, the values read as YAML. Raises UsageError for anything else."""
    import yaml

    from svdcompress.recipe import parse_yaml

    found = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"{option} {pair}: write it as key=value")
        try:
            found[key] = parse_yaml(text)
        except (yaml.YAMLError, ValueError):
            found[key] = text
    return found
