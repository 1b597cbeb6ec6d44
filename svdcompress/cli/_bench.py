"""`svdc bench`: measures a run's cost again, on this machine: its ONNX files in onnxruntime, its models in PyTorch."""

from __future__ import annotations

import copy
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from svdcompress.cli._common import (
    Debug,
    Device,
    Json,
    ModelAgain,
    Run,
    Samples,
    TrustCode,
    err_console,
    on_device,
    opened_run,
    out_console,
    print_json,
    short_of_memory,
)
from svdcompress.errors import ModelError, UsageError, shortened

FEWEST = 5
"""A median is taken over at least this many calls."""

FILES = {"dense": "dense.onnx", "sparse": "model.onnx"}

NAMES = {"dense": "dense", "sparse": "sparse", "csr": "sparse, CSR products", "sampled": "sparse, samples"}


def bench(
    run: Run,
    batch: Annotated[list[int], typer.Option(help="A batch size; can be repeated.")] = [1, 128],  # noqa: B006
    threads: Annotated[int, typer.Option(help="Threads of onnxruntime, and of PyTorch on the CPU.")] = 1,
    seconds: Annotated[float, typer.Option(help="Time for each batch size, by each of the two.")] = 2.0,
    device: Device = "auto",
    samples: Samples = 100,
    model: ModelAgain = None,
    trust_code: TrustCode = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure a run on this machine, dense vs. sparse: latency, bytes, multiply-accumulates.

    The ONNX files run in onnxruntime on the CPU. In PyTorch, on --device: the dense model, the mean of the pruned one, and the
    pruned one with --samples draws and their uncertainties; with sparse (CSR) products where a layer is faster with them.

    Times are medians: on Linux with one thread of CPU time, which other programs change little, else of wall-clock time.
    """
    if any(size < 1 for size in batch):
        raise UsageError(f"--batch: {min(batch)} is not a batch size")
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"--seconds: {seconds:g} is not a time")
    place = on_device(device)
    opened = opened_run(run, trust_code, model)
    paths = {name: opened.file(file) for name, file in FILES.items() if (run / file).is_file()}
    if not paths:
        raise UsageError(f"{run} holds no ONNX files (its recipe has export.onnx: false)")
    with short_of_memory(f"lower --batch (here {', '.join(map(str, batch))}), or use another --device"):
        found = _measured(opened, paths, batch, place, samples, threads, seconds)
    if json:
        print_json(found)
        return
    out_console().print(_table(found), "", _torch_table(found["torch"], threads), *_sparse_lines(found["torch"]), sep="\n")


def _measured(
    opened: Any, paths: dict[str, Path], batch: list[int], place: Any, samples: int, threads: int, seconds: float
) -> dict[str, Any]:
    """The figures, as --json prints them."""
    from svdcompress import cost
    from svdcompress.pipeline import feed
    from svdcompress.sources import example_inputs

    inputs = example_inputs(opened.data_as_read.train, 2)
    _check_memory(inputs, max(batch))
    make_input = feed(opened.data_as_read, next(iter(paths.values())))
    times = cost.latencies(paths, make_input, batch, threads=threads, seconds=seconds)
    models = {"dense": opened.dense, "sparse": opened.model}
    found: dict[str, Any] = {
        name: {**cost.measure(models[name], inputs).to_dict(), "bytes": cost.file_bytes(path), "latency_ms": times[name]}
        for name, path in paths.items()
    }
    if len(found) == 2:
        found["compression"] = cost.compression(found["dense"], found["sparse"])
    found |= {"threads": threads, "clock": cost.clock_name(threads)}
    latency, entries = _in_torch(opened, make_input, inputs, batch, place, samples, threads, seconds)
    found["torch"] = {"device": _device_name(place), "samples": samples, "latency_ms": latency, "sparse_execution": entries}
    return found


def _check_memory(inputs: Any, batch: int) -> None:
    """Raises MemoryError if the inputs of a batch alone exceed the free memory, for which the system might kill the process."""
    from svdcompress.batch import map_tensors
    from svdcompress.files import memory

    sizes: list[int] = []
    map_tensors(inputs, lambda tensor: sizes.append(tensor[:1].numel() * tensor.element_size()))
    if sum(sizes) * batch > memory():
        raise MemoryError(f"a batch of {batch}")


def _in_torch(
    opened: Any,
    make_input: Callable[[int], Any],
    inputs: Any,
    batches: list[int],
    device: Any,
    samples: int,
    threads: int,
    seconds: float,
) -> tuple[dict[str, dict[str, float]], dict[str, list[dict[str, Any]]]]:
    """Medians in milliseconds, {model: {"batch_1": ms, ...}}, with the inputs already on the device; and what `to_sparse`
    reports about the layers at each batch size. A model with sparse products is measured only where it has any."""
    import torch

    from svdcompress.batch import call, map_tensors, to_device
    from svdcompress.convert import to_dense
    from svdcompress.execution import to_sparse
    from svdcompress.uncertainty import mc_predict

    small = opened.model.to(device).eval()
    models = {"dense": opened.dense.to(device).eval(), "sparse": to_dense(copy.deepcopy(small)).eval()}
    generator = torch.Generator(device).manual_seed(0)
    task, tau = opened.recipe.task, opened.tau
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    found: dict[str, dict[str, float]] = {name: {} for name in NAMES}
    entries: dict[str, list[dict[str, Any]]] = {}
    try:
        for size in batches:
            arrays = make_input(size)
            x = {name: torch.from_numpy(array) for name, array in arrays.items()} if isinstance(arrays, Mapping) else arrays
            x = torch.from_numpy(arrays) if x is arrays else tuple(x.values()) if isinstance(inputs, tuple) else x
            x = to_device(map_tensors(x, lambda tensor: tensor.contiguous()), device)
            runs: dict[str, Callable[[], Any]] = {
                name: (lambda model=model, x=x: call(model, x)) for name, model in models.items()
            }
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="to_sparse: ")  # reported below the table
                try:
                    products: Any = to_sparse(small, x)
                    looked: list[Any] = products.sparse_execution
                except ModelError as error:  # no reason to skip the rest
                    told = f"batch {size}: sparse products were not measured: {shortened(str(error))}"
                    err_console().print(told, markup=False, highlight=False, soft_wrap=True)
                    looked = []
                else:
                    entries[f"batch_{size}"] = [asdict(entry) for entry in looked]
            if any(entry.used for entry in looked):
                runs["csr"] = lambda model=products, x=x: call(model, x)
            runs["sampled"] = lambda x=x: mc_predict(small, x, samples, task=task, tau=tau, generator=generator)
            with torch.no_grad():
                for name, work in runs.items():
                    found[name][f"batch_{size}"] = _median(work, device, seconds / len(runs))
    finally:
        torch.set_num_threads(before)
    return {name: times for name, times in found.items() if times}, entries


def _median(work: Callable[[], Any], device: Any, seconds: float) -> float:
    """The median milliseconds of a call: on a CPU as files are timed, on CUDA by its events, which time the work itself, not
    its launch."""
    import torch

    from svdcompress import cost

    times = []
    for _ in range(2):
        work()
    cuda = device.type == "cuda"
    clock = cost.clock_of(torch.get_num_threads()) if device.type == "cpu" else time.perf_counter
    if cuda:
        torch.cuda.synchronize(device)
    end = time.perf_counter() + seconds
    while len(times) < FEWEST or time.perf_counter() < end:
        if cuda:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with torch.cuda.device(device):
                start.record()
                work()
                stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        else:
            started = clock()
            work()
            if device.type == "mps":
                torch.mps.synchronize()
            times.append(1e3 * (clock() - started))
    return statistics.median(times)


def _device_name(device: Any) -> str:
    import torch

    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def _table(found: dict[str, Any]) -> Table:
    names = [name for name in ("dense", "sparse") if name in found]
    title = f"onnxruntime on the CPU, {found['threads']} thread{'s' * (found['threads'] != 1)}"
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for key, label in (("parameters", "parameters"), ("nonzero", "non-zeros"), ("bytes", "bytes"), ("macs", "MACs")):
        table.add_row(label, *[f"{found[name][key]:,}" for name in names])
    _latencies(table, [found[name]["latency_ms"] for name in names])
    return table


def _torch_table(found: dict[str, Any], threads: int) -> Table:
    where = f"{found['device']}, {threads} thread{'s' * (threads != 1)}" if found["device"] == "cpu" else found["device"]
    table = Table(title=f"PyTorch on {where}", title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("")
    for name in found["latency_ms"]:
        table.add_column(NAMES[name].replace("samples", f"{found['samples']} samples"), justify="right")
    _latencies(table, list(found["latency_ms"].values()))
    return table


def _sparse_lines(found: dict[str, Any]) -> list[str]:
    """Which layers had sparse products, or why none had."""
    from svdcompress.execution import SparseEntry, summary

    lines = {
        size.replace("_", " "): summary([SparseEntry(**one) for one in entries])
        for size, entries in found["sparse_execution"].items()
    }
    return [escape(f"{size}: {line}") for size, line in lines.items()]


def _latencies(table: Table, rows: list[dict[str, float]]) -> None:
    for size in rows[0]:
        told = [f"{times[size]:.3f} ms" if size in times else "" for times in rows]
        table.add_row(f"latency, {size.replace('_', ' ')}", *told)
