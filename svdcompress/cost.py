"""What a model costs: parameters, non-zeros, multiply-accumulates, and the bytes and latency of a file."""

from __future__ import annotations

import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from svdcompress.batch import call, first_example, in_eval
from svdcompress.errors import ExportError, UsageError
from svdcompress.hooks import hooked
from svdcompress.layers import VARIATIONAL_CLASSES, VariationalLayer, register_loaded, variance_parameters

Feed = np.ndarray | Mapping[str, np.ndarray]
"""Inputs for an ONNX file: an array for its first input, or arrays by input name (names that a file lacks are ignored)."""

Clock = Callable[[], float]
"""Returns seconds since some fixed time, as `time.perf_counter` does."""


@dataclass(frozen=True)
class Cost:
    """The size of a deterministic model in `eval()`; a variational one counts as the dense one that it stands for.

    parameters: elements of its parameters, means only (no `log_sigma2`), shared ones counted once.
    nonzero: how many of them are not 0; irrelevant weights count as 0.
    weights, weights_nonzero: the same for the weights of Linear and convolution layers only, which is what the literature on
        sparsity counts.
    macs: multiply-accumulates for one example, in matrix products, convolutions and attention (half of torch's FLOPs).
        Zeros inside a layer are multiplied too: only smaller shapes lower this number.
    """

    parameters: int
    nonzero: int
    weights: int
    weights_nonzero: int
    macs: int

    def to_dict(self) -> dict[str, int]:
        """The fields by name, for `report.json`."""
        return asdict(self)


def measure(model: nn.Module, example_inputs: Any) -> Cost:
    """Count a model's parameters and operations; the model is left as it was.

    example_inputs: a tensor, a tuple of positional inputs, or a dict of keyword inputs, batch first; the first example of
        the batch is run once in `eval()`.
    """
    register_loaded()
    variational = (VariationalLayer, *VARIATIONAL_CLASSES)
    weights = {id(m.weight) for m in model.modules() if isinstance(m, variational) and isinstance(m.weight, Tensor)}
    masks = {id(m.weight): m.relevant() for m in model.modules() if isinstance(m, VariationalLayer)}
    variances = {id(own) for own in variance_parameters(model)}
    sizes, nonzero = {}, {}
    for parameter in model.parameters():
        key = id(parameter)
        if key not in variances:
            value = parameter.detach() if key not in masks else parameter.detach() * masks[key]
            sizes[key], nonzero[key] = value.numel(), int(torch.count_nonzero(value))
    return Cost(
        parameters=sum(sizes.values()),
        nonzero=sum(nonzero.values()),
        weights=sum(size for key, size in sizes.items() if key in weights),
        weights_nonzero=sum(count for key, count in nonzero.items() if key in weights),
        macs=macs(model, example_inputs),
    )


