"""The whole zoo."""

import zoo_mixed
import zoo_residual
import zoo_sequences
import zoo_transformers
from zoo_register import ZOO

__all__ = ["ZOO", "zoo_mixed", "zoo_residual", "zoo_sequences", "zoo_transformers"]
