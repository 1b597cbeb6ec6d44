"""Bayesian sparsification of trained networks: convert, fine-tune, drop, prune, export, and keep the uncertainty."""

from svdcompress.convert import convert, convert_dropout, plan, to_dense
from svdcompress.layers import sampling
from svdcompress.objective import ELBO, AdditiveWarmup, Constant, CosineWarmup, LinearWarmup, kl_divergence
from svdcompress.relevance import Masks, hold, relevance

__version__ = "0.1.0"

__all__ = [
    "ELBO",
    "AdditiveWarmup",
    "Constant",
    "CosineWarmup",
    "LinearWarmup",
    "Masks",
    "convert",
    "convert_dropout",
    "hold",
    "kl_divergence",
    "plan",
    "relevance",
    "sampling",
    "to_dense",
]
