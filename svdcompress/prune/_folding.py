"""Folds constants of removed units into the bias of the layers that read them, or onto inputs that carry them.

Nothing is written into a parameter's memory, which may be the given model's: parameters get new tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from svdcompress.layers import VariationalLayer
from svdcompress.prune._choice import BIAS, Choice, Consumer
from svdcompress.prune._trace import Use
from svdcompress.prune._units import Parameter


def foldable(model: nn.Module, use: Use) -> bool:
    """Whether the module of this use has a bias that no other module shares, or can be given one, to fold a constant into."""
    if use.owner is None:
        return False
    module = model.get_submodule(use.owner)
    bias = getattr(module, "bias", None)
    if bias is None:
        return isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
    holders = {id(other) for other in model.modules() for own in other._parameters.values() if own is bias}
    return isinstance(bias, nn.Parameter) and len(holders) == 1


def holders(model: nn.Module, parameter: Parameter) -> Iterator[tuple[nn.Module, str]]:
    """The modules of a model that hold a traced parameter, each once, and the name by which they hold it."""
    return ((module, key) for _, module, key in named_holders(model, parameter))


def named_holders(model: nn.Module, parameter: Parameter) -> Iterator[tuple[str, nn.Module, str]]:
    """Like `holders`, with the first name of each module in front."""
    seen = set()
    for name in parameter.names:
        prefix, _, key = name.rpartition(".")
        module = model.get_submodule(prefix)
        if (id(module), key) not in seen:
            seen.add((id(module), key))
            yield prefix, module, key


def oriented(consumer: Consumer, tensor: Tensor) -> Tensor:
    """A tensor of a weight's shape viewed as (groups, outputs, inputs, positions), in the parameter's own order."""
    parameter = consumer.parameter
    if tensor.dim() == 2 and not parameter.grouped:
        first = int(consumer.outs.flat[0])
        turned = not parameter.axes[0] <= first < parameter.axes[0] + parameter.sizes[0]
        return (tensor.T if turned else tensor)[None, :, :, None]
    return parameter.canonical(tensor)


def fold(model: nn.Module, consumer: Consumer, choice: Choice, carriers: dict[int, tuple[int, float]]) -> nn.Module | None:
    """Fold the constants of removed inputs into the bias of a consumer, or onto the inputs that carry them.

    Returns the module if it had to be given a bias.

    If a weight of the consumer has the variance s, a constant k adds k^2 s to the output's variance: the bias takes that over.
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
    """Mean and variance (None in a plain layer) of a group's weights, (outputs, inputs at `at`, positions), in double
    precision; those outside the mask are 0."""
    mean = oriented(consumer, getattr(module, key).detach())[group][:, at].double()
    if not isinstance(module, VariationalLayer):
        return mean, None
    mask = oriented(consumer, module.relevant())[group][:, at]
    return mean * mask, oriented(consumer, module.log_sigma2.detach())[group][:, at].double().exp() * mask


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
    """Let carriers take over constants. write: whether to change the weight (a tied weight only once), or only its mask."""
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
            least = 1e-38  # close to the least normal float32; the log of a variance 0 is then finite
            new = torch.einsum("oik,i->ok", variance, ratios.square()).clamp_min(least).log().to(noise.dtype)
            noise[group, :, c] = torch.where(column, new, noise[group, :, c])


def _place(consumer: Consumer, j: int) -> tuple[int, int]:
    """The group of an input, and its index within the group, in the weight's own order."""
    per_group = consumer.ins.shape[1]
    if len(consumer.ins) > 1:
        return j // per_group, j % per_group
    slot = int(consumer.ins.flat[j])
    axes = zip(consumer.parameter.axes, consumer.parameter.sizes, strict=True)
    return 0, next(slot - first for first, size in axes if first <= slot < first + size)
