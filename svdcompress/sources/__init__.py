"""Turns the names in a recipe into models, weights and data."""

import importlib
import warnings
from typing import Any

from svdcompress.sources._arguments import outputs_hint
from svdcompress.sources._arrays import INPUTS, TARGETS
from svdcompress.sources._check import check_finite
from svdcompress.sources._data import READERS, Data, check_labels, open_data, preprocess
from svdcompress.sources._examples import Examples, FromDataset, InMemory, batch_length, example_inputs, split_batch
from svdcompress.sources._fitting import fitting
from svdcompress.sources._images import channels_last, decode, image_files, look_at
from svdcompress.sources._models import arrives_trained, came_in, fresh_weights, image_statistics, make_model
from svdcompress.sources._names import import_name, is_python_name
from svdcompress.sources._nets import NETS
from svdcompress.sources._npy import load_npy, load_npz
from svdcompress.sources._positions import IGNORED, both_fit, class_dim, classes_second, like
from svdcompress.sources._readers import made_by
from svdcompress.sources._standard import is_table
from svdcompress.sources._tables import frame_inputs, open_frame, text_columns
from svdcompress.sources._transforms import BYTES, flat_bytes, has_bytes
from svdcompress.sources._trust import (
    code_in,
    code_of_data,
    code_of_loss,
    code_of_model,
    code_of_run,
    code_of_transforms,
    run_argument,
)
from svdcompress.sources._weights import FLOATS, check_types, finite_as, load_weights, save_weights, start_from, write_tensors

__all__ = [
    "BYTES",
    "FLOATS",
    "IGNORED",
    "INPUTS",
    "NETS",
    "READERS",
    "TARGETS",
    "Data",
    "Examples",
    "FromDataset",
    "InMemory",
    "arrives_trained",
    "batch_length",
    "both_fit",
    "came_in",
    "channels_last",
    "check_finite",
    "check_labels",
    "check_types",
    "class_dim",
    "classes_second",
    "code_in",
    "code_of_data",
    "code_of_loss",
    "code_of_model",
    "code_of_run",
    "code_of_transforms",
    "decode",
    "example_inputs",
    "finite_as",
    "fitting",
    "flat_bytes",
    "frame_inputs",
    "fresh_weights",
    "has_bytes",
    "image_files",
    "image_statistics",
    "import_name",
    "is_python_name",
    "is_table",
    "like",
    "load_npy",
    "load_npz",
    "load_weights",
    "look_at",
    "made_by",
    "make_model",
    "open_data",
    "open_frame",
    "outputs_hint",
    "preprocess",
    "run_argument",
    "save_weights",
    "split_batch",
    "start_from",
    "text_columns",
    "write_tensors",
]

_MOVED = ("Loss", "gaussian_heads", "make_loss")


def __getattr__(name: str) -> Any:
    """Serve names that moved to `likelihoods`, for one release; imported by string, as that package depends on this one."""
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"svdcompress.sources.{name} is svdcompress.likelihoods.{name} now", DeprecationWarning, stacklevel=2)
    return getattr(importlib.import_module("svdcompress.likelihoods"), name)
