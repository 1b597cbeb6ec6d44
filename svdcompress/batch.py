"""Runs any model on any batch (a tensor, a tuple, a dict, or Hugging Face's inputs), and finds its main output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.errors import ModelError

MAIN_KEYS = ("logits", "output", "out", "prediction", "predictions", "last_hidden_state")
"""Names of the output that the loss and ONNX use, in models with several outputs; the first one found is taken."""

INNER = ("hidden_state", "attentions", "past_key_values", "mems")
"""Words in the names of outputs that are not predictions, as in transformers."""


def call(model: nn.Module, inputs: Any) -> Any:
    """`model(inputs)` for a tensor, `model(*inputs)` for a tuple or list, `model(**inputs)` for a mapping."""
    if isinstance(inputs, Mapping) or hasattr(inputs, "keys"):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def unwrapped(model: Any) -> Any:
    """The model inside the wrappers of torch.compile, data-parallel training and weight averaging (AveragedModel)."""
    model = getattr(model, "_orig_mod", model)
    if type(model).__name__ in ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "AveragedModel"):
        return unwrapped(model.module)
    return model


@contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """Put the model into `eval()`; afterwards each module is in its former mode again, as some may have been frozen."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def for_gradients(model: nn.Module) -> Iterator[None]:
    """Make cuDNN's gradients the same each time, as a resumed run ranks again. cuDNN is off for a model with recurrent layers,
    for which it has no gradients in `eval()`."""
    backend, names = torch.backends.cudnn, ("enabled", "benchmark", "deterministic")
    before = [getattr(backend, name) for name in names]
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    try:
        for name, value in zip(names, (backend.enabled and not recurrent, False, True), strict=True):
            setattr(backend, name, value)
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(backend, name, value)


def main_output(output: Any) -> Tensor:
    """The main tensor of a model's output: itself, the first of a tuple, or the logits (`MAIN_KEYS`) of a dict or dataclass.

    Raises ModelError if no floating-point tensor is found.
    """
    if isinstance(output, Tensor):
        return output
    output = _by_name(output)
    if isinstance(output, Mapping):
        named = [output[key] for key in MAIN_KEYS if key in output]
        candidates = named + list(output.values())
    elif isinstance(output, tuple | list):
        candidates = list(output)
    else:
        raise ModelError(f"the model returns {type(output).__name__}; a tensor, tuple, dict or dataclass of tensors is needed")
    for candidate in candidates:
        if isinstance(candidate, Tensor) and candidate.is_floating_point() and candidate.dim() > 0:
            return candidate
    raise ModelError(f"no floating-point tensor among the model's outputs ({type(output).__name__})")


def other_outputs(output: Any) -> dict[str, Tensor]:
    """The floating-point tensors other than the main one, by their names in an ONNX file.

    What is not a prediction is left out: single numbers such as a loss, and hidden states, attentions and caches by name.
    """
    main = main_output(output)
    found = _named(output)
    return {name: each for name, each in found.items() if each is not main and each.is_floating_point() and each.dim()}


def main_name(output: Any) -> str:
    """The name of the main tensor of a model's output; "output" if it has none of its own."""
    main = main_output(output)
    return next((name for name, each in _named(output).items() if each is main), "") or "output"


def _named(output: Any) -> dict[str, Tensor]:
    return {f"output_{name}" if name[:1].isdigit() else name: tensor for name, tensor in _tensors(output, "")}


def _tensors(output: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    output = _by_name(output)
    if isinstance(output, Tensor):
        yield name, output
    elif isinstance(output, Mapping | tuple | list):
        for key, item in output.items() if isinstance(output, Mapping) else enumerate(output):
            if not any(word in str(key) for word in INNER):
                yield from _tensors(item, f"{name}_{key}" if name else str(key))


def _by_name(output: Any) -> Any:
    """A dataclass as a mapping of its fields; anything else as it is."""
    if is_dataclass(output) and not isinstance(output, Mapping | type):
        return {field.name: getattr(output, field.name) for field in fields(output)}
    return output


def map_tensors(batch: Any, function: Any) -> Any:
    """Apply `function` to each tensor in tuples, lists (which become tuples) and mappings; other leaves are kept."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        return {key: map_tensors(batch[key], function) for key in batch.keys()}  # noqa: SIM118 (BatchEncoding)
    if isinstance(batch, tuple | list):
        return tuple(map_tensors(item, function) for item in batch)
    return batch


def to_device(batch: Any, device: torch.device | str) -> Any:
    """A batch with all its tensors on a device."""
    waits = torch.device(device).type == "cpu"  # otherwise it could be read there before it has arrived
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=not waits))


def first_tensor(batch: Any) -> Tensor:
    """The first tensor of a batch; its first dimension is the batch's size. Raises ModelError if there is none."""
    found: list[Tensor] = []
    map_tensors(batch, found.append)
    if not found:
        raise ModelError("the inputs hold no tensor")
    return found[0]


def first_example(inputs: Any) -> Any:
    """The first example of a batch: the first row of each tensor whose first dimension is the batch's."""
    batch = first_tensor(inputs).shape[:1]
    return map_tensors(inputs, lambda x: x[:1] if x.dim() and x.shape[:1] == batch else x)
