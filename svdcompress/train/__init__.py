"""The fine-tuning loop, on any device and any number of them."""

import warnings
from typing import Any

from svdcompress.errors import out_of_memory  # here for callers of before
from svdcompress.files import write_atomically  # here for callers of before
from svdcompress.likelihoods import score  # here for callers of before
from svdcompress.train._device import Place, broadcast, broadcast_weights, find_place, leave, make_accelerator, wait
from svdcompress.train._fit import fit
from svdcompress.train._metrics import evaluate, losses
from svdcompress.train._nonfinite import NotFinite
from svdcompress.train._optim import LrFactor, make_optimizer
from svdcompress.train._progress import Bars
from svdcompress.train._reach import Reach, distances, factors, reach, steps_of
from svdcompress.train._shrink import shrink
from svdcompress.train._standing import Fit
from svdcompress.train._state import StateFile, mix, seed_everything
from svdcompress.train._threads import Trial, choosing, fastest

__all__ = [
    "Bars",
    "Fit",
    "LrFactor",
    "NotFinite",
    "Place",
    "Reach",
    "StateFile",
    "Trial",
    "broadcast",
    "broadcast_weights",
    "choosing",
    "distances",
    "evaluate",
    "factors",
    "fastest",
    "find_place",
    "fit",
    "leave",
    "losses",
    "make_accelerator",
    "make_optimizer",
    "mix",
    "out_of_memory",
    "reach",
    "score",
    "seed_everything",
    "shrink",
    "steps_of",
    "wait",
    "write_atomically",
]

_FORMER = {"agree": "broadcast_weights", "told": "broadcast"}
"""Names of before, for one more release."""


def __getattr__(name: str) -> Any:
    if name in _FORMER:
        warnings.warn(f"svdcompress.train.{name} is now {_FORMER[name]}", DeprecationWarning, stacklevel=2)
        return globals()[_FORMER[name]]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
