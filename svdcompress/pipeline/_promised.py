"""What a run's validation data promise, as its ONNX files hold it: in their metadata, and as further outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from svdcompress.calibrate import ConformalIntervals, ConformalSets, from_dict
from svdcompress.likelihoods import Likelihood

NAMES = ("set", "lower", "upper")
"""Further outputs of the files."""

Further = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def promised(results: Mapping[str, Any], who: str) -> dict[str, Any]:
    """For the metadata of a file: `coverage` and `answer_above` of the mean, or of the samples, where the run has them."""
    found = {name: by.get(who) for name, by in (results.get("promises") or {}).items()}
    return {name: {k: v for k, v in value.items() if k != "kind"} for name, value in found.items() if value}


def sets_of(results: Mapping[str, Any], who: str, likelihood: Likelihood) -> Further | None:
    """The further outputs of a file: `set`, 1 for each class that a prediction set holds and else 0, of the shape of the
    probabilities; or `lower` and `upper` of an interval, of the shape of the mean. None where nothing is promised.

    who: "mean" for the deterministic file, "samples". likelihood: of the model as the file holds it.
    """
    stored = ((results.get("promises") or {}).get("coverage") or {}).get(who)
    if not stored:
        return None
    promise, own = from_dict(stored), likelihood.of_mean()
    if isinstance(promise, ConformalSets):

        def sets(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
            p = outputs["mean"] if who == "samples" else outputs["output"].softmax(own.dim)
            return {"set": promise.sets(p, own.dim).to(p.dtype)}

        return sets
    assert isinstance(promise, ConformalIntervals)  # of a coverage

    def intervals(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        if who == "samples":
            mean, variance = outputs["mean"], outputs["variance"]
        else:
            output = outputs["output"]
            pair = own.name == "gaussian" and "output_1" in outputs
            heads = own.plain().heads((output, outputs["output_1"]) if pair else output)  # its temperature is in the output
            mean, variance = own.moments(heads)
        lower, upper = promise.intervals(mean, variance.sqrt())
        return {"lower": lower, "upper": upper}

    return intervals
