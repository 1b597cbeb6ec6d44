"""Executing a pruned model in PyTorch: sparse products replace dense ones where they are measured to be faster."""

from svdcompress.execution._entry import SparseEntry, summary
from svdcompress.execution._linear import SparseLinear
from svdcompress.execution._to_sparse import to_sparse

__all__ = ["SparseEntry", "SparseLinear", "summary", "to_sparse"]
