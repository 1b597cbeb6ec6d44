"""The notebooks in docs/notebooks run from top to bottom and are committed without outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def test_there_are_some():
    assert len(NOTEBOOKS) >= 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_have_no_outputs_and_a_word_of_explanation(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert cells[0]["cell_type"] == "markdown" and "".join(cells[0]["source"]).startswith("# ")
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_run(path, tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: pip install '.[dev]'")
    client = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install '.[dev]'")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install '.[dev]'")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = nbformat.read(path, as_version=4)
    client.NotebookClient(notebook, timeout=1200, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    printed = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    assert printed and not [out for out in printed if out["output_type"] == "error"]
    (tmp_path / path.name).write_text(nbformat.writes(notebook), encoding="utf-8")
