"""The examples for people's own training scripts: short, and they do what they say, run as a user runs them."""

from __future__ import annotations

import ast
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


@pytest.mark.slow
@pytest.mark.parametrize("batches", [1, 4])
def test_lightning_counts_the_kl_once_a_step_however_many_batches_it_takes(batches):
    """Lightning divides each batch's loss by their number in a step; what a hook adds after that would count several times."""
    import lightning as L
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import svdcompress as svdc

    data = TensorDataset(torch.zeros(8, 64), torch.zeros(8, dtype=torch.long))
    tree = ast.parse((FOLDER / "lightning_callback.py").read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef)]
    example = {"data": data}
    exec(compile(tree, "lightning_callback.py", "exec"), example)
    seen = []

    class Nothing(torch.nn.Module):
        def forward(self, output, target):
            return 0 * output.sum()

    class Watch(example["Sparsify"]):
        def on_train_epoch_start(self, trainer, module):
            module.loss.set_epoch(20)  # beta is 1
            module.loss.nll = Nothing()

        def on_before_optimizer_step(self, trainer, module, optimizer):
            first = module.net[0].log_sigma2
            (whole,) = torch.autograd.grad(svdc.kl_divergence(module) / len(data), first)
            seen.append(torch.allclose(first.grad, whole, rtol=1e-4))

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(max_epochs=1, accumulate_grad_batches=batches, accelerator="cpu", callbacks=[Watch()], **quiet)
    trainer.fit(example["Digits"](), DataLoader(data, batch_size=2))
    assert seen == [True] * (4 // batches)
