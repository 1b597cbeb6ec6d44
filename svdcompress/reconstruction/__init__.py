"""Fits the remaining means to each layer's outputs before units were removed, by least squares over examples."""

from svdcompress.reconstruction._layer import ROWS, LayerError
from svdcompress.reconstruction._reconstruct import Reconstruction, fits_any, reconstruct, reconstructed
from svdcompress.reconstruction._solve import RIDGES, Solution, solve

__all__ = [
    "RIDGES",
    "ROWS",
    "LayerError",
    "Reconstruction",
    "Solution",
    "fits_any",
    "reconstruct",
    "reconstructed",
    "solve",
]
