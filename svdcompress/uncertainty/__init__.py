"""What a Bayesian network says of itself: predictive distribution, its decomposition, its quality and its calibration."""

from svdcompress.uncertainty._predict import mc_predict
from svdcompress.uncertainty._prediction import TASKS, Prediction

__all__ = ["TASKS", "Prediction", "mc_predict"]
