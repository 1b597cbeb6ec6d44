"""Removing units from a model by name and index: constants folded first, then every tensor sliced once.

Nothing is written into a parameter's memory, which may be the given model's: parameters get new tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from svdcompress.layers import VariationalLayer, keep_channels, kept_channels
from svdcompress.prune._choice import BIAS, Analysis, Choice, Consumer
from svdcompress.prune._copies import forget
from svdcompress.prune._trace import Use
from svdcompress.prune._units import Parameter

NO_LENGTH = frozenset(
    (
        *("classes", "labels", "vocab", "idx", "index", "id", "step", "steps", "epoch", "seed", "layer", "layers", "depth"),
        *("stride", "kernel", "padding", "dilation", "groups", "position", "positions", "length", "len", "max", "min"),
        *("version", "patch", "window", "image", "rank", "resolution"),
    )
)
"""Parts of attributes' names that tell that an integer which happens to equal a number of units is something else."""


def foldable(model: nn.Module, use: Use) -> bool:
    """Whether the module of this use can take a constant into its bias, and nobody else's with it."""
    if use.owner is None:
        return False
    module = model.get_submodule(use.owner)
    bias = getattr(module, "bias", None)
    if bias is None:
        return isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
    holders = {id(other) for other in model.modules() for own in other._parameters.values() if own is bias}
    return isinstance(bias, nn.Parameter) and len(holders) == 1


def operate(model: nn.Module, analysis: Analysis, choice: Choice, adapt: str = "names") -> None:
    """Carry out a choice on a copy of the traced model (variational or dense), in place.

    adapt: which integer attributes follow where code holds lengths as numbers: "names" (all whose name does not speak of a
    head's own size), "heads", "every" or "none".
    """
    numbers = adapted(model, analysis, choice, adapt)  # while they are what the trace saw
    made: list[tuple[nn.Module, np.ndarray]] = []  # modules that got a bias, and which of its entries stay
    with torch.no_grad():
        for number, consumer in enumerate(analysis.consumers):
            module = fold(model, consumer, choice, choice.carriers.get(number, {}))
            if module is not None:
                made.append((module, ~choice.removed[consumer.outs.reshape(-1)]))
        done: set[int] = set()
        for parameter in analysis.trace.units.parameters:
            keep = [~choice.removed[a : a + n] for a, n in zip(parameter.axes, parameter.sizes, strict=True)]
            if not all(part.all() for part in keep):
                _slice(model, parameter, keep, done)
        for module, part in made:
            for tensor in (module.bias, getattr(module, "bias_sigma2", None)):
                if isinstance(tensor, Tensor):
                    tensor.data = tensor.data[torch.from_numpy(part).to(tensor.device)]
    cut_padding(model, analysis, choice)
    for name, attribute, value in numbers:
        setattr(model.get_submodule(name), attribute, value)
    forget(model)


def holders(model: nn.Module, parameter: Parameter) -> Iterator[tuple[nn.Module, str]]:
    """The modules of a model that hold a traced parameter, each once, and the name by which they hold it."""
    seen = set()
    for name in parameter.names:
        prefix, _, key = name.rpartition(".")
        module = model.get_submodule(prefix)
        if (id(module), key) not in seen:
            seen.add((id(module), key))
            yield module, key


# Constants


def oriented(consumer: Consumer, tensor: Tensor) -> Tensor:
    """A tensor of a weight's shape as a view (groups, outputs, inputs, positions) in the parameter's own order."""
    parameter = consumer.parameter
    if tensor.dim() == 2 and not parameter.grouped:
        first = int(consumer.outs.flat[0])
        turned = not parameter.axes[0] <= first < parameter.axes[0] + parameter.sizes[0]
        return (tensor.T if turned else tensor)[None, :, :, None]
    return parameter.canonical(tensor)


