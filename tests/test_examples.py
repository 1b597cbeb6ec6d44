"""The examples for users' own training scripts: short, and doing what they say when run as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

FOLDER = Path(__file__).parent.parent / "recipes" / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_under_forty_lines(example):
    assert len(example.read_text(encoding="utf-8").splitlines()) < 40


def test_the_three_ways_are_there():
    assert [path.stem for path in EXAMPLES] == ["hf_trainer_callback", "lightning_callback", "plain_pytorch"]


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_leaves_a_sparse_onnx_file_that_still_reads_digits(example, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent.parent)}
    done = subprocess.run([sys.executable, str(example)], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    kept, total = (int(text.replace(",", "")) for text in re.search(r"([\d,]+) of ([\d,]+) weights kept", done.stdout).groups())
    assert kept < 0.5 * total, done.stdout

    import onnxruntime

    session = onnxruntime.InferenceSession(str(tmp_path / "digits.onnx"), providers=["CPUExecutionProvider"])
    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)
    given = session.get_inputs()[0]
    images = images[:, None] if len(given.shape) == 4 else images.reshape(len(images), -1)
    logits = session.run(None, {given.name: images})[0]
    error = 100 * np.mean(logits.argmax(1) != digits.target)
    assert error < 10, f"{error:.1f} % of the digits are misread"
