"""Sections of the page that cannot be drawn: named on the page, and told as a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from svdcompress.errors import shortened

Section = Callable[[Mapping[str, Any], "Path | None"], str]
"""A function of the results and the run's folder that returns HTML."""


class SectionWarning(UserWarning):
    """A section of the page could not be drawn. section: its heading; reason: the error in one line, in whole: `__cause__`."""

    def __init__(self, section: str, error: Exception) -> None:
        line = next(iter(str(error).strip().splitlines()), "")
        self.section, self.reason = section, shortened(f"{type(error).__name__}: {line}")
        super().__init__(f"report.html: {section} could not be drawn ({self.reason}); the rest of the page is there")
        self.__cause__ = error


def drawn(heading: str, content: Section, results: Mapping[str, Any], folder: Path | None) -> str:
    """A section's content, or why there is none."""
    try:
        return content(results, folder)
    except Exception as error:  # results of any version, other packages' drawings: no section is worth the others
        told = SectionWarning(heading, error)
        warnings.warn(told)
        return f'<p class="warning">{escape(f"{heading} could not be drawn ({told.reason}).")}</p>'
