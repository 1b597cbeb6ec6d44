"""Pieces of HTML that the sections are made of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape, unescape
from typing import Any


def tag(name: str, content: str, kind: str = "") -> str:
    """An element; content is HTML."""
    return f'<{name} class="{kind}">{content}</{name}>' if kind else f"<{name}>{content}</{name}>"


def name_cell(name: Any) -> str:
    """A cell with a dotted name, which may break after its dots."""
    return tag("td", escape(str(name)).replace(".", ".<wbr>"), "name")


def right(content: str) -> str:
    """A right-aligned cell."""
    return tag("td", content, "number")


def table(headings: Iterable[str], body: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table that scrolls sideways if it is too wide. Headings that begin with ">" are right-aligned; cells that are not
    `<td>` elements are wrapped in one."""
    headings = list(headings)
    head = "".join(_heading(text) for text in headings)
    lines = ("".join(cell if cell.startswith("<td") else tag("td", cell) for cell in row) for row in body)
    rows = "".join(f"<tr>{line}</tr>" for line in lines)
    return scrolled(
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>",
        ", ".join(text.removeprefix(">") for text in headings if text),
        kind,
    )


def scrolled(content: str, label: str, kind: str = "") -> str:
    """A table in a box that scrolls, also by keyboard. label: what it is, for screen readers."""
    return f'<div class="wide {kind}" role="region" aria-label="{escape(f"table: {label}")}" tabindex="0">{content}</div>'


def _heading(text: str) -> str:
    if not text:
        return "<td></td>"  # an empty heading would be announced as one
    kind = ' class="number"' if text.startswith(">") else ""
    return f'<th scope="col"{kind}>{escape(text.removeprefix(">"))}</th>'


def figure(drawing: str, title: str, caption: str = "", label: str = "") -> str:
    """A picture with its title and caption, both HTML. label: the accessible name of an SVG, plain text (else the title)."""
    name = label or re.sub(r"<[^>]+>", "", title)
    drawing = drawing.replace("<svg ", f'<svg aria-label="{escape(unescape(name))}" ', 1)
    return f"<figure>{tag('h3', title) if title else ''}{drawing}{tag('figcaption', caption) if caption else ''}</figure>"


def legend(names: Sequence[str], dashes: Sequence[str] = ("solid",)) -> str:
    """Buttons, one for each series, that hide it in the drawings of the same `data-filter`."""
    items = "".join(
        f'<li><button type="button" aria-pressed="true" data-series="{k}">'
        f'<i style="border-top-color:var(--c{k % 6 + 1});border-top-style:{dashes[k // 6 % len(dashes)]}"></i>'
        f"{escape(str(name))}</button></li>"
        for k, name in enumerate(names)
    )
    return f'<ul class="legend">{items}</ul>'


def filtered(names: Sequence[str], content: str, dashes: Sequence[str] = ("solid",)) -> str:
    """Drawings with one legend for all of them."""
    return f"<div data-filter>{legend(names, dashes)}{content}</div>"


def figures(shown: Sequence[str], kind: str = "") -> str:
    """Figures in columns; "" where there are none."""
    return f'<div class="figures {kind}">{"".join(shown)}</div>' if shown else ""


def titled(title: str, content: str) -> str:
    """A block with a heading of its own, both HTML."""
    return f"<div><h3>{title}</h3>{content}</div>"


def paragraph(text: str) -> str:
    """A quiet paragraph of plain text; "" for none."""
    return tag("p", escape(text), "quiet") if text else ""


def bar(share: float, kind: str = "") -> str:
    """A share as a small bar."""
    return f'<span class="bar {kind}"><i style="width:{100 * min(max(share, 0), 1):.1f}%"></i></span>'


def shape(sizes: Sequence[int] | None) -> str:
    """A tensor's shape."""
    return "–" if not sizes else " × ".join(f"{n:,}" for n in sizes)


def length(value: Any) -> float | None:
    """The length of a list; any other value, such as a count, as it is."""
    return len(value) if isinstance(value, list) else value


def is_number(value: Any) -> bool:
    """Whether a value is a number (a Boolean is not)."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def number(key: str, value: Any) -> str:
    """A figure as text, by its kind; a dash if it is not a number."""
    if not is_number(value):
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if 1e-12 < abs(value) < 1e-4:
        return f"{value:.1e}"
    return f"{value:,.{2 if key == 'error' or abs(value) >= 100 else 4}f}"


def words(name: str) -> str:
    """A key as a heading: `mutual_information` -> mutual information; short names such as nll are abbreviations."""
    if name in ("nll", "ece", "rmse", "r2", "mae", "mi"):
        return name.upper()
    return {"brier": "Brier", "error": "error %"}.get(name, name.replace("_", " "))
