"""The cost of a variational training step relative to a dense one: ours and other libraries', on the same shapes.

    python benchmarks/speed.py [--only NAME ...] [--skip CONTESTANT ...] [--rounds 15] [--again] [--results FOLDER]

All contestants of a row run in one process on one thread, in turns in each round after a warm-up: forward, backward with the
KL, and fused Adam. Figures are medians over the rounds: on a CPU of the thread's own CPU time, which other work on the
machine disturbs less than wall-clock time (which is stored, too), on CUDA of event times. The ratio is to the dense step of
the same row. Rows are written to benchmarks/results/speed.json and speed.md as they come; a stored row is not measured again
without --again. CUDA rows are measured if CUDA is available; a library that is not installed is left out with the reason. For
compiled contestants, ours and the others alike, all of loss and KL is compiled; a peer that torch.compile cannot handle is
left out with its error.

The peers go into an environment of their own that sees this one, so that their pins change nothing here:

    python -m venv peers && echo "$(.venv/bin/python -c 'import site; print(*site.getsitepackages())')" \\
        > peers/lib/python3.11/site-packages/ours.pth
    peers/bin/pip install --no-deps cplxmodule==2022.6 pytorch-ard==0.2.4 bayesian-torch==0.5.0
    peers/bin/python benchmarks/speed.py --again
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from speed_table import markdown
from torch import Tensor, nn

import svdcompress as svdc
from svdcompress.layers import fast_bfloat16, variational_layers

RESULTS = Path(__file__).resolve().parent / "results"
EXAMPLES = 60_000
PEERS = ("cplxmodule", "pytorch-ard", "bayesian-torch")


# The networks


def mlp(*widths: int) -> nn.Sequential:
    """Fully connected layers with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def lenet5() -> nn.Sequential:
    """Caffe's LeNet-5: 20 and 50 convolutions of 5x5, 500 hidden units."""
    features = [nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.MaxPool2d(2)]
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10))


