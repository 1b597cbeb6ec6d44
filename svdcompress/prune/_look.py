"""Two plain passes before the trace: they find weights read past their layers, and branches that run only in `train()`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from svdcompress.batch import first_tensor
from svdcompress.convert import PAST_CURE, watch
from svdcompress.prune._verify import resized


@dataclass
class Look:
    """What `look` found.

    past: {converted layer: why its mask has no effect} for layers whose weight is read past them and that never run.
    torn: the same for layers that also run. training: inputs for a pass in `train()`, if it reads weights that
    `eval()` does not read, or reads them more often; None if there are no such branches. notes: what the user should know.
    """

    past: dict[str, str] = field(default_factory=dict)
    torn: dict[str, str] = field(default_factory=dict)
    training: Any = None
    notes: list[str] = field(default_factory=list)


def look(plain: nn.Module, inputs: Any, converted: Sequence[str] = ()) -> Look:
    """Run a dense copy in `eval()` and in `train()`. converted: names of its layers that hold masks."""
    layers = [(name, plain.get_submodule(name)) for name in converted]
    found = Look()
    reads = watch(plain, inputs, layers)
    for name in reads.past:
        (found.torn if name in reads.ran else found.past)[name] = reads.reason(name)
    for name, reason in {**found.past, **found.torn}.items():
        what = (
            "but the layer itself also runs: the whole model is left masked"
            if name in found.torn
            else "so all its weights are kept"
        )
        found.notes.append(f"{name}: {reason}, {what}. {PAST_CURE}")
    examples = resized(inputs, 2) if first_tensor(inputs).dim() and first_tensor(inputs).shape[0] == 1 else inputs
    try:
        trained = watch(plain, examples, (), train=True)
    except Exception as error:  # batch norm of one value, missing targets, or anything else
        what = str(error).strip().partition("\n")[0][:120]
        found.notes.append(
            f"train() does not run on the example inputs ({type(error).__name__}: {what}): branches that run only in training "
            "were not seen, and may no longer fit"
        )
        return found
    parameters = [id(parameter) for parameter in plain.parameters()]
    if any(trained.touched[one] > reads.touched[one] for one in parameters):
        found.training = examples
    return found
