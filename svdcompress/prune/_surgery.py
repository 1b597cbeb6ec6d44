"""Removes units from a model by name and index: folds constants first, then slices every tensor once.

Nothing is written into a parameter's memory, which may be the given model's: parameters get new tensors.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from svdcompress.layers import VariationalLayer, keep_channels, kept_channels
from svdcompress.prune._choice import Analysis, Choice
from svdcompress.prune._copies import forget
from svdcompress.prune._folding import fold, named_holders
from svdcompress.prune._numbers import adapted, own_sizes
from svdcompress.prune._record import Surgery
from svdcompress.prune._spreads import cut_view, make_independent
from svdcompress.prune._units import Parameter


def operate(model: nn.Module, analysis: Analysis, choice: Choice, adapt: str = "names") -> Surgery:
    """Carry out a choice on a copy of the traced model (variational or dense), in place; returns a record of the changes.

    adapt: which integer attributes are changed where code holds lengths as numbers: "names" (those whose name fits, and not
    sizes of one head), "heads" (only numbers of heads), "every" or "none".
    """
    record = Surgery()
    make_independent(model, analysis, choice)
    numbers = adapted(model, analysis, choice, adapt)  # before anything changes them
    made: list[tuple[nn.Module, np.ndarray]] = []  # modules that got a bias, and which of its entries to keep
    with torch.no_grad():
        for number, consumer in enumerate(analysis.consumers):
            module = fold(model, consumer, choice, choice.carriers.get(number, {}))
            if module is not None:
                made.append((module, ~choice.removed[consumer.outs.reshape(-1)]))
        done: set[int] = set()
        for parameter in analysis.trace.units.parameters:
            keep = [~choice.removed[a : a + n] for a, n in zip(parameter.axes, parameter.sizes, strict=True)]
            if not all(part.all() for part in keep):
                _slice(model, parameter, keep, done, record)
                _note_outputs(model, parameter, keep[0], record)
        for module, part in made:
            for tensor in (module.bias, getattr(module, "bias_sigma2", None)):
                if isinstance(tensor, Tensor):
                    tensor.data = tensor.data[torch.from_numpy(part).to(tensor.device)]
    cut_padding(model, analysis, choice)
    for name, attribute, value in numbers:
        record.set(model, name, attribute, value)
    forget(model)
    return record


def _slice(model: nn.Module, parameter: Parameter, keep: list[np.ndarray], done: set[int], record: Surgery) -> None:
    for name, module, key in named_holders(model, parameter):
        tensors = [getattr(module, key)]
        if isinstance(module, VariationalLayer) and key == "weight":
            for own in module.variance_parameters().values():
                if own.shape == module.weight.shape:
                    tensors.append(own)
                elif id(own) not in done:
                    own.data = cut_view(module, parameter, own.data, keep)
                    done.add(id(own))
            tensors.append(module.mask)
        elif isinstance(module, VariationalLayer) and key == "bias":
            tensors += [module.bias_sigma2]
        for tensor in tensors:
            if tensor is not None and id(tensor) not in done:
                tensor.data = cut(parameter, tensor.data, keep)
                done.add(id(tensor))
        for attribute, value in own_sizes(module, key, parameter, keep).items():
            record.set(model, name, attribute, value)


def _note_outputs(model: nn.Module, parameter: Parameter, keep: np.ndarray, record: Surgery) -> None:
    if keep.all() or parameter.transposed:
        return
    for name, _, key in named_holders(model, parameter):
        if key in ("weight", "running_mean"):  # batch normalization may have no weight
            record.outputs[name] = np.flatnonzero(keep).tolist()


def cut(parameter: Parameter, tensor: Tensor, keep: list[np.ndarray]) -> Tensor:
    """A tensor of the parameter's shape with only the kept indices of each axis; contiguous."""
    if not parameter.grouped or tensor.dim() == 1:
        for d, part in enumerate(keep):
            if not part.all():
                tensor = tensor.index_select(d, torch.from_numpy(np.flatnonzero(part)).to(tensor.device))
        return tensor.contiguous()
    view = parameter.canonical(tensor)
    groups, outs, ins = view.shape[:3]
    keep_out, keep_in = keep[0].reshape(groups, outs), keep[1].reshape(groups, ins)
    parts = []
    for group in range(groups):
        rows, columns = np.flatnonzero(keep_out[group]), np.flatnonzero(keep_in[group])
        if len(rows) and len(columns):
            rows, columns = torch.from_numpy(rows).to(tensor.device), torch.from_numpy(columns).to(tensor.device)
            parts.append(view[group].index_select(0, rows).index_select(1, columns))
    small = torch.stack(parts)  # (groups, outs, ins, positions)
    if parameter.transposed:
        small = small.transpose(1, 2)
    return small.reshape(-1, small.shape[2], *tensor.shape[2:]).contiguous()


def cut_padding(model: nn.Module, analysis: Analysis, choice: Choice) -> None:
    """Let modules that pad return only the positions that are kept, in a pruned copy."""
    for padding in analysis.trace.paddings:
        module = model.get_submodule(padding.module)
        own, gone = padding.own.numpy(), choice.removed[padding.labels.numpy()]
        hook = kept_channels(module)
        before = np.ones(len(own), bool)
        if hook is not None:
            before = np.isin(np.arange(len(own)), hook.kept)
        if padding.returned and (hook is not None or (gone & own).any()):
            left = (before & ~gone)[own | ~gone]  # of the positions that it did not add, the removed ones are gone already
            keep_channels(module, padding.dim, np.flatnonzero(left).tolist())
