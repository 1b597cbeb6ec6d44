"""Two gloo processes on the CPU against one process with the whole batch."""

import os
import socket
import subprocess
import sys

import pytest
import torch

from svdcompress.train import gathered, in_all

SCRIPT = """
import sys, torch
from torch import nn
from svdcompress import LinearWarmup, convert
from svdcompress.recipe import LossSection, Training
from svdcompress.sources import InMemory
from svdcompress.likelihoods import make_loss
from svdcompress.train import broadcast_weights, find_place, fit, leave

log_sigma2, batch, out = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
place = find_place("cpu")
generator = torch.Generator().manual_seed(0)
x = torch.randn(64, 6, generator=generator) if sys.argv[4] == "varied" else torch.ones(64, 6)
torch.manual_seed(0)
model = convert(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)), log_sigma2=log_sigma2)
drawn = []
model[0].register_forward_hook(lambda m, a, o: drawn.append(float(o.detach().sum())) if m.training else None)
settings = Training(epochs=2, batch_size=batch, lr=1e-2, schedule="constant")
result = fit(model, InMemory(x, (x[:, 0] > 0).long()), make_loss(LossSection()), settings,
             schedule=LinearWarmup(0, 1, 1.0), lr_log_sigma2=1e-9, device="cpu")
broadcast_weights(model)
torch.save({"weights": torch.cat([p.detach().flatten() for p in model.parameters()]), "world": place.world,
            "loss": [row["loss"] for row in result.history], "drawn": drawn}, f"{out}.{place.rank}")
leave()
"""


PARTS = """
import sys, torch
from torch import nn
from svdcompress import LinearWarmup, convert
from svdcompress.recipe import LossSection, Training
from svdcompress.sources import InMemory
from svdcompress.likelihoods import make_loss
from svdcompress.train import broadcast_weights, find_place, fit, leave

class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
        self.spare = nn.Linear(3, 3)  # in no forward pass

    def forward(self, x):
        return self.body(x)

batch, out = int(sys.argv[2]), sys.argv[3]
place = find_place("cpu")
generator = torch.Generator().manual_seed(0)
x = torch.randn(80, 6, generator=generator)
data = InMemory(x, (x[:, 0] > 0).long())
found = {}

def work(name, model, warmup=None, accumulate=1, **more):
    settings = Training(epochs=3, batch_size=batch, accumulate=accumulate, lr=1e-2, schedule="constant", clip=1)
    fit(model, data, make_loss(LossSection()), settings, schedule=warmup, device="cpu", **more)
    broadcast_weights(model)
    kept = model.body if warmup else model  # Adam counts the spare layer's gradients of 0, but none where there is none
    found[name] = torch.cat([p.detach().flatten() for p in kept.parameters()])
    assert all(p.requires_grad for p in model.parameters())

def made(variational):
    torch.manual_seed(0)
    return convert(Spare(), log_sigma2=-60.0) if variational else Spare()

work("dense", made(False))
work("accumulated", made(False), accumulate=2)
work("warm", made(True), LinearWarmup(1, 2, 0.01), lr_log_sigma2=1e-9)  # at first nothing reaches the spare layer, then the KL
work("recovered", made(True), noise=False)
torch.save(found, f"{out}.{place.rank}")
leave()
"""


ALONE = """
import sys, torch
from svdcompress.errors import DataError
from svdcompress.train import find_place, leave, on_first

place, found = find_place("cpu"), {}

def failing(error):
    def work():
        raise error
    return work

for name, work in {"ours": failing(DataError("no data")), "other": failing(KeyError("a bug")), "none": lambda: 5}.items():
    try:
        found[name] = on_first(place, work)
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
torch.save(found, f"{sys.argv[3]}.{place.rank}")
leave()
"""


def launch(folder, processes, log_sigma2, batch, name, inputs="varied", text=SCRIPT):
    script = folder / "work.py"
    script.write_text(text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    running = []
    for rank in range(processes):
        env = dict(base)
        if processes > 1:
            env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(processes))
            env.update(RANK=str(rank), LOCAL_RANK=str(rank))
        command = [sys.executable, str(script), str(log_sigma2), str(batch), str(folder / name), inputs]
        running.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    for process in running:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-2000:]
    return [torch.load(folder / f"{name}.{rank}", weights_only=True) for rank in range(processes)]


