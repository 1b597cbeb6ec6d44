"""Parts of benchmarks/results/reliability.md, each between marks of its own, so that one command rewrites its part alone."""

from __future__ import annotations

from pathlib import Path

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
PAGE = RESULTS / "reliability.md"


def put(name: str, lines: list[str], page: Path = PAGE) -> None:
    """Replace the lines between `<!-- name -->` and `<!-- /name -->`; a part that is not there yet goes to the end."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    old = page.read_text(encoding="utf-8") if page.is_file() else "# Reliability\n"
    head, found, rest = old.partition(begin)
    tail = rest.partition(end)[2] if found else "\n"
    gap = "" if found else "\n"
    page.write_text(gap.join([head, "\n".join([begin, *lines, end])]) + tail, encoding="utf-8")
