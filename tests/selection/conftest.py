"""The zoo is shared with tests/zoo."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "zoo"))
