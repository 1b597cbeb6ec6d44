"""Removes dead units from a model's graph, exactly; what cannot be removed exactly stays masked, with the reason."""

from svdcompress.prune._attempt import PUT_BACK
from svdcompress.prune._choice import BIAS, Analysis, Choice, Consumer
from svdcompress.prune._copies import dense_copy, on_cpu
from svdcompress.prune._folding import holders, oriented
from svdcompress.prune._groups import count_means
from svdcompress.prune._operations import operations
from svdcompress.prune._paddings import PADDED
from svdcompress.prune._prune import analyse, groups, prune
from svdcompress.prune._report import LayerShape, PruneGroup, PruneReport

__all__ = [
    "BIAS",
    "PADDED",
    "PUT_BACK",
    "Analysis",
    "Choice",
    "Consumer",
    "LayerShape",
    "PruneGroup",
    "PruneReport",
    "analyse",
    "count_means",
    "dense_copy",
    "groups",
    "holders",
    "on_cpu",
    "operations",
    "oriented",
    "prune",
]
