"""The experiments of the lectures that this project grew from, as recipes: each trains, judges and draws.

They are smaller than the papers' own (iterations above all), so that each takes minutes on one core; their settings say so.
"""

from svdcompress.experiments._common import Context
from svdcompress.experiments._run import EXPERIMENTS, check, outline, run, run_recipe

__all__ = ["EXPERIMENTS", "Context", "check", "outline", "run", "run_recipe"]