def fold(model: nn.Module, consumer: Consumer, choice: Choice, carriers: dict[int, tuple[int, float]]) -> nn.Module | None:
    """Put the constants of removed inputs into the bias of a consumer, or on the inputs that carry them.

    Returns the module if it had to be given a bias.

    Where the consumer's weights have a variance s, a constant k adds k^2 s to that of its output: the bias has it then.
    """
    ins = consumer.ins.reshape(-1)
    constants = np.where(choice.folded[ins] & (consumer.how == BIAS), consumer.values[:, 0], 0.0)
    if not constants.any() and not carriers:
        return None
    made = None
    carried: set[int] = set()  # tied weights are one tensor: it is changed once
    for module, key in holders(model, consumer.parameter):
        if carriers:
            _onto_carriers(module, key, consumer, carriers, id(getattr(module, key)) not in carried)
            carried.add(id(getattr(module, key)))
        if constants.any() and module is model.get_submodule(consumer.owner or ""):
            made = module if module.bias is None else None
            _into_bias(module, key, consumer, torch.from_numpy(constants).reshape(consumer.ins.shape))
    return made


def _moments(module: nn.Module, key: str, consumer: Consumer, group: int, at: Tensor) -> tuple[Tensor, Tensor | None]:
    """Mean and variance of the weights that live, (outputs, inputs at `at`, positions) of a group, in double precision."""
    mean = oriented(consumer, getattr(module, key).detach())[group][:, at].double()
    if not isinstance(module, VariationalLayer):
        return mean, None
    keep = oriented(consumer, module.relevant())[group][:, at]
    return mean * keep, oriented(consumer, module.log_sigma2.detach())[group][:, at].double().exp() * keep


def _into_bias(module: Any, key: str, consumer: Consumer, constants: Tensor) -> None:
    weight = getattr(module, key)
    shift = torch.zeros(consumer.outs.shape, dtype=torch.float64, device=weight.device)
    spread = torch.zeros_like(shift)
    for group, values in enumerate(constants.to(weight.device)):
        at = torch.nonzero(values).flatten()
        mean, variance = _moments(module, key, consumer, group, at)
        shift[group] = mean.sum(2) @ values[at]
        if variance is not None:
            spread[group] = variance.sum(2) @ values[at].square()
    if module.bias is None:
        module.bias = nn.Parameter(weight.new_zeros(shift.numel()), requires_grad=weight.requires_grad)
    module.bias.data = (module.bias.double() + shift.reshape(-1)).to(module.bias.dtype)
    if bool((spread > 0).any()):
        before = 0 if module.bias_sigma2 is None else module.bias_sigma2.double()
        module.bias_sigma2 = (before + spread.reshape(-1)).to(module.bias.dtype)


def _onto_carriers(module: Any, key: str, consumer: Consumer, carriers: dict[int, tuple[int, float]], write: bool) -> None:
    """write: whether the weight is to be changed, or only the mask over it (a tied weight has been changed already)."""
    by_carrier: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for j, (c, ratio) in carriers.items():
        group, place = _place(consumer, c)
        by_carrier.setdefault((group, place), []).append((_place(consumer, j)[1], ratio))
    for tensor in (getattr(module, key), getattr(module, "log_sigma2", None)):
        if isinstance(tensor, Tensor) and write:
            tensor.data = tensor.data.clone()  # the memory may be that of the given model
    weight = oriented(consumer, getattr(module, key).data)
    for (group, c), moved in by_carrier.items():
        at = torch.tensor([c, *(j for j, _ in moved)], device=weight.device)
        ratios = torch.tensor([1.0, *(ratio for _, ratio in moved)], dtype=torch.float64, device=weight.device)
        mean, variance = _moments(module, key, consumer, group, at)
        if write:
            weight[group, :, c] = torch.einsum("oik,i->ok", mean, ratios).to(weight.dtype)
        if variance is None:
            continue
        column = oriented(consumer, module.relevant())[group][:, at].any(1)
        oriented(consumer, module.mask)[group, :, c] = column
        if write:
            noise = oriented(consumer, module.log_sigma2.data)
            new = torch.einsum("oik,i->ok", variance, ratios.square()).clamp_min(1e-38).log().to(noise.dtype)
            noise[group, :, c] = torch.where(column, new, noise[group, :, c])


