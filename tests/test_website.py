"""The documentation website: every page is in the menu, links resolve, and nothing is loaded from elsewhere."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def website():
    spec = importlib.util.spec_from_file_location("website", ROOT / "docs" / "website.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_the_menu(part):
    if isinstance(part, str):
        return {part}
    return {name for each in (part.values() if isinstance(part, dict) else part) for name in in_the_menu(each)}


def test_every_page_but_results_is_in_the_menu(website):
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert in_the_menu(menu) == {name for name in website.pages().values() if not name.startswith("results/")}


def test_links_are_adapted_and_files_come_along(website, tmp_path):
    website.gather(tmp_path)
    home, own = ((tmp_path / name).read_text(encoding="utf-8") for name in ("index.md", "own-model.md"))
    assert "](own-model.md)" in home and "docs/" not in re.sub(r"`[^`]*`|https?://\S+|files/docs/", "", home)
    assert "](THREATS.md)" in own and "../" not in re.sub(r"`[^`]*`", "", own)
    assert (tmp_path / "files" / "docs" / "images" / "report-light.png").is_file()
    assert (tmp_path / "files" / "recipes" / "examples" / "hf_trainer_callback.py").is_file()
    for page in tmp_path.rglob("*.md"):
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            if page.parent == tmp_path and not re.match(r"\w+:", link) and link.endswith((".md", ".py", ".png")):
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_site_builds_without_a_network(website, tmp_path):
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install '.[docs]'")
    code = (
        "import socket, sys\n"
        "def refuse(*args): raise OSError('no network in this test')\n"
        "socket.socket.connect = refuse\n"
        "from mkdocs.__main__ import cli\n"
        "cli(sys.argv[1:])\n"
    )
    website.gather(ROOT / "build" / "docs")
    command = [sys.executable, "-c", code, "build", "--strict", "-f", str(ROOT / "mkdocs.yml"), "-d", str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    home = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    loaded = re.findall(
        r"<(?:script|img|source)[^>]*\bsrc(?:set)?=\"(https?:[^\"]+)|<link[^>]*stylesheet[^>]*href=\"(https?:[^\"]+)", home
    )
    assert not loaded and "81x fewer non-zeros" in home
