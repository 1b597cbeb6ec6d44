"""Python warnings of a command: ours as one line each, those of other packages in Python's format."""

import types
import warnings

import svdcompress.cli._common as common
from svdcompress.cli._common import command


def ours(message):
    """Warn as a module of the package would."""
    source = f"import warnings\nwarnings.warn({message!r}, stacklevel=2)"
    module = types.ModuleType("svdcompress.predict._something")
    exec(source, module.__dict__)


def test_our_warnings_are_lines_and_others_stay(capsys, monkeypatch):
    monkeypatch.setattr(common, "err_console", lambda: common.Console(file=common.sys.stderr, width=40))
    shown = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *more, **rest: shown.append(str(message)))

    @command
    def work():
        warnings.simplefilter("always")
        ours("x.npz: [dim] of the files 'x' is predicted, and the mask is left out")
        warnings.warn("another package's", stacklevel=1)

    before = warnings.showwarning
    work()
    assert capsys.readouterr().err == "warning: x.npz: [dim] of the files 'x' is predicted, and the mask is left out\n"
    assert shown == ["another package's"] and warnings.showwarning is before
