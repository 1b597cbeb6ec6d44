"""Converts dense layers to variational ones and back, plans what is converted and why, and watches what a pass reads."""

from svdcompress.convert._convert import (
    convert,
    convert_dropout,
    fold_derived_weights,
    leave_fused_paths,
    to_dense,
    warn_of_half_precision,
)
from svdcompress.convert._derived import fold_like, folded
from svdcompress.convert._patterns import matches
from svdcompress.convert._plan import DERIVED, PlanEntry, plan
from svdcompress.convert._reads import PAST_CURE, Reads, as_it_was, read_past, watch
from svdcompress.convert._undo import unchanged_on_error

__all__ = [
    "DERIVED",
    "PAST_CURE",
    "PlanEntry",
    "Reads",
    "as_it_was",
    "convert",
    "convert_dropout",
    "fold_derived_weights",
    "fold_like",
    "folded",
    "leave_fused_paths",
    "matches",
    "plan",
    "read_past",
    "to_dense",
    "unchanged_on_error",
    "warn_of_half_precision",
    "watch",
]
