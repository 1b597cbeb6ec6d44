"""Calibration on validation data: temperature, posterior refits, conformal sets, and when to answer."""

from svdcompress.calibrate._answer import AnswerAbove, answer_above, tail
from svdcompress.calibrate._choose import LOOKS, POSTERIORS, Calibrated, Tried, calibrate, looked_at
from svdcompress.calibrate._conformal import (
    ConformalIntervals,
    ConformalSets,
    check_coverage,
    conformal_intervals,
    conformal_sets,
    least_examples,
)
from svdcompress.calibrate._curvature import Block, Curvature, gauss_newton
from svdcompress.calibrate._draws import Draws, draws_of
from svdcompress.calibrate._fit import Fitted, fit_scale, fit_setting, log_variances, with_scales
from svdcompress.calibrate._kept import Kept, held, kept_of
from svdcompress.calibrate._kron import kronecker
from svdcompress.calibrate._posterior import Joint, LowRank, joint_draws, low_rank, with_variances
from svdcompress.calibrate._promise import (
    Promises,
    from_dict,
    load_promises,
    measured,
    out_of_reach,
    promises_of,
    save_promises,
    targets_of,
)
from svdcompress.calibrate._refit import refit
from svdcompress.calibrate._tempering import Tempered, fit_knob, fit_tempering, nll_rows

__all__ = [
    "LOOKS",
    "POSTERIORS",
    "AnswerAbove",
    "Block",
    "Calibrated",
    "ConformalIntervals",
    "ConformalSets",
    "Curvature",
    "Draws",
    "Fitted",
    "Joint",
    "Kept",
    "LowRank",
    "Promises",
    "Tempered",
    "Tried",
    "answer_above",
    "calibrate",
    "check_coverage",
    "conformal_intervals",
    "conformal_sets",
    "draws_of",
    "fit_knob",
    "fit_scale",
    "fit_setting",
    "fit_tempering",
    "from_dict",
    "gauss_newton",
    "held",
    "joint_draws",
    "kept_of",
    "kronecker",
    "least_examples",
    "load_promises",
    "log_variances",
    "looked_at",
    "low_rank",
    "measured",
    "nll_rows",
    "out_of_reach",
    "promises_of",
    "refit",
    "save_promises",
    "tail",
    "targets_of",
    "with_scales",
    "with_variances",
]
