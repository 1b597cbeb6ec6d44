"""Predictions of a finished run for files of inputs, with their uncertainties, by PyTorch or by onnxruntime alone."""

from svdcompress.predict._read import read_inputs
from svdcompress.predict._run import predict_run
from svdcompress.predict._write import SUFFIXES, write_predictions

__all__ = ["SUFFIXES", "predict_run", "read_inputs", "write_predictions"]
