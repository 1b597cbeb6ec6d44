"""The promises that a run makes from its validation data, as its ONNX files hold them: metadata and further outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from svdcompress.calibrate import ConformalIntervals, ConformalSets, from_dict
from svdcompress.export import as_given
from svdcompress.likelihoods import Likelihood

NAMES = ("set", "lower", "upper")
"""The names of the further outputs."""

Further = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def promised(results: Mapping[str, Any], who: str) -> dict[str, Any]:
    """Metadata for a file: the run's `coverage` and `answer_above`, as far as it has them. who: "mean" or "samples"."""
    found = {name: by.get(who) for name, by in (results.get("promises") or {}).items()}
    return {name: {k: v for k, v in value.items() if k != "kind"} for name, value in found.items() if value}


def sets_of(results: Mapping[str, Any], who: str, likelihood: Likelihood) -> Further | None:
    """A function that makes the further outputs of a file: `set`, 1 for each class in the prediction set and 0 for the
    others, in the shape of the probabilities; or `lower` and `upper` of an interval, in the shape of the mean. None without a
    promised coverage.

    who: "mean" for the deterministic file, "samples" for the Monte-Carlo file. likelihood: of the model as stored in the file.
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
    assert isinstance(promise, ConformalIntervals)  # a coverage has no other kind

    def intervals(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        if who == "samples":
            mean, variance = outputs["mean"], outputs["variance"]
        else:
            heads = own.plain().heads(as_given(outputs))  # the output includes its temperature
            mean, variance = own.moments(heads)
        lower, upper = promise.intervals(mean, variance.sqrt())
        return {"lower": lower, "upper": upper}

    return intervals
