"""The command line: `svdc`."""

from svdcompress.cli._app import app, main

__all__ = ["app", "main"]
