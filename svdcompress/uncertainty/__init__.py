"""What a Bayesian network says of itself: predictive distribution, its decomposition, its quality and its calibration."""

from svdcompress.likelihoods import TASKS, Prediction
from svdcompress.uncertainty._calibrate import fit_tau, fit_temperature
from svdcompress.uncertainty._compare import Batches, compare, gather
from svdcompress.uncertainty._intervals import paired_means, paired_rmse, paired_shares, wilson
from svdcompress.uncertainty._outside import images_like, outside
from svdcompress.uncertainty._plots import draw
from svdcompress.uncertainty._predict import mc_predict, mean_predict
from svdcompress.uncertainty._quality import auroc, quality, regression_quality, rejection, reliability

__all__ = [
    "TASKS",
    "Batches",
    "Prediction",
    "auroc",
    "compare",
    "draw",
    "fit_tau",
    "fit_temperature",
    "gather",
    "images_like",
    "mc_predict",
    "mean_predict",
    "outside",
    "paired_means",
    "paired_rmse",
    "paired_shares",
    "quality",
    "regression_quality",
    "rejection",
    "reliability",
    "wilson",
]