@pytest.mark.slow
def test_two_processes_are_one_with_the_whole_batch_at_zero_noise(tmp_path):
    (alone,) = launch(tmp_path, 1, -60.0, 16, "one")
    first, second = launch(tmp_path, 2, -60.0, 8, "two")
    assert (alone["world"], first["world"]) == (1, 2)
    assert torch.equal(first["weights"], second["weights"])
    assert torch.allclose(first["weights"], alone["weights"], atol=1e-5)
    assert first["loss"] == pytest.approx(alone["loss"], rel=1e-4)


@pytest.mark.slow
def test_each_rank_draws_its_own_noise(tmp_path):
    first, second = launch(tmp_path, 2, -60.0, 32, "quiet", "alike")
    assert first["drawn"] == pytest.approx(second["drawn"], rel=1e-5)
    first, second = launch(tmp_path, 2, 0.0, 32, "noisy", "alike")
    assert first["drawn"][0] != pytest.approx(second["drawn"][0], rel=1e-3)


@pytest.mark.slow
def test_parameters_without_a_gradient_and_uneven_groups_of_batches_end_as_in_one_process(tmp_path):
    """5 batches of 16 over all processes, two at a time: the last one is alone."""
    (alone,) = launch(tmp_path, 1, 0, 16, "one", text=PARTS)
    first, second = launch(tmp_path, 2, 0, 8, "two", text=PARTS)
    for name in ("dense", "accumulated", "recovered", "warm"):
        assert torch.equal(first[name], second[name]), name
        assert torch.allclose(first[name], alone[name], atol=2e-5), name
    assert not torch.allclose(alone["dense"], alone["accumulated"], atol=1e-3)


@pytest.mark.slow
def test_what_fails_in_the_first_process_alone_fails_in_all(tmp_path):
    """A script that catches the error goes on in all of them, and they still answer each other."""
    first, second = launch(tmp_path, 2, 0, 1, "alone", text=ALONE)
    assert (first["ours"], second["ours"]) == ("DataError: no data", "DataError: no data")
    assert first["other"] == "KeyError: 'a bug'"
    assert second["other"].startswith("TrainingError: the first process failed (KeyError: 'a bug')")
    assert (first["none"], second["none"]) == (5, None)


SPOILED = """
import sys, torch
from svdcompress.errors import DataError, SvdcError
from svdcompress.likelihoods import make_loss
from svdcompress.recipe import LossSection, Training
from svdcompress.sources import InMemory
from svdcompress.train import NotFinite, find_place, fit, gathered, in_all, leave

place, found, steps = find_place("cpu"), {}, 0

class Spoiled(torch.nn.Linear):
    def forward(self, x):
        global steps
        steps += self.training
        return super().forward(x * float("nan") if steps == 2 and place.rank == 1 else x)

x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
data, settings = InMemory(x, (x[:, 0] > 0).long()), Training(epochs=1, batch_size=8)
try:
    fit(Spoiled(6, 2), data, make_loss(LossSection()), settings, device="cpu")
except NotFinite as error:
    found["loss"], found["rate"] = str(error), error.rate

def alone():
    if place.rank == 1:
        raise DataError("no file")
    return place.rank

for name, work in {"raised": alone, "bug": lambda: [0][place.rank], "none": lambda: place.rank}.items():
    try:
        found[name] = in_all(work)
    except (SvdcError, IndexError) as error:
        found[name] = f"{type(error).__name__}: {error}"
found["gathered"] = gathered({"rank": place.rank})
torch.save(found, f"{sys.argv[3]}.{place.rank}")
leave()
"""


@pytest.mark.slow
def test_what_fails_in_any_process_fails_in_all(tmp_path):
    """The loss of the second one's second batch is not finite; the first would wait for its gradients."""
    first, second = launch(tmp_path, 2, 0, 1, "spoiled", text=SPOILED)
    assert second["loss"].startswith("train: the loss is nan at step 1 (epoch 1)")
    assert first["loss"] == f"process 1: {second['loss']}" and first["rate"] == second["rate"] == 1e-3
    assert (first["raised"], second["raised"]) == ("DataError: process 1: no file", "DataError: no file")
    assert first["bug"].startswith("TrainingError: process 1: it failed (IndexError: ")
    assert second["bug"].startswith("IndexError: ")
    assert (first["none"], second["none"]) == (0, 1)
    assert first["gathered"] == second["gathered"] == [{"rank": 0}, {"rank": 1}]


def test_one_process_gathers_what_it_has():
    assert gathered("found") == ["found"] and in_all(lambda: 5) == 5
