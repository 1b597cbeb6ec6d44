"""How a small model is executed in PyTorch: sparse products in place of dense ones where they measure faster."""

from svdcompress.execution._entry import SparseEntry, summary
from svdcompress.execution._linear import SparseLinear
from svdcompress.execution._to_sparse import to_sparse

__all__ = ["SparseEntry", "SparseLinear", "summary", "to_sparse"]
