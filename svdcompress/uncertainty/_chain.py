"""Whether a model treats each row of a batch by itself: read from its modules, so that the answer is the same at each call.

Only chains (nn.Sequential) of known modules qualify. What a custom `forward` does to a batch cannot be told by trying a few
inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from svdcompress.layers import HOOKS, VARIATIONAL_CLASSES, BernoulliDropout, GaussianDropout, VariationalLinear, weight_of

ELEMENTWISE = {
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus),
    *(nn.Softsign, nn.Sigmoid, nn.LogSigmoid, nn.Tanh, nn.Tanhshrink, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid),
    *(nn.Softshrink, nn.Hardshrink, nn.Threshold, nn.Identity, BernoulliDropout, GaussianDropout),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout),  # in eval()
}
CONVOLUTIONS = {nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d}
POOLINGS = {
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
}
OTHERS = {nn.Linear, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.ZeroPad2d, nn.Upsample, nn.PixelShuffle}
KNOWN = ELEMENTWISE | CONVOLUTIONS | POOLINGS | OTHERS | {nn.Sequential}
CONDITIONS: dict[type[nn.Module], Callable[[Any], bool]] = {
    nn.BatchNorm1d: lambda layer: layer.running_mean is not None,
    nn.BatchNorm2d: lambda layer: layer.running_mean is not None,
    nn.BatchNorm3d: lambda layer: layer.running_mean is not None,
    nn.Flatten: lambda layer: layer.start_dim >= 1,
    nn.Unflatten: lambda layer: isinstance(layer.dim, int) and layer.dim >= 1,
    nn.Softmax: lambda layer: layer.dim is not None and (layer.dim >= 1 or layer.dim == -1),
    nn.LogSoftmax: lambda layer: layer.dim is not None and (layer.dim >= 1 or layer.dim == -1),
    nn.Embedding: lambda layer: layer.max_norm is None,
}
FLAT = ELEMENTWISE | {nn.Linear, VariationalLinear, nn.Flatten, nn.BatchNorm1d, nn.LayerNorm, nn.Sequential}
"""Modules whose output size is known without running them."""


def rowwise(model: nn.Module, x: Any) -> bool:
    """Whether a model in `eval()` is a chain of modules that all treat each row of a batch x by itself."""
    if not isinstance(x, Tensor) or x.dim() < 2:
        return False
    return all(_is_known(module, x.dim()) for module in model.modules())


def _is_known(module: Any, rank: int) -> bool:
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    if any(hook not in HOOKS for hook in hooks) or "forward" in vars(module):
        return False
    kind = type(module)
    convolution = getattr(kind, "dense_class", kind) in CONVOLUTIONS
    if convolution and len(module.kernel_size) == rank - 1:  # it would take x for a single input without a batch dimension
        return False
    if kind in KNOWN or kind in VARIATIONAL_CLASSES.values():
        return True
    return kind in CONDITIONS and CONDITIONS[kind](module)


def width(model: nn.Module, x: Any, size: int) -> int | None:
    """Numbers per input in the widest output of a chain's modules, for `size` inputs x; None if only a pass could tell."""
    modules: list[Any] = list(model.modules())
    if any(type(module) not in FLAT for module in modules):
        return None
    numbers, widest = x.numel() // size, 1
    for module in modules:
        if isinstance(module, nn.Linear):
            numbers = max(1, numbers // module.in_features) * module.out_features
        if not isinstance(module, nn.Sequential):
            widest = max(widest, numbers)
    return widest


def once(model: nn.Module, x: Any) -> bool:
    """Whether a chain is known, without running it, to use each weight once per row: Linear layers on rows of numbers."""
    modules: list[Any] = [module for _, module in model.named_modules(remove_duplicate=False)]
    if x.dim() != 2 or any(type(module) not in FLAT for module in modules):
        return False
    weights = [weight_of(module) for module in modules if isinstance(module, VariationalLinear)]
    return len(weights) == len(set(weights))