def vgg(*stages: tuple[int, int], inputs: int, side: int) -> nn.Sequential:
    """Stages of (convolutions of 3x3, channels) with BatchNorm and ReLU, each halved by pooling, and a linear head."""
    layers: list[nn.Module] = []
    for count, channels in stages:
        for _ in range(count):
            layers += [nn.Conv2d(inputs, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
            inputs = channels
        layers += [nn.MaxPool2d(2)]
        side //= 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(inputs * side * side, 10))


class Logits(nn.Module):
    """A Hugging Face classifier that returns its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


def resnet50() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return Logits(ResNetForImageClassification(ResNetConfig(num_labels=10)))


def vgg16() -> nn.Module:
    return vgg((2, 64), (2, 128), (3, 256), (3, 512), (3, 512), inputs=3, side=224)


@dataclass(frozen=True)
class Row:
    """One line of the table: a network, its input, the goal relative to a dense step, and how CUDA runs it."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    goal: float
    device: str = "cpu"
    amp: bool = False
    compiled: bool = False


ROWS = {
    "linear 2048, batch 2048": Row(lambda: mlp(1024, 2048, 2048, 10), (2048, 1024), 1.4),
    "linear 2048, batch 256": Row(lambda: mlp(1024, 2048, 2048, 10), (256, 1024), 1.7),
    "LeNet-300-100, batch 100": Row(lambda: mlp(784, 300, 100, 10), (100, 784), 2.0),
    "LeNet-5, batch 64": Row(lenet5, (64, 1, 28, 28), 1.8),
    "VGG block, batch 64": Row(lambda: vgg((2, 128), inputs=64, side=16), (64, 64, 16, 16), 1.8),
    "ResNet-50, batch 128, bfloat16 AMP, compiled": Row(resnet50, (128, 3, 224, 224), 1.8, "cuda", True, True),
    "VGG-16, batch 128, bfloat16 AMP, compiled": Row(vgg16, (128, 3, 224, 224), 1.8, "cuda", True, True),
    "linear 4096, batch 4096, TF32": Row(lambda: mlp(4096, 4096, 4096, 10), (4096, 4096), 1.5, "cuda"),
}


# The contestants: (model, its KL)

Made = tuple[nn.Module, Callable[[], Tensor] | None]


def ours(dense: nn.Module, variance_dtype: str = "auto") -> Made:
    model = svdc.convert(copy.deepcopy(dense), variance_dtype=variance_dtype)
    return model, lambda: svdc.kl_divergence(model)


def masked(dense: nn.Module) -> Made:
    """Ours with a frozen mask that keeps 2% of the weights, as in recovery."""
    model, kl = ours(dense)
    generator = torch.Generator().manual_seed(0)
    keep = {n: torch.rand(layer.weight.shape, generator=generator) < 0.02 for n, layer in variational_layers(model)}
    return svdc.hold(model, keep), kl


def swapped(model: nn.Module, linear: Callable[[nn.Linear], nn.Module], conv: Callable[[nn.Conv2d], nn.Module]) -> nn.Module:
    """The model, with its Linear and Conv2d layers replaced in place."""
    for name, child in model.named_children():
        if type(child) in (nn.Linear, nn.Conv2d):
            layer = (linear if type(child) is nn.Linear else conv)(child)
            layer.weight.data.copy_(child.weight.data)
            setattr(model, name, layer)
        else:
            swapped(child, linear, conv)
    return model


def convolution_arguments(layer: nn.Conv2d) -> dict[str, Any]:
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups")
    return {name: getattr(layer, name) for name in names}


def cplxmodule(dense: nn.Module) -> Made:
    from cplxmodule.nn.relevance import Conv2dARD, LinearARD, penalties

    model = swapped(
        copy.deepcopy(dense),
        lambda layer: LinearARD(layer.in_features, layer.out_features, layer.bias is not None),
        lambda layer: Conv2dARD(**convolution_arguments(layer), bias=layer.bias is not None),
    )
    return model, lambda: sum(penalties(model))


def pytorch_ard(dense: nn.Module) -> Made:
    from torch_ard import Conv2dARD, LinearARD, get_ard_reg

    model = swapped(
        copy.deepcopy(dense),
        lambda layer: LinearARD(layer.in_features, layer.out_features, layer.bias is not None),
        lambda layer: Conv2dARD(**convolution_arguments(layer)),  # it has no bias
    )
    return model, lambda: get_ard_reg(model)


def bayesian_torch(dense: nn.Module) -> Made:
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

    model = copy.deepcopy(dense)
    prior = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -5.0}
    dnn_to_bnn(model, {**prior, "type": "Reparameterization", "moped_enable": False, "moped_delta": 0.5})
    return model, lambda: get_kl_loss(model)


COMPILED = ", compiled"  # in the name of a contestant: by torch.compile
CONTESTANTS: dict[str, Callable[[nn.Module], Made]] = {
    "dense": lambda dense: (dense, None),
    "ours": ours,
    "ours, masked": masked,
    "dense, compiled": lambda dense: (copy.deepcopy(dense), None),
    "ours, compiled": ours,
    "cplxmodule": cplxmodule,
    "pytorch-ard": pytorch_ard,
    "bayesian-torch": bayesian_torch,
    "cplxmodule, compiled": cplxmodule,
    "pytorch-ard, compiled": pytorch_ard,
    "bayesian-torch, compiled": bayesian_torch,
}


# Measuring


def step(made: Made, x: Tensor, y: Tensor, row: Row, compiled: bool) -> Callable[[], None]:
    """A training step."""
    model, kl = made
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(row.device, torch.bfloat16, enabled=row.amp):
            loss = nn.functional.cross_entropy(model(x), y)
        return loss if kl is None else loss + kl() / EXAMPLES

    loss = torch.compile(loss_of) if compiled else loss_of

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(x, y).backward()
        optimizer.step()

    return run


def parts(made: Made, x: Tensor, y: Tensor) -> dict[str, Callable[[], None]]:
    """Parts of our step, measured on their own: the KL alone, forward and backward."""
    model, kl = made

    def kl_alone() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        (kl() / EXAMPLES).backward()

    return {"ours: the KL alone": kl_alone}


def timed(run: Callable[[], None], device: str) -> tuple[float, float]:
    """(CPU time of this thread, or CUDA time; wall-clock) of one call, in seconds."""
    if device == "cuda":
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) / 1e3, start.elapsed_time(stop) / 1e3
    wall, own = time.perf_counter(), time.thread_time()
    run()
    return time.thread_time() - own, time.perf_counter() - wall


