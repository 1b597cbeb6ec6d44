"""The decisions of a search for the smallest model within an error budget, or the best one of a size; nothing is trained."""

from svdcompress.search._budget import PER_NAT, Budget, Losses, Verdict, estimated, surely_worse
from svdcompress.search._mixture import Option, best_option, record
from svdcompress.search._plan import LOWEST, better_pressure, next_ratio, pressure_of_size, smallest, start_ratio
from svdcompress.search._strategy import CLOSE, Ask, Strategy
from svdcompress.search._trial import NOTHING, Trial

__all__ = [
    "CLOSE",
    "LOWEST",
    "NOTHING",
    "PER_NAT",
    "Ask",
    "Budget",
    "Losses",
    "Option",
    "Strategy",
    "Trial",
    "Verdict",
    "best_option",
    "better_pressure",
    "estimated",
    "next_ratio",
    "pressure_of_size",
    "record",
    "smallest",
    "start_ratio",
    "surely_worse",
]
