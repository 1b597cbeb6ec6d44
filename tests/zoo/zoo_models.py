"""The whole zoo."""

import zoo_mixed
import zoo_residual
import zoo_sequences
import zoo_transformers
import zoo_various
from zoo_register import ZOO

__all__ = ["ZOO", "zoo_mixed", "zoo_residual", "zoo_sequences", "zoo_transformers", "zoo_various"]
