"""How many examples of a data set fit into one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from svdcompress.batch import at_once, generators_kept
from svdcompress.errors import Interrupted
from svdcompress.sources._examples import Examples


def fitting(model: nn.Module | None, examples: Examples, most: int, *, device: Any = "cpu", draws: int = 1) -> int:
    """The number of examples to run through a model at once: `most`, or fewer if examples are large (`batch.at_once`), judged
    by the first one. It is read in this process, and whatever the generators of random numbers gave for it is put back.

    model: on `device`; None: examples are only read. draws: for how many passes the outputs are kept together.
    """
    if min(most, len(examples)) <= 1:
        return most
    try:
        with generators_kept():  # datasets may draw random crops
            inputs, _ = next(iter(examples.subset(torch.arange(1)).batches(1, device=device)))
        return at_once(model, inputs, most, draws=draws)
    except Interrupted:
        raise
    except Exception:  # an example that cannot be read alone: the pass itself finds out what is wrong, and says it
        return most
