"""Copies to work on: dense copies of the masked model, and copies that share memory that nobody writes to."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.convert import to_dense
from svdcompress.errors import PruneError
from svdcompress.layers import variance_parameters, variational_layers
from svdcompress.prune._tensors import tensors_in
from svdcompress.relevance import hold


def plain_copy(model: nn.Module, masks: Mapping[str, Tensor]) -> nn.Module:
    """A dense copy in `eval()` with irrelevant weights at 0.

    Raises PruneError if the model cannot be copied, or if it computes the weight of a variational layer in each forward pass.
    """
    for name, layer in variational_layers(model):
        if "weight" not in layer._parameters:  # masks and log variances would belong to a temporary tensor
            raise PruneError(
                f"{name or type(layer).__name__}: its weight has been computed from other tensors since conversion "
                "(weight_norm, another parametrization): remove that, or apply it before svdcompress.convert(model, "
                "derived='fold'), which turns it into a plain layer"
            )
    try:
        variances = {id(own): own for own in variance_parameters(model)}
        plain = full_copy(model, variances)  # variances are dropped at once, so they need no copy
    except Exception as error:
        raise PruneError(f"{type(model).__name__} cannot be copied, but pruning works on a copy ({error})") from error
    if masks:
        hold(plain, masks)
    return to_dense(plain).eval()


def is_low(model: nn.Module) -> bool:
    """Whether some of the model's parameters are in half precision, where rounding hides mistakes."""
    return any(p.is_floating_point() and p.dtype.itemsize < 4 for p in model.parameters())


def widened(model: nn.Module) -> nn.Module:
    """A dense copy of a variational model in single precision."""
    return dense_copy(model).float()


def dense_copy(model: nn.Module) -> nn.Module:
    """A dense copy of a variational model: the mean, with irrelevant weights at 0."""
    variances = {id(own): own for own in variance_parameters(model)}
    return to_dense(full_copy(model, variances))  # the variances are dropped at once, so they need no copy


def on_cpu(model: nn.Module) -> nn.Module:
    """A copy on the CPU, in its usual memory layout: a GPU's is slow there, and gives wrong results in some convolutions."""
    copied: Any = full_copy(model).cpu()
    return copied.to(memory_format=torch.contiguous_format)


def full_copy(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy. Tensors kept from an earlier forward pass are copied detached, as torch refuses to copy their graph."""
    memo = dict(memo or {})
    for module in model.modules():
        for key, value in vars(module).items():
            for tensor in tensors_in(value) if key not in ("_parameters", "_modules", "_buffers") else ():
                if not tensor.is_leaf and id(tensor) not in memo:
                    memo[id(tensor)] = tensor.detach().clone()
    return copy.deepcopy(model, memo)


def forget(model: nn.Module) -> None:
    """Make a model drop values that it derived from its weights in `eval()` and cached, as modules do when training begins."""
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    for module, mode in modes:
        module.training = mode


def sharing_copy(model: nn.Module) -> nn.Module:
    """A deep copy with parameters of its own that use the model's memory: they may be replaced, but not written to."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter:
            memo[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
    return full_copy(model, memo)


def own_memory(small: nn.Module, model: nn.Module) -> None:
    """Give the parameters of a sharing copy memory of their own if they still use the model's; in place."""
    taken = {tensor.untyped_storage()._cdata for tensor in model.parameters()}
    for parameter in small.parameters():
        if parameter.untyped_storage()._cdata in taken:
            parameter.data = parameter.data.clone()


def torn(model: nn.Module, plain: nn.Module) -> dict[str, str]:
    """{layer: why it is kept} for layers whose weight is tied in the model and not in the plain copy."""
    tied: dict[int, set[int]] = {}
    owners: dict[int, list[str]] = {}
    other = dict(plain.named_modules())
    for name, layer in variational_layers(model):
        tied.setdefault(id(layer.weight), set()).add(id(other[name].weight))
        owners.setdefault(id(layer.weight), []).append(name)
    names = [name for key, found in tied.items() if len(found) > 1 for name in owners[key]]
    return dict.fromkeys(names, "its weight is tied to another layer's, which has another mask")
