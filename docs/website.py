"""Builds the documentation website: python docs/website.py [FOLDER]. Needs mkdocs-material, and no network.

README becomes the home page; guides, results and the pages of the top folder are put side by side, with their links adapted.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOP = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "THREATS.md")
LINK = re.compile(r"(\]\(|(?:src|srcset)=\")([^)#\"\s]+)")


def pages() -> dict[Path, str]:
    """The source file of each page and the page's name on the site."""
    found = {ROOT / "README.md": "index.md", **{ROOT / name: name for name in TOP}}
    found |= {path: path.name for path in sorted((ROOT / "docs").glob("*.md"))}
    return found | {path: f"results/{path.name}" for path in sorted((ROOT / "benchmarks" / "results").glob("*.md"))}


def gather(folder: Path) -> None:
    """Write all pages, the files that they link to, and the page docs/demo as it is, into a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs" / "demo", folder / "demo", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    names = pages()
    for source, name in names.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text(encoding="utf-8")
        target.write_text(
            LINK.sub(lambda match, s=source: match[1] + _link(match[2], s, names, folder), text), encoding="utf-8"
        )


def _link(link: str, source: Path, names: dict[Path, str], folder: Path) -> str:
    """A link of a source file, adapted to the site; a linked file that is not a page is copied next to the pages."""
    path = (source.parent / link).resolve()
    if re.match(r"\w+:", link) or not path.is_file():
        return link
    inside = path.relative_to(ROOT / "docs") if path.is_relative_to(ROOT / "docs" / "demo") else None
    name = names.get(path) or (inside.as_posix() if inside else "") or f"files/{path.relative_to(ROOT).as_posix()}"
    if path not in names and inside is None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)
    up = "../" * names[source].count("/")
    return up + name


def build(site: Path) -> None:
    """Build the site in a folder. Raises CalledProcessError if a page or a link is wrong."""
    gather(ROOT / "build" / "docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(ROOT / "mkdocs.yml"), "-d", str(site)]
    subprocess.run(command, check=True, cwd=ROOT)


if __name__ == "__main__":
    build(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site").resolve())
