"""Posteriors of the weights, one file each: the parameters that define their variances, and what follows from these."""

from svdcompress.layers.posteriors._base import TINY, Posterior, Shaped, check_posterior
from svdcompress.layers.posteriors._independent import Independent
from svdcompress.layers.posteriors._rank_one import Factors, RankOne

POSTERIORS = (Independent.name, RankOne.name)
"""Names of the package's own posteriors."""

__all__ = ["POSTERIORS", "TINY", "Factors", "Independent", "Posterior", "RankOne", "Shaped", "check_posterior"]
