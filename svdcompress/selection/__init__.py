"""What stays: thresholds of each layer and share, units judged as one, candidates, and the curve of error against size."""

from svdcompress.selection._choose import Selection, check_some_left, choose, look_at
from svdcompress.selection._coupled import Coupling, coupled_relevance
from svdcompress.selection._ranked import Ranked, Ranking, ranked
from svdcompress.selection._rule import Rule, rule

__all__ = [
    "Coupling",
    "Ranked",
    "Ranking",
    "Rule",
    "Selection",
    "check_some_left",
    "choose",
    "coupled_relevance",
    "look_at",
    "ranked",
    "rule",
]
