"""The variational layers, their KL terms, and the reparameterised forward."""

from svdcompress.layers._apart import kl_apart
from svdcompress.layers._base import DEFAULT_LOG_SIGMA2, DEFAULT_THRESHOLD, VariationalLayer, variational_layers
from svdcompress.layers._conv import (
    VariationalConv1d,
    VariationalConv2d,
    VariationalConv3d,
    VariationalConvTranspose1d,
    VariationalConvTranspose2d,
    VariationalConvTranspose3d,
)
from svdcompress.layers._dropout import DROPOUT_CLASSES, BernoulliDropout, GaussianDropout
from svdcompress.layers._kept import KeptChannels, keep_channels, kept_channels
from svdcompress.layers._kl import group_log_alpha, kl_ard, kl_group_ard, kl_log_uniform, log_alpha, start_at
from svdcompress.layers._known import (
    VARIATIONAL_CLASSES,
    changes,
    clashes,
    class_name,
    known_class,
    register_loaded,
    variational_class,
)
from svdcompress.layers._linear import VariationalLinear
from svdcompress.layers._passes import HOOKS, sampling
from svdcompress.layers._positions import Shapes, shared_over_positions
from svdcompress.layers._precision import VARIANCE_DTYPES, check_variance_dtype
from svdcompress.layers._rows import Rows
from svdcompress.layers._sampling import Sampler, StochasticLayer, drawing, stochastic_layers, unwrapped, weight_of
from svdcompress.layers._share import PRIORS, REDUCED, Share, Threshold, canonical, check_prior, parse_share, parse_threshold

__all__ = [
    "DEFAULT_LOG_SIGMA2",
    "DEFAULT_THRESHOLD",
    "DROPOUT_CLASSES",
    "HOOKS",
    "PRIORS",
    "REDUCED",
    "VARIANCE_DTYPES",
    "VARIATIONAL_CLASSES",
    "BernoulliDropout",
    "GaussianDropout",
    "KeptChannels",
    "Rows",
    "Sampler",
    "Shapes",
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
    "changes",
    "check_prior",
    "check_variance_dtype",
    "clashes",
    "class_name",
    "drawing",
    "group_log_alpha",
    "keep_channels",
    "kept_channels",
    "kl_apart",
    "kl_ard",
    "kl_group_ard",
    "kl_log_uniform",
    "known_class",
    "log_alpha",
    "parse_share",
    "parse_threshold",
    "register_loaded",
    "sampling",
    "shared_over_positions",
    "start_at",
    "stochastic_layers",
    "unwrapped",
    "variational_class",
    "variational_layers",
    "weight_of",
]
