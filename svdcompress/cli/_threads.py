"""OpenMP settings for PyTorch's threads."""

from __future__ import annotations

import os
import sys

NUMBER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables by which a user sets how many threads there are."""

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
"""Variables by which a user sets how threads wait for each other: OpenMP's, GNU's, and those of LLVM and Intel."""


def wait_passively() -> None:
    """Make threads sleep while they wait for each other, unless the user set how they wait. Call it before torch is loaded.

    By default they spin, which on a busy machine takes time from the very thread that they wait for.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in WAITING):
        os.environ["OMP_WAIT_POLICY"] = "passive"


def number_is_set() -> bool:
    """Whether the user set how many threads there are."""
    return any(os.environ.get(name) for name in NUMBER)
