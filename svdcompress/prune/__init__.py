"""Dead units out of the graph, exactly; what cannot be done exactly stays masked, with its reason."""

from svdcompress.prune._choice import Analysis, Consumer
from svdcompress.prune._folding import holders, oriented
from svdcompress.prune._prune import analyse, groups, prune
from svdcompress.prune._report import LayerShape, PruneGroup, PruneReport

__all__ = [
    "Analysis",
    "Consumer",
    "LayerShape",
    "PruneGroup",
    "PruneReport",
    "analyse",
    "groups",
    "holders",
    "oriented",
    "prune",
]
