"""Bayesian sparsification of trained networks: convert, fine-tune, drop, prune, export, and keep the uncertainty."""

from typing import TYPE_CHECKING

from svdcompress.lazy import import_when_used
from svdcompress.version import __version__ as __version__

if TYPE_CHECKING:
    from svdcompress.calibrate import answer_above, calibrate, conformal_intervals, conformal_sets
    from svdcompress.checkpoint import load, read_manifest, save
    from svdcompress.convert import PlanEntry, convert, convert_dropout, fold_derived_weights, plan, to_dense
    from svdcompress.errors import SvdcError
    from svdcompress.execution import SparseEntry, to_sparse
    from svdcompress.export import Exported, export_onnx
    from svdcompress.layers import Posterior, Prior, sampling, set_posterior
    from svdcompress.likelihoods import Likelihood, set_likelihood
    from svdcompress.objective import ELBO, AdditiveWarmup, Constant, CosineWarmup, LinearWarmup, kl_divergence
    from svdcompress.pipeline import OpenRun, Sparsified, load_run, sparsify
    from svdcompress.prune import PruneReport, groups, prune
    from svdcompress.reconstruction import Reconstruction, reconstruct
    from svdcompress.relevance import Masks, hold, relevance
    from svdcompress.report import plot_tradeoff
    from svdcompress.selection import coupled_relevance
    from svdcompress.uncertainty import Prediction, mc_predict, mean_predict

_HOMES = {
    "calibrate": ("answer_above", "calibrate", "conformal_intervals", "conformal_sets"),
    "checkpoint": ("load", "read_manifest", "save"),
    "convert": ("PlanEntry", "convert", "convert_dropout", "fold_derived_weights", "plan", "to_dense"),
    "errors": ("SvdcError",),
    "execution": ("SparseEntry", "to_sparse"),
    "export": ("Exported", "export_onnx"),
    "layers": ("Posterior", "Prior", "sampling", "set_posterior"),
    "likelihoods": ("Likelihood", "set_likelihood"),
    "objective": ("ELBO", "AdditiveWarmup", "Constant", "CosineWarmup", "LinearWarmup", "kl_divergence"),
    "pipeline": ("OpenRun", "Sparsified", "load_run", "sparsify"),
    "prune": ("PruneReport", "groups", "prune"),
    "reconstruction": ("Reconstruction", "reconstruct"),
    "relevance": ("Masks", "hold", "relevance"),
    "report": ("plot_tradeoff",),
    "selection": ("coupled_relevance",),
    "uncertainty": ("Prediction", "mc_predict", "mean_predict"),
}

__all__ = [
    "ELBO",
    "AdditiveWarmup",
    "Constant",
    "CosineWarmup",
    "Exported",
    "Likelihood",
    "LinearWarmup",
    "Masks",
    "OpenRun",
    "PlanEntry",
    "Posterior",
    "Prediction",
    "Prior",
    "PruneReport",
    "Reconstruction",
    "SparseEntry",
    "Sparsified",
    "SvdcError",
    "answer_above",
    "calibrate",
    "conformal_intervals",
    "conformal_sets",
    "convert",
    "convert_dropout",
    "coupled_relevance",
    "export_onnx",
    "fold_derived_weights",
    "groups",
    "hold",
    "kl_divergence",
    "load",
    "load_run",
    "mc_predict",
    "mean_predict",
    "plan",
    "plot_tradeoff",
    "prune",
    "read_manifest",
    "reconstruct",
    "relevance",
    "sampling",
    "save",
    "set_likelihood",
    "set_posterior",
    "sparsify",
    "to_dense",
    "to_sparse",
]

import_when_used(__name__, _HOMES)
