"""Saving and loading without a pickle: tensors as safetensors, everything else as a JSON manifest in the same file.

A variational, masked or pruned model is loaded onto a fresh model from the user's own factory, bit for bit: the manifest
says which layers are variational and which shapes and attributes pruning changed.
"""

from svdcompress.checkpoint._load import load, take_attributes
from svdcompress.checkpoint._manifest import FORMAT, KEY, read_manifest, read_tensors
from svdcompress.checkpoint._save import save

__all__ = ["FORMAT", "KEY", "load", "read_manifest", "read_tensors", "save", "take_attributes"]
