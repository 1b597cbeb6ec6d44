"""Comparison of a finished run's model with baselines on the same data, which have to be trained or fitted first."""

from svdcompress.evaluation._evaluate import Wanted, evaluate_run
from svdcompress.evaluation._laplace import last_layer_laplace
from svdcompress.evaluation._magnitude import magnitude_pruned
from svdcompress.evaluation._members import ensemble_members

__all__ = ["Wanted", "ensemble_members", "evaluate_run", "last_layer_laplace", "magnitude_pruned"]
