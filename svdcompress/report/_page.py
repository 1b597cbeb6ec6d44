"""The page: sections in their order, each from the part of the results that it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from svdcompress.report import _certainty, _evaluation, _sections, _tradeoff

Section = Callable[[Mapping[str, Any], "Path | None"], str]

SECTIONS: dict[str, tuple[str, Section]] = {
    "summary": ("Dense vs. sparse", _sections.summary),
    "search": ("Trials", _tradeoff.search),
    "pictures": ("Plots of this experiment", _sections.pictures),
    "figures": ("Figures of this experiment", _sections.figures),
    "uncertainty": ("Uncertainty", _sections.uncertainty),
    "evaluation": ("Compared with other methods", _evaluation.evaluation),
    "calibration": ("Calibration", _sections.calibration),
    "certainty": ("How sure it is", _certainty.certainty),
    "layers": ("Layers", _sections.layers),
    "pruning": ("Pruning", _sections.pruning),
    "curves": ("Training", _sections.curves),
    "relevance": ("Relevance", _sections.relevance),
    "filters": ("First layer", _sections.filters),
    "latency": ("Latency", _sections.latency),
    "run": ("This run", _sections.run),
    "recipe": ("Recipe", _sections.recipe),
}
"""Heading and content of each section by its anchor; one that has no data gives "" and is left out."""


def page(results: Mapping[str, Any], folder: Path | None) -> str:
    """The whole page as one HTML text that refers to nothing outside itself."""
    title = str(results.get("name") or "svdcompress run")
    parts = {anchor: content(results, folder) for anchor, (_, content) in SECTIONS.items()}
    present = [anchor for anchor, part in parts.items() if part]
    style = files("svdcompress.report").joinpath("style.css").read_text(encoding="utf-8")
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)} – svdcompress</title>",
            f"<style>\n{style}</style>",
            "<header>",
            f"<h1>{escape(title)}</h1>",
            _sections.subtitle(results),
            _nav(present),
            "</header>",
            "<main>",
            *(f'<section id="{anchor}">\n<h2>{SECTIONS[anchor][0]}</h2>\n{parts[anchor]}\n</section>' for anchor in present),
            "</main>",
            "</html>",
            "",
        ]
    )


def _nav(anchors: Iterable[str]) -> str:
    links = "".join(f'<a href="#{anchor}">{SECTIONS[anchor][0]}</a>' for anchor in anchors)
    return f"<nav>{links}</nav>"
