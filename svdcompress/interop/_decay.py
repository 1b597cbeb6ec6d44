"""Weight decay, which is meant for weights: it would pull log variances to 0, a standard deviation of 1."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

DECAYED = (
    "weight decay pulls log_sigma2 to 0, a standard deviation of 1, whatever the data say: give the variances their own "
    'optimizer group without it, {"params": svdcompress.layers.variance_parameters(model), "weight_decay": 0.0}'
)
"""The warning for cases where a callback cannot prevent this."""


def decays(optimizer: Any, parameters: Iterable[Tensor]) -> bool:
    """Whether an optimizer applies weight decay to any of these parameters."""
    ids = {id(parameter) for parameter in parameters}
    return any(group.get("weight_decay") and any(id(p) in ids for p in group["params"]) for group in optimizer.param_groups)


class WithoutDecay:
    """Exempts some parameters from an optimizer's weight decay.

    They form groups of their own during each step only, with the settings that their group has then, such as a learning rate
    that a schedule has set. So schedules, and states that are saved and loaded, only see the optimizer's own groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
        self._spared = {id(parameter): parameter for parameter in parameters}
        self._whole: list[tuple[dict[str, Any], list[Tensor]]] = []
        self._hooks = [optimizer.register_step_pre_hook(self._split), optimizer.register_step_post_hook(self._join)]

    def remove(self) -> None:
        """Let the parameters decay again."""
        for hook in self._hooks:
            hook.remove()

    def _split(self, optimizer: Any, *_: Any) -> None:
        self._join(optimizer)  # in case the last step failed
        for group in list(optimizer.param_groups):
            if not group.get("weight_decay"):
                continue
            spared = [p for p in group["params"] if id(p) in self._spared]
            if spared:
                self._whole.append((group, group["params"]))
                group["params"] = [p for p in group["params"] if id(p) not in self._spared]
                optimizer.param_groups.append({**group, "params": spared, "weight_decay": 0.0})

    def _join(self, optimizer: Any, *_: Any) -> None:
        if self._whole:
            del optimizer.param_groups[-len(self._whole) :]
        for group, parameters in self._whole:
            group["params"] = parameters
        self._whole = []
