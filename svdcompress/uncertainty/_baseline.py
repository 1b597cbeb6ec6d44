"""MC dropout of a dense model, the baseline for the sparse model's uncertainty."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from svdcompress.convert import convert_dropout
from svdcompress.layers import DROPOUT_CLASSES, BernoulliDropout, variational_class

RATES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)


def dropout_baseline(dense: nn.Module, nll: Callable[[nn.Module], float]) -> tuple[nn.Module, float | None, bool]:
    """A copy of a dense model with MC dropout: (model, rate, whether the dropout was inserted).

    A model that was trained with dropout keeps its layers and rates (rate None). Otherwise dropout is inserted before each
    Linear and convolution layer but the first (or before the only one), at the rate with the lowest `nll(model)`. Dropout
    layers of rate 0, which most transformers have, do not count.
    """
    if any(type(module) in DROPOUT_CLASSES and getattr(module, "p", 0) for module in dense.modules()):
        return convert_dropout(copy.deepcopy(dense)), None, False
    best = min(RATES, key=lambda rate: nll(_with_dropout(dense, rate)))
    return _with_dropout(dense, best), best, True


def _with_dropout(dense: nn.Module, rate: float) -> nn.Module:
    model = copy.deepcopy(dense)
    layers = [module for module in model.modules() if variational_class(type(module))]
    for layer in layers[1:] or layers:
        # A submodule and a hook instead of a wrapper, so that code that reads the layer's weights still finds the layer.
        layer.add_module("mc_dropout", BernoulliDropout(rate).train(layer.training))
        layer.register_forward_pre_hook(_drop)
    return model


def _drop(layer: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return layer.mc_dropout(args[0]), *args[1:]
