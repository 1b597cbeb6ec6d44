"""Weights that are divided among processes."""

from __future__ import annotations

from torch import nn

from svdcompress.errors import UsageError
from svdcompress.layers._base import variational_layers

WHOLE = "train with DistributedDataParallel, where each process holds whole layers"
"""What works in place of divided weights."""


def check_whole(model: nn.Module) -> None:
    """Raise UsageError if the weights of a variational layer are divided among processes (FSDP, tensor parallelism): relevance
    and the KL are decided on whole layers."""
    for name, layer in variational_layers(model):
        managed = getattr(layer, "_is_fsdp_managed_module", False)  # set by both kinds of torch's FSDP
        if managed or any(hasattr(part, "full_tensor") for part in layer._parameters.values()):  # a DTensor
            raise UsageError(
                f"{name}: its weights are divided among processes (FSDP or tensor parallelism), but the KL and relevance need "
                f"whole layers; {WHOLE}"
            )
