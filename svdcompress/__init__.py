"""Bayesian sparsification of trained networks: convert, fine-tune, drop, prune, export, and keep the uncertainty."""

from svdcompress.checkpoint import load, read_manifest, save
from svdcompress.convert import convert, convert_dropout, fold_derived_weights, plan, to_dense
from svdcompress.export import export_onnx
from svdcompress.layers import sampling
from svdcompress.objective import ELBO, AdditiveWarmup, Constant, CosineWarmup, LinearWarmup, kl_divergence
from svdcompress.prune import coupled_relevance, groups, prune
from svdcompress.relevance import Masks, hold, relevance
from svdcompress.uncertainty import Prediction, mc_predict

__version__ = "0.1.0"

__all__ = [
    "ELBO",
    "AdditiveWarmup",
    "Constant",
    "CosineWarmup",
    "LinearWarmup",
    "Masks",
    "Prediction",
    "convert",
    "convert_dropout",
    "coupled_relevance",
    "export_onnx",
    "fold_derived_weights",
    "groups",
    "hold",
    "kl_divergence",
    "load",
    "mc_predict",
    "plan",
    "prune",
    "read_manifest",
    "relevance",
    "sampling",
    "save",
    "to_dense",
]
