"""Posteriors of the weights, one file each: which parameters a layer has for their variances, and what follows from them."""

from svdcompress.layers.posteriors._base import TINY, Posterior, Shaped, check_posterior
from svdcompress.layers.posteriors._independent import Independent
from svdcompress.layers.posteriors._rank_one import Factors, RankOne

POSTERIORS = (Independent.name, RankOne.name)
"""Names of the package's own."""

__all__ = ["POSTERIORS", "TINY", "Factors", "Independent", "Posterior", "RankOne", "Shaped", "check_posterior"]
