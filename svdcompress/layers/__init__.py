"""Variational layers, their KL terms, and the reparameterized forward pass."""

from svdcompress.layers._alpha import group_log_alpha, log_alpha, start_at
from svdcompress.layers._arranged import arranged_convolutions
from svdcompress.layers._base import DEFAULT_THRESHOLD, VariationalLayer, variance_parameters, variational_layers
from svdcompress.layers._conv import (
    VariationalConv1d,
    VariationalConv2d,
    VariationalConv3d,
    VariationalConvTranspose1d,
    VariationalConvTranspose2d,
    VariationalConvTranspose3d,
)
from svdcompress.layers._dropout import DROPOUT_CLASSES, BernoulliDropout, GaussianDropout
from svdcompress.layers._in_parts import in_parts
from svdcompress.layers._kept import KeptChannels, keep_channels, kept_channels
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
from svdcompress.layers._moments import Moments, Weights, moments
from svdcompress.layers._passes import HOOKS, sampling
from svdcompress.layers._positions import Shapes, rows_differ, rows_meet, shared_over_positions, turned, variational_among
from svdcompress.layers._precision import VARIANCE_DTYPES, check_variance_dtype, fast_bfloat16
from svdcompress.layers._registry import stored
from svdcompress.layers._rows import Rows
from svdcompress.layers._sampling import Sampler, StochasticLayer, drawing, stochastic_layers, weight_of
from svdcompress.layers._share import REDUCED, Share, Threshold, canonical, parse_share, parse_threshold
from svdcompress.layers._variances import set_posterior
from svdcompress.layers._whole import WHOLE, check_whole
from svdcompress.layers.posteriors import POSTERIORS, Independent, Posterior, RankOne, check_posterior
from svdcompress.layers.priors import (
    ARD,
    DEFAULT_LOG_SIGMA2,
    PRIORS,
    LogUniform,
    Prior,
    check_prior,
    kl_apart,
    kl_ard,
    kl_group_ard,
    kl_log_uniform,
)

__all__ = [
    "ARD",
    "DEFAULT_LOG_SIGMA2",
    "DEFAULT_THRESHOLD",
    "DROPOUT_CLASSES",
    "HOOKS",
    "POSTERIORS",
    "PRIORS",
    "REDUCED",
    "VARIANCE_DTYPES",
    "VARIATIONAL_CLASSES",
    "WHOLE",
    "BernoulliDropout",
    "GaussianDropout",
    "Independent",
    "KeptChannels",
    "LogUniform",
    "Moments",
    "Posterior",
    "Prior",
    "RankOne",
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
    "Weights",
    "arranged_convolutions",
    "canonical",
    "changes",
    "check_posterior",
    "check_prior",
    "check_variance_dtype",
    "check_whole",
    "clashes",
    "class_name",
    "drawing",
    "fast_bfloat16",
    "group_log_alpha",
    "in_parts",
    "keep_channels",
    "kept_channels",
    "kl_apart",
    "kl_ard",
    "kl_group_ard",
    "kl_log_uniform",
    "known_class",
    "log_alpha",
    "moments",
    "parse_share",
    "parse_threshold",
    "register_loaded",
    "rows_differ",
    "rows_meet",
    "sampling",
    "set_posterior",
    "shared_over_positions",
    "start_at",
    "stochastic_layers",
    "stored",
    "turned",
    "variance_parameters",
    "variational_among",
    "variational_class",
    "variational_layers",
    "weight_of",
]
