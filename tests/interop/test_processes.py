"""The callbacks in several processes: two gloo processes on the CPU, and what decides before they start."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

L = pytest.importorskip("lightning.pytorch")

LIGHTNING = """
import json, sys, warnings
import lightning.pytorch as L, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from svdcompress.interop.lightning import SparsifyCallback

out, said = {}, []
warnings.showwarning = lambda message, *rest: said.append(str(message))

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.body(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

torch.manual_seed(0)
x = torch.randn(24, 6)
saved = L.callbacks.ModelCheckpoint(sys.argv[1], monitor="svdc_sparsity", mode="max")
callback = SparsifyCallback(schedule=1.0)
trainer = L.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", callbacks=[callback, saved], logger=False,
                    enable_progress_bar=False, enable_model_summary=False, limit_train_batches=2)
trainer.fit(Module(), DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=3))
out |= {"said": said, "best": float(saved.best_model_score), "N": callback.penalty.num_examples}
print("FOUND " + json.dumps(out), flush=True)
torch.distributed.destroy_process_group()
"""


def launch(folder, text: str) -> list[dict]:
    """What each of two processes found."""
    script = folder / "work.py"
    script.write_text(text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd(), "MASTER_ADDR": "127.0.0.1"}
    base |= {"MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "one"}
    running = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    found = []
    for process in running:
        printed, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-2000:]
        found += [json.loads(line.removeprefix("FOUND ")) for line in printed.splitlines() if line.startswith("FOUND ")]
    return found


@pytest.mark.slow
def test_lightning_in_two_processes(tmp_path):
    first, second = launch(tmp_path, LIGHTNING)
    assert first["best"] == second["best"]
    assert not [line for line in first["said"] + second["said"] if "sync_dist" in line]
