"""The training loop, on one or more devices of any kind."""

from svdcompress.errors import out_of_memory  # for callers that import it from here
from svdcompress.files import write_atomically  # for callers that import it from here
from svdcompress.likelihoods import score  # for callers that import it from here
from svdcompress.renamed import former_names
from svdcompress.train._ask import asks_once
from svdcompress.train._device import (
    Place,
    broadcast,
    broadcast_weights,
    find_place,
    leave,
    make_accelerator,
    on_first,
    refuse_sharding,
    resolved_precision,
    wait,
)
from svdcompress.train._fit import fit
from svdcompress.train._metrics import evaluate, losses, metrics_of
from svdcompress.train._nonfinite import NotFinite
from svdcompress.train._norms import norms
from svdcompress.train._optim import LrFactor, make_optimizer, rate_of_log_sigma2
from svdcompress.train._precision import computing
from svdcompress.train._progress import Bars
from svdcompress.train._reach import Reach, distances, factors, frozen_layers, reach, steps_of
from svdcompress.train._right import is_right
from svdcompress.train._shrink import shrink
from svdcompress.train._standing import Fit
from svdcompress.train._state import StateFile, mix, seed_everything
from svdcompress.train._threads import Trial, choosing, fastest
from svdcompress.train._together import gathered, in_all, meet

__all__ = [
    "Bars",
    "Fit",
    "LrFactor",
    "NotFinite",
    "Place",
    "Reach",
    "StateFile",
    "Trial",
    "asks_once",
    "broadcast",
    "broadcast_weights",
    "choosing",
    "computing",
    "distances",
    "evaluate",
    "factors",
    "fastest",
    "find_place",
    "fit",
    "frozen_layers",
    "gathered",
    "in_all",
    "is_right",
    "leave",
    "losses",
    "make_accelerator",
    "make_optimizer",
    "meet",
    "metrics_of",
    "mix",
    "norms",
    "on_first",
    "out_of_memory",
    "rate_of_log_sigma2",
    "reach",
    "refuse_sharding",
    "resolved_precision",
    "score",
    "seed_everything",
    "shrink",
    "steps_of",
    "wait",
    "write_atomically",
]

__getattr__ = former_names(__name__, {"agree": "broadcast_weights", "told": "broadcast"})