def macs(model: nn.Module, example_inputs: Any) -> int:
    """Multiply-accumulates of one example in `eval()`, as `measure` counts them."""
    with _counting(model) as counter:
        call(model, first_example(example_inputs))
    return counter.get_total_flops() // 2


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer on its own, without the layers inside it.

    parameters: elements of its parameters (no `log_sigma2`). macs: multiply-accumulates for one example, as `measure` counts
    them. ran: whether the model called it at all.
    """

    parameters: int
    macs: int
    ran: bool


def by_layer(model: nn.Module, example_inputs: Any) -> dict[str, LayerCost]:
    """The cost of each layer that has parameters of its own, by name, from one pass like that of `measure`.

    A layer called several times has the multiply-accumulates of all calls. The sum over layers is the result of `measure`,
    except for weights that several layers share and operations of modules without parameters.
    """
    inputs = first_example(example_inputs)
    flops: dict[str, int] = {}
    open_calls: list[list[int]] = []  # for each open call: the count when it began, and what inner calls counted

    def hooks(name: str, module: nn.Module) -> Iterator[RemovableHandle]:
        def enter(*_: Any) -> None:
            open_calls.append([counter.get_total_flops(), 0])

        def leave(*_: Any) -> None:
            begun, inside = open_calls.pop()
            total = counter.get_total_flops() - begun
            flops[name] = flops.get(name, 0) + total - inside
            if open_calls:
                open_calls[-1][1] += total

        yield module.register_forward_pre_hook(enter)
        yield module.register_forward_hook(leave)

    takes = {name: each for name, each in model.named_modules() if not isinstance(each, torch.jit.ScriptModule)}
    with _counting(model) as counter, hooked(handle for name, each in takes.items() for handle in hooks(name, each)):
        call(model, inputs)
    found = {}
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if isinstance(module, VariationalLayer):
            own = {key: value for key, value in own.items() if key not in module.posterior.parameters}
        if own:
            found[name] = LayerCost(sum(p.numel() for p in own.values()), flops.get(name, 0) // 2, name in flops)
    return found


@contextmanager
def _counting(model: nn.Module) -> Iterator[FlopCounterMode]:
    with in_eval(model), _countable(), torch.no_grad(), FlopCounterMode(display=False) as counter:
        yield counter


@contextmanager
def _countable() -> Iterator[None]:
    """Use plain kernels for attention and recurrent layers, as the fused ones are opaque to the flop counter."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
            warnings.filterwarnings("ignore", message="TF32 acceleration on top of oneDNN")  # raised by the flags themselves
            with torch.backends.mkldnn.flags(enabled=False), torch.backends.cudnn.flags(enabled=False):
                yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def file_bytes(path: str | Path) -> int:
    """Size of an ONNX file in bytes, including its external data (`PATH.data`), if any."""
    path = Path(path)
    beside = path.with_name(path.name + ".data")
    return path.stat().st_size + (beside.stat().st_size if beside.exists() else 0)


def latency(
    path: str | Path,
    make_input: Callable[[int], Feed],
    batch_sizes: Sequence[int] = (1, 128),
    *,
    threads: int = 1,
    seconds: float = 1.0,
) -> dict[str, float]:
    """Median latency of an ONNX file in onnxruntime, in milliseconds: {"batch_1": ms, "batch_128": ms}.

    See `latencies`, which measures several files against each other.
    """
    return latencies({"file": path}, make_input, batch_sizes, threads=threads, seconds=seconds)["file"]


FINE = 1e-4
"""The longest steps, in seconds, in which the system may count CPU time if it is to be used."""

PATIENCE = 20.0
"""Once calls have taken this many times the intended time, three of each are enough instead of ten (a BERT, a batch of
128)."""


ALIKE = 5.0
"""Once calls have taken this many times the intended time, two of each are enough if they agree (see `take_turns`)."""


WARM_UPS, SLOW = 3, 1.0
"""Calls of a file before the clock starts, and seconds after which no more of them follow: for a file that is timed only three
times (see `PATIENCE`), three more calls would be half of the time (a BERT, a batch of 128)."""


def latencies(
    paths: Mapping[str, str | Path],
    make_input: Callable[[int], Feed],
    batch_sizes: Sequence[int] = (1, 128),
    *,
    threads: int = 1,
    seconds: float = 1.0,
    agreeing: float = 0.0,
) -> dict[str, dict[str, float]]:
    """Median latencies of ONNX files on the CPU, in milliseconds, as {name: {"batch_1": ms, ...}}.

    With one thread, on Linux, the time is that thread's own CPU time: on an idle machine the same as the wall-clock
    time, and on a busy one without the time for which other programs had the core. The files take turns, call by call, so
    that what slows down the core itself affects all of them alike. Each has one session, warmed up at each batch size before
    the clock starts.

    make_input: takes a batch size, and returns an array for the file's first input, or {input name: array}.
    threads: threads of each session within an operator.
    seconds: time spent on each batch size, over all files (at least 10 calls of each, or 3 once that took 20 times as long).
    agreeing: if the calls of each file differ by at most this share, two of each are enough once they took five times as long;
        for comparisons in which that is precise enough.
    Raises ExportError if onnxruntime cannot load or run a file.
    """
    if threads < 1:
        raise UsageError(f"threads: {threads} is not a number of threads")
    sessions = {name: _session(Path(path), threads) for name, path in paths.items()}
    result: dict[str, dict[str, float]] = {name: {} for name in sessions}
    for batch in batch_sizes:
        feed = make_input(batch)
        runs = {name: _runner(paths[name], session, feed, batch) for name, session in sessions.items()}
        for name, times in take_turns(runs, seconds, clock_of(threads), agreeing).items():
            result[name][f"batch_{batch}"] = statistics.median(times) * 1e3
    return result


