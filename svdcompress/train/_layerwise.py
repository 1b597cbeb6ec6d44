"""Each layer's outputs compared with the teacher's, on the units that a pruned student still has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from svdcompress.layers import variational_layers

NORMS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
"""Layers whose outputs keep their scale in training; the outputs of the layers before them need not."""

CONSTANT = 1e-6
"""Outputs whose variance is less than this part of their mean square count as constant, and their error as 0."""


class Layerwise:
    """Compares the outputs of layers in a student and its teacher (Romero et al. 2015, arXiv 1412.6550, eq. 3, for every layer;
    without its regressors, as it is known which of the teacher's units each of the student's is).

    The outputs of normalization layers are compared if the student has any, otherwise those of its converted layers except the
    last one, whose outputs the loss sees. Layers that run several times in a pass are left out.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module, outputs_kept: Mapping[str, Sequence[int]]) -> None:
        modules = dict(teacher.named_modules())
        norms = [name for name, module in student.named_modules() if isinstance(module, NORMS)]
        names = [name for name in norms or [name for name, _ in variational_layers(student)] if name in modules]
        self._kept = {name: torch.tensor(outputs_kept[name]) if name in outputs_kept else None for name in names}
        self._all_but_last = not norms
        self._own: dict[str, list[Tensor]] = {}
        self._wanted: dict[str, list[Tensor]] = {}
        self._dims: dict[str, int] = {}
        self._asked, self._seen, self._alike = False, 0, 0  # layers of the last pass, and those of them that could be compared
        self._handles = []
        for name in names:
            module = student.get_submodule(name)
            self._dims[name] = _dim(module)
            self._handles.append(module.register_forward_hook(self._note(self._own, name, learns=True)))
            self._handles.append(modules[name].register_forward_hook(self._note(self._wanted, name, learns=False)))

    def clear(self) -> None:
        """Forget the outputs of a pass."""
        self._own.clear()
        self._wanted.clear()

    def close(self) -> None:
        """Remove the hooks from both models."""
        self.clear()
        for handle in self._handles:
            handle.remove()

    def error(self) -> Tensor | None:
        """Mean over the layers of the squared error, relative to the variance of the teacher's outputs over a batch; None if no
        layer could be compared. Forgets the outputs of the pass."""
        self._asked = self._asked or torch.is_grad_enabled()
        if not self._own:
            self.clear()
            return None
        names, errors = list(self._own), []
        names = names[:-1] if self._all_but_last else names
        for name in names:
            if not len(self._own[name]) == 1 == len(self._wanted.get(name, ())):
                continue
            own, wanted, dim = self._own[name][0], self._wanted[name][0], self._dims[name]
            kept = self._kept[name]
            if kept is not None:
                self._kept[name] = kept = kept.to(wanted.device)
                wanted = wanted.index_select(dim, kept)
            if own.shape == wanted.shape:
                errors.append(_relative(own.float(), wanted.float(), dim))
        self._seen, self._alike = len(names), len(errors)
        self.clear()
        return torch.stack(errors).mean() if errors else None

    def missing(self) -> str | None:
        """A message if fewer than half of the layers were compared; None otherwise."""
        if not self._asked or (self._alike and 2 * self._alike >= self._seen):
            return None
        return (
            f"distill.layers: {self._alike} of {self._seen} layers could be compared with the dense network's, so it changed "
            "little or nothing (the others run several times, or it is not known which of the dense units they have)"
        )

    def _note(self, into: dict[str, list[Tensor]], name: str, learns: bool) -> Any:
        def hook(module: nn.Module, given: Any, output: Any) -> None:
            if isinstance(output, Tensor) and torch.is_grad_enabled() == learns:
                into.setdefault(name, []).append(output)

        return hook


def _dim(module: nn.Module) -> int:
    """The dimension of a module's outputs that its units lie along."""
    return -1 if isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.Linear) else 1


def _relative(own: Tensor, wanted: Tensor, dim: int) -> Tensor:
    others = [d for d in range(wanted.dim()) if d != dim % wanted.dim()]
    spread, size = wanted.var(others, correction=0).mean(), wanted.square().mean()
    return (own - wanted).square().mean() / spread.where(spread > CONSTANT * size, torch.inf)
