"""What stays: thresholds by layer and share, units judged as one, candidate thresholds, and the least relevant living units."""

from svdcompress.selection._choose import Selection, check_some_left, choose, limits_of, look_at
from svdcompress.selection._counted import count_nonzero
from svdcompress.selection._coupled import Coupling, coupled_relevance
from svdcompress.selection._ranked import Ranked, Ranking, ranked
from svdcompress.selection._rule import Rule, WhileTraining, rule
from svdcompress.selection._whole_units import whole_units

__all__ = [
    "Coupling",
    "Ranked",
    "Ranking",
    "Rule",
    "Selection",
    "WhileTraining",
    "check_some_left",
    "choose",
    "count_nonzero",
    "coupled_relevance",
    "limits_of",
    "look_at",
    "ranked",
    "rule",
    "whole_units",
]
