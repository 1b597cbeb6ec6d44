"""A few mutations of each format in every test run; `make fuzz` tries ten thousand of each."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from formats import NAMES, formats
from harness import fuzz

COUNTS = {"run": 25, "csv": 60, "text": 12, "images": 60, "archive": 40, "onnx": 25, "validation": 25, "tar": 60, "parquet": 60}
MORE = 2000
NEEDED = {"text": ("transformers",), "parquet": ("pyarrow",)}


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    return formats(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("name", NAMES)
def test_mutated_files_are_refused_clearly_or_read_rightly(name, known, tmp_path):
    for needed in NEEDED.get(name, ()):
        pytest.importorskip(needed)
    found = fuzz(known[name], COUNTS.get(name, 150), tmp_path)
    assert found.faults == [] and found.refused > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_other_mutations_too(name, known, tmp_path):
    for needed in NEEDED.get(name, ()):
        pytest.importorskip(needed)
    assert fuzz(known[name], COUNTS.get(name, MORE), tmp_path, seed=1).faults == []
