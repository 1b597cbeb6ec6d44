"""The argument of a model's factory that says how many outputs the model has."""

from __future__ import annotations

import inspect
from typing import Any

from svdcompress.errors import ModelError, SvdcError
from svdcompress.recipe import ModelSection
from svdcompress.sources._names import import_name, is_python_name
from svdcompress.sources._nets import NETS

USUAL = ("num_classes", "num_labels", "n_classes", "nclasses", "classes", "num_outputs", "n_outputs", "outputs", "out_features",
         "out_channels", "output_dim", "out_dim", "n_out", "labels")  # fmt: skip
"""Common names of such an argument, the most common first."""


def outputs_argument(section: ModelSection, outputs: int) -> str | None:
    """The argument's name in the factory's signature: one of `USUAL`, else the only one whose value is `outputs`; or None."""
    kind, _, rest = str(section.name).partition(":")
    if kind == "hf":
        return "num_labels"
    if kind in ("torchvision", "timm") and rest:
        return "num_classes"
    parameters = _parameters(str(section.name))
    values = {name: section.args.get(name, each.default) for name, each in parameters.items()}
    usual = [name for name in USUAL if name in values]
    there = [name for name, value in values.items() if type(value) is int and value == outputs]
    found = [name for name in usual if name in there] + usual + (there if len(there) == 1 else [])
    return found[0] if found else None


def _parameters(name: str) -> dict[str, Any]:
    try:
        factory = NETS[name] if name in NETS else import_name(name, ModelError, "model") if is_python_name(name) else None
        return dict(inspect.signature(factory).parameters) if callable(factory) else {}
    except (SvdcError, TypeError, ValueError):
        return {}


def outputs_hint(section: ModelSection, outputs: int, wanted: int) -> str:
    """Advice for a model that has `outputs` outputs where `wanted` are needed."""
    name = outputs_argument(section, outputs)
    if section.name == "mlp":
        sizes = [*section.args.get("sizes", (64, 300, 100, 10))[:-1], wanted]
        return f"add --model-arg 'sizes={sizes}'"
    return f"add --model-arg {name}={wanted}" if name else f"let {section.name} make a model with {wanted} outputs"
