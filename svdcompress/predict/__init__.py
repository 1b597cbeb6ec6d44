"""Predictions of a finished run for a file of inputs, with uncertainties, computed by PyTorch or by onnxruntime alone."""

from svdcompress.predict._read import read_inputs
from svdcompress.predict._run import predict_run
from svdcompress.predict._write import SUFFIXES, write_predictions

__all__ = ["SUFFIXES", "predict_run", "read_inputs", "write_predictions"]
