"""Priors of the weights, one file each: the KL from prior to posterior, log alpha, and the initial log variance."""

from svdcompress.layers.priors._apart import kl_apart
from svdcompress.layers.priors._ard import ARD, kl_ard, kl_group_ard
from svdcompress.layers.priors._base import DEFAULT_LOG_SIGMA2, Layout, Prior, check_prior
from svdcompress.layers.priors._log_uniform import LogUniform, kl_log_uniform
from svdcompress.layers.priors._rank_one import kl_rank_one

PRIORS = (ARD.name, LogUniform.name)
"""Names of the package's own priors."""

__all__ = [
    "ARD",
    "DEFAULT_LOG_SIGMA2",
    "PRIORS",
    "Layout",
    "LogUniform",
    "Prior",
    "check_prior",
    "kl_apart",
    "kl_ard",
    "kl_group_ard",
    "kl_log_uniform",
    "kl_rank_one",
]