def made_for(row: Row) -> tuple[nn.Module, Tensor, Tensor]:
    """The dense network of a row and a batch; on CUDA with channels-last images, TF32 and cuDNN's fastest kernels."""
    torch.manual_seed(0)
    dense, x = row.make().to(row.device), torch.randn(row.shape, device=row.device)
    if row.device == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
        x = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
    return dense, x, torch.randint(10, (len(x),), device=row.device)


def ready(made: Made, row: Row) -> Made:
    """A contestant ready to be trained, in the memory layout that the package uses."""
    made[0].to(row.device).train()
    if row.device == "cuda" and len(row.shape) == 4:
        made[0].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return made


def compile_only(row: Row, name: str) -> None:
    """Take two steps of a contestant, so that torch caches its compilation on disk."""
    dense, x, y = made_for(row)
    run = step(ready(CONTESTANTS[name](dense), row), x, y, row, True)
    run()
    run()


def measure(row: Row, rounds: int, skip: Sequence[str] = (), warmup: int = 2) -> dict[str, Any]:
    """Medians of all contestants of a row, which take turns; {contestant: {...}}, and what could not run."""
    torch.compiler.reset()  # or earlier rows' shapes count: code would be compiled for any shape, and after eight not at all
    dense, x, y = made_for(row)
    runs, absent = {}, {}
    for name, make in CONTESTANTS.items():
        if name in skip or (row.compiled and name.endswith(COMPILED)):
            continue  # in a compiled row all contestants are compiled
        try:
            made = ready(make(dense), row)
            run = step(made, x, y, row, row.compiled or name.endswith(COMPILED))
            for _ in range(warmup):
                run()
            runs[name] = run
            if name == "ours":
                runs |= parts(made, x, y)
        except Exception as error:
            absent[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for number in range(rounds):
        order = list(runs)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            times[name].append(timed(runs[name], row.device))
    found = {}
    for name, pairs in times.items():
        own, wall = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratios = [one[0] / base[0] for one, base in zip(pairs, times["dense"], strict=True)]
        found[name] = {"ms": own * 1e3, "wall_ms": wall * 1e3, "ratio": statistics.median(ratios)}
    return {"contestants": found, "absent": absent, "rounds": rounds, "goal": row.goal}


# Results


def machine() -> dict[str, Any]:
    """The machine and versions that the figures depend on."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    versions = {"python": platform.python_version(), "svdcompress": svdc.__version__}
    for name in ("torch", *PEERS):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "fast_bfloat16": fast_bfloat16(torch.device("cpu")),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "seed": 0,
        "versions": versions,
    }


def keep_freed_memory() -> None:
    """Ask glibc to keep freed memory: otherwise page faults take much of the time of large tensors, for all contestants."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 32 * 2**20)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2 * 10**9)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", choices=list(ROWS), help="measure this row; may be repeated")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--skip", action="append", default=[], choices=list(CONTESTANTS), help="leave this contestant out")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of speed.json and speed.md")
    parser.add_argument(
        "--compile-only", action="append", choices=list(CONTESTANTS), help="compile this contestant for a later run; no times"
    )
    parser.add_argument("--again", action="store_true", help="measure rows again that are there already")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    path = options.results / "speed.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"rows": {}}
    for name in options.only or ROWS:
        row = ROWS[name]
        if row.device == "cuda" and not torch.cuda.is_available():
            continue
        if options.compile_only:
            for contestant in options.compile_only:
                compile_only(row, contestant)
            continue
        if name in results["rows"] and not options.again:
            continue
        found = measure(row, options.rounds, options.skip)
        results["rows"][name] = {**found, "device": row.device, "machine": machine()}
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(
            markdown(results, {name: row.goal for name, row in ROWS.items()}, PEERS), encoding="utf-8"
        )
        print(name, {key: round(value["ratio"], 2) for key, value in results["rows"][name]["contestants"].items()}, flush=True)
        if "ours" not in results["rows"][name]["contestants"]:
            sys.exit(f"{name}: ours did not run: {results['rows'][name]['absent']['ours']}")


if __name__ == "__main__":
    main()