def quicker(times: Mapping[str, float], others: Mapping[str, float]) -> bool:
    """Whether a file is faster than another by `latencies`, over all batch sizes together (the product of the ratios)."""
    return math.prod(others[batch] / time for batch, time in times.items()) > 1


def _session(path: Path, threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own exceptions have no common base
        raise ExportError(f"{path}: onnxruntime cannot load it ({error})") from error


def _runner(path: str | Path, session: Any, feed: Feed, batch: int) -> Callable[[], Any]:
    names = [node.name for node in session.get_inputs()]
    arrays = {n: feed[n] for n in names if n in feed} if isinstance(feed, Mapping) else {names[0]: feed}
    try:
        begun = time.perf_counter()
        for _ in range(WARM_UPS):
            session.run(None, arrays)
            if time.perf_counter() - begun > SLOW:
                break
    except Exception as error:
        raise ExportError(f"{path}: onnxruntime cannot run it with a batch of {batch} ({error})") from error
    return lambda: session.run(None, arrays)


def clock_of(threads: int) -> Clock:
    """The clock for work that the calling thread does alone (threads: 1) or shares with others.

    Alone, on Linux, it is that thread's CPU time: if other programs take turns on its core, a call takes either its own time or
    twice as long, and a median falls on one or the other by chance. Elsewhere, and where CPU time is counted in coarse steps
    (Windows, some sandboxes), it is the wall-clock time; on macOS, libraries may use threads of their own.
    """
    return time.thread_time if threads == 1 and sys.platform == "linux" and _fine() else time.perf_counter


def clock_name(threads: int) -> str:
    """What `clock_of` measures here, in words: "CPU time" or "wall-clock time"."""
    return "CPU time" if clock_of(threads) is time.thread_time else "wall-clock time"


@cache
def _fine() -> bool:
    """Whether the thread's CPU time is counted in steps of at most `FINE` seconds."""
    before, end = time.thread_time(), time.perf_counter() + 1
    while (after := time.thread_time()) == before and time.perf_counter() < end:
        pass
    return 0 < after - before <= FINE


def take_turns(
    runs: Mapping[str, Callable[[], Any]], seconds: float, clock: Clock = time.perf_counter, agreeing: float = 0.0
) -> dict[str, list[float]]:
    """Call several functions in turns for this many seconds in total (at least 10 calls of each, or 3 once they have taken
    `PATIENCE` times as long, or 2 once they have taken `ALIKE` times as long and each function's differ by a share of at most
    `agreeing`); returns the seconds of each call, by `clock`."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    begun = time.perf_counter()
    order = list(runs)
    while True:
        taken, calls = time.perf_counter() - begun, len(times[order[0]])
        if taken >= seconds and calls >= (10 if taken < PATIENCE * seconds else 3):
            break
        if agreeing and taken >= ALIKE * seconds and calls >= 2 and all(_agree(each, agreeing) for each in times.values()):
            break
        for name in order:
            start = clock()
            runs[name]()
            times[name].append(clock() - start)
        order.append(order.pop(0))  # no file always runs right after the same other one
    return times


def _agree(times: Sequence[float], share: float) -> bool:
    return max(times) - min(times) <= share * min(times)


def compression(dense: Mapping[str, Any], sparse: Mapping[str, Any]) -> dict[str, Any]:
    """The ratios dense / sparse: `compression` in `report.json`.

    dense, sparse: the report's entries; there is a ratio for each of `parameters`, `nonzero`, `weights_nonzero`, `bytes` and
    `macs` that both have, and for `latency` by batch size.
    """
    ratios: dict[str, Any] = {}
    for key in ("parameters", "nonzero", "weights_nonzero", "bytes", "macs"):
        if dense.get(key) is not None and sparse.get(key) is not None:
            ratios[key] = dense[key] / max(sparse[key], 1)
    before, after = dense.get("latency_ms") or {}, sparse.get("latency_ms") or {}
    ratios["latency"] = {batch: before[batch] / after[batch] for batch in before if batch in after}
    return ratios
