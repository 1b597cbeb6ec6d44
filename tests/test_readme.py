"""The figures in README and docs/benchmarks.md equal the stored results."""

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_tables_are_what_the_stored_results_say(monkeypatch):
    """To update them: python benchmarks/readme.py"""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    names = ("mnist", "readme")
    known = {name: sys.modules.pop(name, None) for name in names}
    try:
        readme = importlib.import_module("readme")
        texts = [page.read_text(encoding="utf-8") for page in readme.PAGES]
        assert sorted(name for text in texts for name in readme.names(text)) == sorted(readme.BLOCKS)  # each on one page
        for text in texts:
            assert readme.filled(text, ROOT / "benchmarks" / "results") == text
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update({name: module for name, module in known.items() if module is not None})
