"""What operators do to units. Each file fills the table of `_registry`; `follow` looks operators up in it."""

from svdcompress.prune._operators import _pieces, _pointwise, _products, _random, _reductions, _views
from svdcompress.prune._operators._follow import follow
from svdcompress.prune._operators._registry import HandlerBug, Unfollowed, bugs_raised, operator

HANDLERS = (_pieces, _pointwise, _products, _random, _reductions, _views)
"""The files with handlers."""

__all__ = ["HANDLERS", "HandlerBug", "Unfollowed", "bugs_raised", "follow", "operator"]
