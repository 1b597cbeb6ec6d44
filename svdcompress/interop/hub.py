"""Saves models of your own class to the Hugging Face hub and loads them, with huggingface_hub's mixin."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from huggingface_hub import ModelHubMixin, hf_hub_download

from svdcompress import checkpoint
from svdcompress.errors import ModelError

FILE = "model.safetensors"


class HubMixin(ModelHubMixin, library_name="svdcompress", tags=["svdcompress", "pruning", "uncertainty"]):
    """Gives a model class `save_pretrained`, `push_to_hub` and `from_pretrained`, for dense, converted and pruned models.

    Arguments of the class's `__init__` go into config.json, parameters and the manifest into model.safetensors, so that
    `from_pretrained` builds a fresh model with the same arguments and loads what pruning left of it, exact to the bit. No
    pickle, and no code from the hub: the class is the caller's own. The arguments have to be JSON-able.

    `from_pretrained` returns the model in `eval()`. It raises CheckpointError for a file that is damaged or made for another
    class, ModelError for a class that is not a torch.nn.Module; `push_to_hub` and downloads raise what huggingface_hub
    raises.

    Example:
        >>> from svdcompress.interop.hub import HubMixin
        >>> class Net(HubMixin, torch.nn.Module):
        ...     def __init__(self, width: int = 16):
        ...         super().__init__()
        ...         self.body = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 3))
        ...
        ...     def forward(self, x):
        ...         return self.body(x)
        >>> small = svdc.prune(svdc.convert(Net(width=32)).eval(), torch.randn(2, 8))
        >>> small.save_pretrained("my-net")  # or small.push_to_hub("me/my-net")
        >>> again = Net.from_pretrained("my-net")  # or "me/my-net"
    """

    def _save_pretrained(self, save_directory: Path) -> None:
        checkpoint.save(self, save_directory / FILE)  # type: ignore[arg-type]

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        revision: str | None,
        cache_dir: str | Path | None,
        force_download: bool,
        local_files_only: bool,
        token: str | bool | None,
        **model_kwargs: Any,
    ) -> Any:
        import torch

        if not issubclass(cls, torch.nn.Module):
            raise ModelError(
                f"{cls.__name__}: a class for the hub must also be a torch.nn.Module: class {cls.__name__}(HubMixin, nn.Module)"
            )
        if os.path.isdir(model_id):
            path = os.path.join(model_id, FILE)
        else:
            path = hf_hub_download(
                model_id,
                FILE,
                revision=revision,
                cache_dir=cache_dir,
                force_download=force_download,
                token=token,
                local_files_only=local_files_only,
            )
        return checkpoint.load(path, cls(**model_kwargs)).eval()
