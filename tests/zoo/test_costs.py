"""Networks of realistic size: the cost of discovery, surgery and verification, in CPU seconds and memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import re, sys, time
from pathlib import Path
import torch, transformers
sys.path.insert(0, "tests/zoo")
from masking import random_masks, shake
from svdcompress.convert import convert
from svdcompress.prune import prune

def peak():  # in GiB; ru_maxrss would begin at the size of the process that started this one
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 2**20

torch.set_num_threads(1)
torch.manual_seed(0)
name = sys.argv[1]
kind, config = {
    "resnet-50": ("ResNetForImageClassification", "ResNetConfig"),
    "vit-b": ("ViTForImageClassification", "ViTConfig"),
    "bert-base": ("BertForSequenceClassification", "BertConfig"),
}[name]
model = convert(shake(getattr(transformers, kind)(getattr(transformers, config)())).eval())
if name == "bert-base":
    inputs = {"input_ids": torch.randint(5, 999, (2, 128)), "attention_mask": torch.ones(2, 128, dtype=torch.long)}
else:
    inputs = torch.randn(2, 3, 224, 224)
masks = random_masks(model, 0.2, 0.4, 0.2)
before = peak()
start = time.process_time()
small = prune(model, inputs, masks=masks)
seconds = time.process_time() - start
after = peak()
report = small.pruning
assert report.parameters_after < 0.9 * report.parameters_before and not report.notes, report.notes
print(seconds, after - before, after)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "limit", "memory"), [("resnet-50", 10, 2.0), ("vit-b", 20, 4.0), ("bert-base", 20, 4.5)])
def test_real_sizes(name: str, limit: float, memory: float) -> None:
    """CPU time of one thread, so that the number of cores and other work on the machine matter little.

    memory: GiB of the whole process, model and torch included.
    """
    run = subprocess.run([sys.executable, "-c", SCRIPT, name], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    seconds, _, peak = map(float, run.stdout.split())
    assert seconds < limit and peak < memory, (seconds, peak)