def _place(consumer: Consumer, j: int) -> tuple[int, int]:
    """Group and index within it of an input, in the weight's own order."""
    per_group = consumer.ins.shape[1]
    if len(consumer.ins) > 1:
        return j // per_group, j % per_group
    slot = int(consumer.ins.flat[j])
    axes = zip(consumer.parameter.axes, consumer.parameter.sizes, strict=True)
    return 0, next(slot - first for first, size in axes if first <= slot < first + size)


# Slices


def _slice(model: nn.Module, parameter: Parameter, keep: list[np.ndarray], done: set[int]) -> None:
    for module, key in holders(model, parameter):
        tensors = [getattr(module, key)]
        if isinstance(module, VariationalLayer) and key == "weight":
            tensors += [module.log_sigma2, module.mask]
        elif isinstance(module, VariationalLayer) and key == "bias":
            tensors += [module.bias_sigma2]
        for tensor in tensors:
            if tensor is not None and id(tensor) not in done:
                tensor.data = cut(parameter, tensor.data, keep)
                done.add(id(tensor))
        _note_sizes(module, key, parameter, keep)


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


def _note_sizes(module: nn.Module, key: str, parameter: Parameter, keep: list[np.ndarray]) -> None:
    """Integer attributes that tell a module's own sizes."""
    shape = tuple(getattr(module, key).shape)
    if isinstance(module, nn.Linear) and key == "weight":
        module.out_features, module.in_features = shape
    elif isinstance(module, nn.modules.conv._ConvNd) and key == "weight":
        if parameter.grouped:
            groups = keep[0].reshape(parameter.groups, -1).any(1) & keep[1].reshape(parameter.groups, -1).any(1)
            module.groups = int(groups.sum())
        first, second = shape[0], shape[1] * module.groups
        module.out_channels, module.in_channels = (second, first) if module.transposed else (first, second)
    elif isinstance(module, nn.modules.batchnorm._NormBase):
        module.num_features = shape[0]
    elif any(kind.__name__ == "Conv1D" for kind in type(module).__mro__) and key == "weight" and hasattr(module, "nx"):
        module.nx, module.nf = shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings, module.embedding_dim = shape
    elif isinstance(module, nn.PReLU):
        module.num_parameters = shape[0]
    elif not isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
        for size, part in zip(parameter.sizes, keep, strict=True):
            named = [k for k, v in vars(module).items() if type(v) is int and v == size and NO_LENGTH.isdisjoint(k.split("_"))]
            heads = [attribute for attribute in named if _counts_heads(attribute)]
            for attribute in (heads or named) if not part.all() else ():
                setattr(module, attribute, int(part.sum()))


def cut_padding(model: nn.Module, analysis: Analysis, choice: Choice) -> None:
    """Let the modules of a pruned copy return the places that stay."""
    for padding in analysis.trace.paddings:
        module = model.get_submodule(padding.module)
        own, gone = padding.own.numpy(), choice.removed[padding.labels.numpy()]
        hook = kept_channels(module)
        before = np.ones(len(own), bool)
        if hook is not None:
            before = np.isin(np.arange(len(own)), hook.kept)
        if padding.returned and (hook is not None or (gone & own).any()):
            left = (before & ~gone)[own | ~gone]  # those not of its own are not there any more
            keep_channels(module, padding.dim, np.flatnonzero(left).tolist())


# Numbers in code


