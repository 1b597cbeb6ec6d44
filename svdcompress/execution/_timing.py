"""How long two ways of computing the same take on this machine, measured in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from svdcompress import cost

WARM = 3
"""Calls before the clock starts."""

Measure = Callable[[Callable[[], Any], Callable[[], Any], float, torch.device], tuple[float, float]]
"""Takes dense and sparse work, seconds to spend on both, and where they run; gives seconds of a call of each."""


def in_turns(dense: Callable[[], Any], sparse: Callable[[], Any], seconds: float, device: torch.device) -> tuple[float, float]:
    """Median seconds of a call of each, call by call in turns, so that what else happens on the machine meets both alike.

    device: where the work is done; on an accelerator each call waits until it is finished there.
    """
    runs = {"dense": _waiting(dense, device), "sparse": _waiting(sparse, device)}
    for work in runs.values():
        for _ in range(WARM):
            work()
    times = cost.take_turns(runs, seconds)
    return statistics.median(times["dense"]), statistics.median(times["sparse"])


def _waiting(work: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    if device.type == "cpu":
        return work

    def wait() -> None:
        work()
        torch.accelerator.synchronize(device)

    return wait
