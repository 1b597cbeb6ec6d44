"""The page: its sections in order, each made from the part of the results that it needs."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from svdcompress.report import _certainty, _doubts, _evaluation, _recall, _sections, _summary, _tradeoff, _use
from svdcompress.report._broken import Section, drawn

SECTIONS: dict[str, tuple[str, Section]] = {
    "summary": ("Dense vs. sparse", _summary.summary),
    "recall": ("Classes that lost", _recall.recall),
    "search": ("Trials", _tradeoff.search),
    "pictures": ("Plots of this experiment", _sections.pictures),
    "figures": ("Figures of this experiment", _sections.figures),
    "uncertainty": ("Uncertainty", _sections.uncertainty),
    "doubts": ("Least certain examples", _doubts.doubts),
    "evaluation": ("Compared with other methods", _evaluation.evaluation),
    "calibration": ("Calibration", _sections.calibration),
    "certainty": ("How sure it is", _certainty.certainty),
    "layers": ("Layers", _sections.layers),
    "pruning": ("Pruning", _sections.pruning),
    "curves": ("Training", _sections.curves),
    "relevance": ("Relevance", _sections.relevance),
    "filters": ("First layer", _sections.filters),
    "latency": ("Latency", _sections.latency),
    "use": ("Use this model", _use.use),
    "run": ("This run", _sections.run),
    "recipe": ("Recipe", _sections.recipe),
}
"""Heading and content of each section by its anchor; one that has no data gives "" and is left out."""


def page(results: Mapping[str, Any], folder: Path | None) -> str:
    """The whole page as one HTML text that refers to nothing outside itself.

    Each section is drawn on its own: one that fails is named on the page, and causes a SectionWarning.
    """
    title = str(results.get("name") or "svdcompress run")
    parts = {anchor: drawn(heading, content, results, folder) for anchor, (heading, content) in SECTIONS.items()}
    sections = {anchor: (SECTIONS[anchor][0], part) for anchor, part in parts.items() if part}
    return whole(title, drawn("The head", lambda found, _: _sections.subtitle(found), results, folder), sections)


def whole(title: str, subtitle: str, sections: Mapping[str, tuple[str, str]]) -> str:
    """A page of sections, {anchor: (heading, HTML)}. Its policy allows no script but the page's own, and loads nothing."""
    folder = files("svdcompress.report")
    style, script = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("style.css", "script.js"))
    digest = base64.b64encode(hashlib.sha256(f"\n{script}".encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)} – svdcompress</title>",
            '<link rel="icon" href="data:,">',
            f"<style>\n{style}</style>",
            "</head>",
            "<body>",
            "<header>",
            f"<h1>{escape(title)}</h1>",
            subtitle,
            _nav(sections),
            "</header>",
            "<main>",
            *(f'<section id="{anchor}">\n<h2>{head}</h2>\n{part}\n</section>' for anchor, (head, part) in sections.items()),
            "</main>",
            f"<script>\n{script}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _nav(sections: Mapping[str, tuple[str, str]]) -> str:
    links = "".join(f'<a href="#{anchor}">{heading}</a>' for anchor, (heading, _) in sections.items())
    return f'<nav aria-label="Sections">{links}</nav>' if links else ""
