"""Runs a recipe into a folder: the stages in order, and resuming after a stop."""

from svdcompress.pipeline._advice import advice
from svdcompress.pipeline._axes import as_open_as_can_be
from svdcompress.pipeline._baked import baked
from svdcompress.pipeline._calibrate import KEPT
from svdcompress.pipeline._convert import converted, final_beta, make_schedule, planned
from svdcompress.pipeline._dense import check_model, dense_model
from svdcompress.pipeline._estimate import Estimate, estimate
from svdcompress.pipeline._export import export_model, file_metadata
from svdcompress.pipeline._extra import Preprocessing
from svdcompress.pipeline._fewest_bits import fewest_bits
from svdcompress.pipeline._figures import feed, versions
from svdcompress.pipeline._folder import free_folder, prepare, stored_recipe
from svdcompress.pipeline._integers import beside
from svdcompress.pipeline._loss import class_weights
from svdcompress.pipeline._open import OpenRun, load_run, open_run, untrusted
from svdcompress.pipeline._own_recipe import check_own_recipe
from svdcompress.pipeline._promised import promised, sets_of
from svdcompress.pipeline._reach import about_frozen, out_of_reach, rate_of_variances, reach_of
from svdcompress.pipeline._reduced import reduced
from svdcompress.pipeline._resume import changed_fields, value_of
from svdcompress.pipeline._run import run
from svdcompress.pipeline._search_start import chosen_by_time, levels_and_trials
from svdcompress.pipeline._select import bare
from svdcompress.pipeline._sparsify import Sparsified, sparsify
from svdcompress.pipeline._verify import Verification, verify_run
from svdcompress.pipeline._weight_names import WeightNames

__all__ = [
    "KEPT",
    "Estimate",
    "OpenRun",
    "Preprocessing",
    "Sparsified",
    "Verification",
    "WeightNames",
    "about_frozen",
    "advice",
    "as_open_as_can_be",
    "baked",
    "bare",
    "beside",
    "changed_fields",
    "check_model",
    "check_own_recipe",
    "chosen_by_time",
    "class_weights",
    "converted",
    "dense_model",
    "estimate",
    "export_model",
    "feed",
    "fewest_bits",
    "file_metadata",
    "final_beta",
    "free_folder",
    "levels_and_trials",
    "load_run",
    "make_schedule",
    "open_run",
    "out_of_reach",
    "planned",
    "prepare",
    "promised",
    "rate_of_variances",
    "reach_of",
    "reduced",
    "run",
    "sets_of",
    "sparsify",
    "stored_recipe",
    "untrusted",
    "value_of",
    "verify_run",
    "versions",
]
