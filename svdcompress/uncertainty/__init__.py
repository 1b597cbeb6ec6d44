"""Uncertainty of a Bayesian network: its predictive distribution, its decomposition, quality and calibration."""

from svdcompress.likelihoods import TASKS, Prediction
from svdcompress.renamed import former_names
from svdcompress.uncertainty._bootstrap import paired_bootstrap, significant
from svdcompress.uncertainty._calibrate import fit_tau, fit_temperature
from svdcompress.uncertainty._compare import compare
from svdcompress.uncertainty._contenders import Contender, ensemble_contender, mean_contender, sampled_contender
from svdcompress.uncertainty._explained import Explained, r2
from svdcompress.uncertainty._gather import Batches, Gathered, gather
from svdcompress.uncertainty._intervals import paired_means, paired_parts, paired_rmse, paired_shares, wilson
from svdcompress.uncertainty._outside import images_like, outside
from svdcompress.uncertainty._plots import plot
from svdcompress.uncertainty._predict import NotFiniteError, ensemble_predict, mc_predict, mean_predict
from svdcompress.uncertainty._quality import as_rows, auroc, quality, regression_quality, rejection, reliability, selective
from svdcompress.uncertainty._shapes import shaped_like
from svdcompress.uncertainty._shift import LEVELS, shifts

__all__ = [
    "LEVELS",
    "TASKS",
    "Batches",
    "Contender",
    "Explained",
    "Gathered",
    "NotFiniteError",
    "Prediction",
    "as_rows",
    "auroc",
    "compare",
    "ensemble_contender",
    "ensemble_predict",
    "fit_tau",
    "fit_temperature",
    "gather",
    "images_like",
    "mc_predict",
    "mean_contender",
    "mean_predict",
    "outside",
    "paired_bootstrap",
    "paired_means",
    "paired_parts",
    "paired_rmse",
    "paired_shares",
    "plot",
    "quality",
    "r2",
    "regression_quality",
    "rejection",
    "reliability",
    "sampled_contender",
    "selective",
    "shaped_like",
    "shifts",
    "significant",
    "wilson",
]

__getattr__ = former_names(__name__, {"draw": "plot"})
