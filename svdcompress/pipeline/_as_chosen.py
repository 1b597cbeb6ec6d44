"""A check that the model of a search's chosen trial is the one that is written: by its error on the validation data."""

from __future__ import annotations

from svdcompress.pipeline._checks import may_differ
from svdcompress.pipeline._results import RunResults
from svdcompress.sources import Data

LOOSE = 10
"""How many times more rounding is allowed than between two passes on a CPU: a search may be resumed on another device."""


def other_than_chosen(results: RunResults, data: Data) -> str | None:
    """A warning if the small model's error (or RMSE) on the validation data is not the one stored for the chosen trial.

    None, too, where one of them is not known, and after calibration has trained the model's means (`posterior: refit`).
    """
    search, found, calibrated = results.search, results.sparse.validation, results.calibrate or {}
    if not search or not found or calibrated.get("posterior") == "refit":
        return None
    number = search["chosen"]
    stored = next(trial["metrics"] for trial in search["trials"] if trial["number"] == number)
    name = "error" if "error" in found else "rmse"
    if stored.get(name) is None or abs(found[name] - stored[name]) <= may_differ(
        name, stored[name], data.validation, data, LOOSE
    ):
        return None
    told = "{:.4g}%" if name == "error" else "an RMSE of {:.4g}"
    before, now = (told.format(value) for value in (stored[name], found[name]))
    return (
        f"the model that was written is not as the chosen trial {number} was: {now} on the validation data, where the trial "
        f"had {before}, by which it was chosen. Rounding does not explain this: go by the figures of the test data, and please "
        "report it"
    )
