"""Timing two ways to compute the same thing, call by call in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from svdcompress import cost

WARM = 3
"""Warm-up calls before the timing starts."""

Measure = Callable[[Callable[[], Any], Callable[[], Any], float, torch.device], tuple[float, float]]
"""Takes the dense and the sparse call, the seconds to spend on both, and the device; returns seconds per call of each."""


def in_turns(dense: Callable[[], Any], sparse: Callable[[], Any], seconds: float, device: torch.device) -> tuple[float, float]:
    """Median seconds per call of each, by `cost.clock_of`. The calls take turns, so that other load affects both alike.

    device: where the work runs; on an accelerator, each call waits until it is finished there.
    """
    runs = {"dense": _waiting(dense, device), "sparse": _waiting(sparse, device)}
    for work in runs.values():
        for _ in range(WARM):
            work()
    clock = cost.clock_of(torch.get_num_threads()) if device.type == "cpu" else time.perf_counter
    times = cost.take_turns(runs, seconds, clock)
    return statistics.median(times["dense"]), statistics.median(times["sparse"])


def _waiting(work: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    if device.type == "cpu":
        return work

    def wait() -> None:
        work()
        torch.accelerator.synchronize(device)

    return wait
