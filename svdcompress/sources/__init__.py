"""Names to models, weights and data; and how any of them is called."""

from svdcompress.sources._call import call, first_tensor, main_output, map_tensors, to_device
from svdcompress.sources._weights import load_weights, save_weights

__all__ = ["call", "first_tensor", "load_weights", "main_output", "map_tensors", "save_weights", "to_device"]
