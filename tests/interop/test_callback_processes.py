"""The callbacks in several processes: two gloo processes on the CPU, and what decides before they start."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import distributed
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset, SubsetRandomSampler, TensorDataset

from svdcompress.errors import UsageError
from svdcompress.interop._examples import count_examples, over_processes
from svdcompress.interop._noise import own_noise

L = pytest.importorskip("lightning.pytorch")

LIGHTNING = """
import json, sys, warnings
import lightning.pytorch as L, torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from svdcompress.interop.lightning import SparsifyCallback

out, said, drawn = {}, [], []
warnings.showwarning = lambda message, *rest: said.append(str(message))

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.body(batch[0]), batch[1])
        drawn.append(float(torch.randn(())))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

torch.manual_seed(0)
x = torch.randn(24, 6)
saved = L.callbacks.ModelCheckpoint(sys.argv[1], monitor="svdc_sparsity", mode="max")
callback = SparsifyCallback(schedule=1.0)
trainer = L.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", callbacks=[callback, saved], logger=False,
                    enable_progress_bar=False, enable_model_summary=False, limit_train_batches=2)
trainer.fit(Module(), DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=3))
out |= {"said": said, "best": float(saved.best_model_score), "N": [callback.penalty.num_examples]}
whole = TensorDataset(x, (x[:, 0] > 0).long())
rank = trainer.global_rank
for part in (Subset(whole, range(rank, 24, 2)), TensorDataset(x[rank::2], (x[rank::2, 0] > 0).long())):
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", callbacks=[callback], logger=False,
                        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
                        enable_checkpointing=False)
    trainer.fit(Module(), DataLoader(part, batch_size=3))
    out["N"].append(callback.penalty.num_examples)
out |= {"drawn": drawn, "after": float(torch.randn(()))}
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
    assert first["N"] == second["N"] == [24, 24, 12]
    asked = [[line for line in one["said"] if "each of 2 processes counts N = 12" in line] for one in (first, second)]
    assert [len(lines) for lines in asked] == [1, 0] and "num_examples=24" in asked[0][0]
    drawn = first["drawn"] + second["drawn"]
    assert len(set(drawn)) == len(drawn) and first["after"] == second["after"]


def draw(rank: int, world: int = 2, step: int = 3) -> tuple[float, float]:
    """What a process draws in a body and afterwards."""
    torch.manual_seed(5)
    with own_noise(rank, world, step, torch.device("cpu")):
        inside = float(torch.randn(()))
    return inside, float(torch.randn(()))


def test_each_process_has_its_own_noise_and_all_stay_alike():
    first, second, later, alone = draw(0), draw(1), draw(0, step=4), draw(0, world=1)
    assert len({first[0], second[0], later[0], alone[0]}) == 4
    assert first[1] == second[1] == later[1] and first == draw(0)
    torch.manual_seed(5)
    assert alone == (float(torch.randn(())), float(torch.randn(())))  # as without it


def test_hugging_faces_trainer_draws_noise_of_its_own_within_steps():
    transformers = pytest.importorskip("transformers")
    from svdcompress.interop.transformers import SparsifyCallback

    def drawn(rank: int) -> list[float]:
        callback, control = SparsifyCallback(), transformers.TrainerControl()
        torch.manual_seed(5)
        found = []
        for step in range(2):
            args = SimpleNamespace(process_index=rank, world_size=2, device=torch.device("cpu"))
            state = transformers.TrainerState(global_step=step)
            callback.on_step_begin(args, state, control)
            found.append(float(torch.randn(())))
            callback.on_step_end(args, state, control)
            found.append(float(torch.randn(())))
        callback.on_step_begin(args, state, control)  # a step that breaks off
        callback.on_train_end(args, state, control, model=torch.nn.Linear(1, 1))
        return [*found, float(torch.randn(()))]

    first, second = drawn(0), drawn(1)
    assert [one == other for one, other in zip(first, second, strict=True)] == [False, True, False, True, True]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Sized(Stream):
    def __len__(self):
        return 10


def test_n_of_several_processes():
    assert over_processes([(5, [0, 2, 4, 6, 8]), (5, [1, 3, 5, 7, 9])]) == 10
    assert over_processes([(3, [0, 1, 2]), (2, [2, 3])]) == 4
    assert over_processes([(12, None)]) == 12
    for parts in ([(5, None), (5, None)], [(5, [1, 2, 3, 4, 5])] * 2, [(5, None), (5, [1, 2, 3, 4, 5])]):
        with pytest.warns(UserWarning, match=r"each of 2 processes counts N = 5 .*num_examples=10"):
            assert over_processes(parts) == 5
    assert over_processes([(5, None), (5, None)], tell=False) == 5
    with pytest.raises(UsageError, match=r"4 to 5 training examples.*num_examples="):
        over_processes([(5, None), (4, None)])
    with pytest.raises(UsageError, match="num_examples: the number of training examples cannot be read"):
        over_processes([(5, None), (None, None)])


@pytest.mark.parametrize("kind", ["subset", "sampler", "sampler of a subset", "batches"])
def test_indices_are_those_in_the_whole_data(kind, monkeypatch):
    """As the first of two processes, of which the other has all odd examples."""
    whole = TensorDataset(torch.zeros(12, 1))
    loader = {
        "subset": lambda: DataLoader(Subset(whole, range(0, 12, 2))),
        "sampler": lambda: DataLoader(whole, sampler=SubsetRandomSampler(range(0, 12, 2))),
        "sampler of a subset": lambda: DataLoader(Subset(whole, range(0, 12, 2)), sampler=SubsetRandomSampler(range(6))),
        "batches": lambda: DataLoader(
            whole, batch_sampler=torch.utils.data.BatchSampler(SubsetRandomSampler(range(0, 12, 2)), 2, False)
        ),
    }[kind]()

    def gathered(parts, own):
        parts[:] = [own, (6, list(range(1, 12, 2)))]

    assert count_examples(loader) == 6
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(distributed, "all_gather_object", gathered)
    assert count_examples(loader) == 12


def test_data_that_a_framework_divides_are_counted_once(monkeypatch, recwarn):
    shards = pytest.importorskip("accelerate.data_loader")
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    whole = TensorDataset(torch.zeros(12, 1))

    class Own:  # as torchvision's and timm's: no DistributedSampler
        num_replicas = 2

        def __iter__(self):
            return iter(range(6))

    assert count_examples(DataLoader(whole, sampler=DistributedSampler(whole, num_replicas=2, rank=0))) == 12
    assert count_examples(DataLoader(whole, sampler=Own())) == 12
    shard = shards.IterableDatasetShard(Sized(), batch_size=2, num_processes=2)
    assert count_examples(shards.DataLoaderShard(shard, batch_size=2)) == 10
    with pytest.raises(UsageError, match="num_examples"):
        count_examples(shards.DataLoaderShard(shards.IterableDatasetShard(Stream()), batch_size=2))
    assert not [one for one in recwarn if "processes" in str(one.message)]
