"""Models with pruned inputs behind the interface of a model that takes all inputs."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress import cost
from svdcompress.convert import to_dense
from svdcompress.export import Exported
from svdcompress.hooks import hooked
from svdcompress.likelihoods import likelihood_of, set_likelihood


class Select(nn.Module):
    """Takes whole inputs and passes on those that the model still reads.

    index: the inputs to pass on, along dimension `dim`. In ONNX this is one Gather, so callers need not know about it.
    """

    index: Tensor

    def __init__(self, model: nn.Module, index: list[int], dim: int) -> None:
        super().__init__()
        self.model = model
        self.dim = dim
        self.register_buffer("index", torch.tensor(index), persistent=False)

    def forward(self, x: Tensor) -> Any:
        return self.model(x.index_select(self.dim, self.index))


def whole(model: nn.Module, pruning: Mapping[str, Any]) -> nn.Module:
    """A pruned model that takes whole inputs: itself, unless pruning removed inputs (`pruning`: its report as a dict)."""
    kept = pruning.get("inputs_kept")
    if kept is None:
        return model
    return set_likelihood(Select(model, list(kept), int(pruning.get("inputs_dim") or 1)), likelihood_of(model))


def bare(model: nn.Module) -> nn.Module:
    """The model itself, as a checkpoint holds it."""
    return model.model if isinstance(model, Select) else model


def widened(model: Select, inputs: Tensor) -> nn.Module | None:
    """The model of the posterior means without the selection: the layers that read the inputs get weights of 0 for those that
    were dropped.

    None if anything but Linear layers and ungrouped convolutions reads them, which a comparison on other inputs shows.
    """
    wide: Any = to_dense(copy.deepcopy(model.model).cpu()).eval()
    selected = inputs.cpu().index_select(model.dim, model.index.cpu())
    readers: list[nn.Module] = []

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and args[0] is selected:
            readers.append(module)

    able = [module for module in wide.modules() if _reads(module, inputs, model.dim)]
    try:
        with torch.no_grad():
            with hooked(module.register_forward_pre_hook(note) for module in able):
                wide(selected)
            for reader in dict.fromkeys(readers):
                _widen(reader, model.index.cpu(), inputs.shape[model.dim])
            other = torch.randn_like(inputs, device="cpu")
            alike = torch.allclose(wide(other), copy.deepcopy(model).cpu().eval()(other), rtol=1e-4, atol=1e-5)
    except (RuntimeError, TypeError, ValueError):  # something else reads them and cannot take the other shape
        return None
    return wide if readers and alike else None


def _reads(module: nn.Module, inputs: Tensor, dim: int) -> bool:
    if isinstance(module, nn.Linear):
        return dim == inputs.dim() - 1
    return isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.groups == 1 and dim == 1


def _widen(layer: Any, index: Tensor, size: int) -> None:
    weight = layer.weight.detach()
    whole_weight = weight.new_zeros(weight.shape[0], size, *weight.shape[2:])
    layer.weight = nn.Parameter(whole_weight.index_copy_(1, index, weight))
    setattr(layer, "in_features" if isinstance(layer, nn.Linear) else "in_channels", size)


def faster(
    model: Select, inputs: Any, file: Exported, feed: Callable[[int], Any], write: Callable[[nn.Module, Path], Exported]
) -> tuple[Exported, bool]:
    """Keep the faster of two ONNX files at `file.path`; returns it, and whether it is `file`, which selects inputs (a Gather).

    Selecting inputs takes a pass over them, which may cost more than it saves. The other file reads all inputs, with weights
    of 0; it replaces `file` if it is faster over batches of 1 and 128 together. feed: as for `cost.latencies`. write: exports
    a model.
    """
    in_two_files = Path(f"{file.path}.data").exists()
    wide = widened(model, inputs) if isinstance(inputs, Tensor) and not in_two_files else None
    if wide is None:
        return file, True
    path = file.path.with_name(f"{file.path.stem}.all-inputs.onnx")
    try:
        other = write(wide, path)
        times = cost.latencies({"gather": file.path, "all": path}, feed)
        if cost.quicker(times["all"], times["gather"]):
            os.replace(path, file.path)
            return replace(other, path=file.path), False
        return file, True
    finally:
        path.unlink(missing_ok=True)
