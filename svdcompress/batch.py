"""Runs any model on any batch (a tensor, a tuple, a dict, or Hugging Face's inputs), and finds its main output."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.errors import Interrupted, ModelError, out_of_memory
from svdcompress.hooks import hooked

MAIN_KEYS = ("logits", "output", "out", "prediction", "predictions", "last_hidden_state")
"""Names of the output that the loss and ONNX use, in models with several outputs; the first one found is taken."""

INNER = ("hidden_state", "attentions", "past_key_values", "mems")
"""Words in the names of outputs that are not predictions, as in transformers."""

WIDEST = 2**27
"""The most numbers in one tensor of a pass without gradients: 512 MB in float32. Small networks stay far below it."""

UNSEEN, UNSEEN_IDS = 32, 1024
"""Numbers assumed for each number of the input, or for each id, where no module shows what a model computes inside."""

COPIED = 2**20
"""Buffers of up to this many numbers are restored after a trial pass: statistics and counters, but no masks of weights."""


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


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the generators of torch (including those of GPUs), numpy and random when the body ends."""
    numpy = sys.modules.get("numpy")
    others = random.getstate(), None if numpy is None else numpy.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(others[0])
        if numpy is not None:
            numpy.random.set_state(others[1])


def at_once(model: nn.Module | None, inputs: Any, most: int, *, draws: int = 1) -> int:
    """How many examples fit into a pass without gradients: `most`, or fewer (1 at least), so that no tensor of it has more than
    about WIDEST numbers.

    model: on the device of `inputs`; it is tried on the first example in `eval()` and left as it was. None: examples are only
    read. inputs: a batch of any size. draws: for how many passes the outputs are kept together.

    Counted are the inputs, what each module returns, and the outputs `draws` times. What a module computes inside cannot be
    seen: for a model without modules of its own, such as a file, UNSEEN numbers are assumed for each of the input. So they are
    for a model that refuses a batch of one example and of two.
    """
    one = first_example(inputs)
    tensors = list(_leaves(one))
    size = max([1, *(tensor.numel() for tensor in tensors)])
    if model is not None:
        unseen = max([1, *(tensor.numel() * (UNSEEN if tensor.is_floating_point() else UNSEEN_IDS) for tensor in tensors)])
        for count in (1, 2):
            try:
                inside, output, all_seen = _widths(model, one if count == 1 else _twice(one))
            except Interrupted:
                raise
            except Exception as error:  # whatever a model raises for a single example
                if out_of_memory(error):
                    return 1
                continue
            size = max(size, inside // count, draws * output // count, 0 if all_seen else unseen)
            break
        else:
            size = max(size, unseen)
    return min(most, max(1, WIDEST // size))


def _twice(one: Any) -> Any:
    """A batch of an example and itself."""
    return map_tensors(one, lambda x: torch.cat([x, x]) if x.dim() and len(x) == 1 else x)


@torch.no_grad()
def _widths(model: nn.Module, inputs: Any) -> tuple[int, int, bool]:
    """The numbers in the largest tensor that a module returns, and in the largest of the outputs; whether modules show what
    the model computes."""
    weights = {parameter.shape for parameter in model.parameters()}
    rows, found = len(first_tensor(inputs)), [0]

    def note(module: nn.Module, args: Any, output: Any) -> None:
        # Parametrizations return weights; an activation of their shape is no larger than they are.
        found.extend(t.numel() for t in _leaves(output) if t.shape not in weights or t.shape[:1] == (rows,))

    hookable = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    all_seen = len(hookable) == len(list(model.modules())) and bool(weights or len(hookable) > 1)
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    small = {id(b): b for _, own in buffers for b in own.values() if b is not None and b.numel() <= COPIED}
    values = {key: b.clone() for key, b in small.items()}
    try:
        with generators_kept(), in_eval(model), hooked(module.register_forward_hook(note) for module in hookable):
            output = call(model, inputs)
    finally:
        for module, own in buffers:
            module._buffers.update(own)
        for key, value in values.items():
            small[key].copy_(value)
    return max(found), max([0, *(tensor.numel() for tensor in _leaves(output))]), all_seen


def _leaves(batch: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists, mappings and dataclasses."""
    batch = _by_name(batch)
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping) or hasattr(batch, "keys"):
        for key in batch.keys():  # noqa: SIM118 (BatchEncoding)
            yield from _leaves(batch[key])
    elif isinstance(batch, tuple | list):
        for item in batch:
            yield from _leaves(item)
