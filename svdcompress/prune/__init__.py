"""Dead units out of the graph, exactly; what cannot be done exactly stays masked, with its reason."""

from svdcompress.prune._coupled import Coupling, coupled_relevance
from svdcompress.prune._prune import groups, prune
from svdcompress.prune._report import LayerShape, PruneGroup, PruneReport

__all__ = ["Coupling", "LayerShape", "PruneGroup", "PruneReport", "coupled_relevance", "groups", "prune"]
