"""The variational layers, their KL terms, and the reparameterised forward."""

import sys

from torch import nn

from svdcompress.layers._apart import kl_apart
from svdcompress.layers._base import DEFAULT_LOG_SIGMA2, DEFAULT_THRESHOLD, VariationalLayer
from svdcompress.layers._conv import (
    VariationalConv1d,
    VariationalConv2d,
    VariationalConv3d,
    VariationalConvTranspose1d,
    VariationalConvTranspose2d,
    VariationalConvTranspose3d,
)
from svdcompress.layers._dropout import DROPOUT_CLASSES, BernoulliDropout, GaussianDropout
from svdcompress.layers._kl import group_log_alpha, kl_ard, kl_group_ard, kl_log_uniform, log_alpha, start_at
from svdcompress.layers._linear import VariationalLinear
from svdcompress.layers._precision import VARIANCE_DTYPES, check_variance_dtype
from svdcompress.layers._rows import Rows
from svdcompress.layers._sampling import Sampler, StochasticLayer, drawing, sampling, stochastic_layers
from svdcompress.layers._share import PRIORS, REDUCED, Share, Threshold, canonical, check_prior, parse_share, parse_threshold

VARIATIONAL_CLASSES: dict[type[nn.Module], type[VariationalLayer]] = {
    layer.dense_class: layer
    for layer in (
        VariationalLinear,
        VariationalConv1d,
        VariationalConv2d,
        VariationalConv3d,
        VariationalConvTranspose1d,
        VariationalConvTranspose2d,
        VariationalConvTranspose3d,
    )
}
"""The variational layer of each torch.nn class that has one; register a class here to have it converted."""


def register_loaded() -> None:
    """Register the layers of packages that are in use: transformers' Conv1D. A model that has one has imported its package."""
    if "transformers.pytorch_utils" in sys.modules:
        from svdcompress.layers._hf import VariationalHFConv1D

        VARIATIONAL_CLASSES.setdefault(VariationalHFConv1D.dense_class, VariationalHFConv1D)


__all__ = [
    "DEFAULT_LOG_SIGMA2",
    "DEFAULT_THRESHOLD",
    "DROPOUT_CLASSES",
    "PRIORS",
    "REDUCED",
    "VARIANCE_DTYPES",
    "VARIATIONAL_CLASSES",
    "BernoulliDropout",
    "GaussianDropout",
    "Rows",
    "Sampler",
    "Share",
    "StochasticLayer",
    "Threshold",
    "VariationalConv1d",
    "VariationalConv2d",
    "VariationalConv3d",
    "VariationalConvTranspose1d",
    "VariationalConvTranspose2d",
    "VariationalConvTranspose3d",
    "VariationalLayer",
    "VariationalLinear",
    "canonical",
    "check_prior",
    "check_variance_dtype",
    "drawing",
    "group_log_alpha",
    "kl_apart",
    "kl_ard",
    "kl_group_ard",
    "kl_log_uniform",
    "log_alpha",
    "parse_share",
    "parse_threshold",
    "register_loaded",
    "sampling",
    "start_at",
    "stochastic_layers",
]
