"""The experiments of the lectures that this project grew from, as recipes: each trains, evaluates and plots.

They are smaller than in the papers (above all in iterations), so that each takes minutes on one core; see their settings.
"""

from svdcompress.experiments._common import Context
from svdcompress.experiments._run import EXPERIMENTS, check, outline, run, run_recipe

__all__ = ["EXPERIMENTS", "Context", "check", "outline", "run", "run_recipe"]