def adapted(model: nn.Module, analysis: Analysis, choice: Choice, adapt: str) -> list[tuple[str, str, Any]]:
    """(module, attribute, value) for integer attributes that name a length which became shorter in a view of theirs."""
    changes: dict[tuple[str, str], Any] = {}
    if adapt == "none":
        return []
    for view in analysis.trace.views:
        removed = choice.removed[view.labels.numpy()]
        if not removed.any() or view.module is None:
            continue
        module = model.get_submodule(view.module)
        of_torch = isinstance(module, nn.Linear | nn.Embedding | nn.modules.conv._ConvNd | nn.modules.batchnorm._NormBase)
        if of_torch and (module._parameters.get("weight") is not None or any(True for _ in module.buffers())):
            continue  # told by the shapes of their own tensors
        lengths, totals = _lengths(removed, view.sizes, analysis.root[view.labels.numpy()])
        heads = {value for attribute, value in vars(module).items() if type(value) is int and _counts_heads(attribute)}
        plain = {before: after for before, after in lengths.items() if before not in heads}
        for attribute, value in vars(module).items():
            parts = set(attribute.split("_"))
            if adapt != "every" and not parts.isdisjoint(NO_LENGTH):
                continue
            own = lengths if adapt == "every" or _counts_heads(attribute) else {} if _sizes_head(attribute) else plain
            whole = isinstance(value, tuple | list) and tuple(value) == view.sizes
            shorter = _resized(value, removed) if whole else _shorter(value, {**totals, **own})
            if shorter != value and (adapt != "heads" or _counts_heads(attribute)):
                changes[view.module, attribute] = shorter
    for pieces in analysis.trace.pieces:
        parts = np.split(~choice.removed[pieces.labels.numpy()], np.cumsum(pieces.lengths)[:-1])
        old = getattr(model.get_submodule(pieces.module), pieces.attribute)
        changes[pieces.module, pieces.attribute] = type(old)(int(part.sum()) for part in parts)
    return [(name, attribute, value) for (name, attribute), value in changes.items()]


def _sizes_head(attribute: str) -> bool:
    """Whether an attribute's name is that of one head's length."""
    parts = set(attribute.split("_"))
    return "head" in parts and not parts.isdisjoint(("dim", "size")) and "all" not in parts


def _counts_heads(attribute: str) -> bool:
    """Whether an attribute's name is that of a number of heads; others of the same value are lengths of something else."""
    return "head" in attribute and not _sizes_head(attribute)


def _shorter(value: Any, lengths: dict[int, int]) -> Any:
    """An integer, or a tuple or list of them, with the lengths that changed replaced."""
    if type(value) is int:
        return lengths.get(value, value)
    if isinstance(value, tuple | list) and value and all(type(part) is int for part in value):
        parts = [lengths.get(part, part) for part in value]
        return type(value)(parts) if type(value) in (list, tuple, torch.Size) else value
    return value


def _resized(value: Any, removed: np.ndarray) -> Any:
    """A tuple or list that is a view's shape, without the indices that go: each length by its place, whatever it equals."""
    if type(value) not in (tuple, list, torch.Size):
        return value
    axes = range(removed.ndim)
    gone = [int(removed.all(axis=tuple(i for i in axes if i != d)).sum()) if removed.shape[d] > 1 else 0 for d in axes]
    return type(value)(length - less for length, less in zip(value, gone, strict=True))


def _lengths(removed: np.ndarray, sizes: tuple[int, ...], roots: np.ndarray) -> tuple[dict[int, int], dict[int, int]]:
    """{length before: after} of the dimensions from which whole indices go, and that of their product.

    Not of one along which units come again: heads that a matrix product has laid out with the batch are a length of its own.
    """
    changed, before, after = {}, 1, 1
    for d in range(removed.ndim):
        left = removed.shape[d] - int(removed.all(axis=tuple(i for i in range(removed.ndim) if i != d)).sum())
        if left != removed.shape[d] and removed.shape[d] == sizes[d]:
            lines = np.moveaxis(roots, d, 0).reshape(removed.shape[d], -1)
            if len(np.unique(lines, axis=0)) < len(lines) and bool((lines[0] == lines[len(lines) // 2]).all()):
                return {}, {}
            changed[sizes[d]] = left
        if removed.shape[d] > 1:
            before, after = before * removed.shape[d], after * left
    several = sum(size > 1 for size in removed.shape) > 1
    return changed, {before: after} if after != before and several else {}
