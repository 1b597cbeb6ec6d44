"""The variational layer for each dense class: registered classes, and subclasses that compute the same."""

from __future__ import annotations

import sys
import types
from typing import Any

from torch import nn

from svdcompress.layers._base import VariationalLayer
from svdcompress.layers._conv import (
    VariationalConv1d,
    VariationalConv2d,
    VariationalConv3d,
    VariationalConvTranspose1d,
    VariationalConvTranspose2d,
    VariationalConvTranspose3d,
)
from svdcompress.layers._linear import VariationalLinear
from svdcompress.layers.posteriors import Posterior

VARIATIONAL_CLASSES: dict[type[nn.Module], type[VariationalLayer]] = {
    layer.dense_class: layer
    for layer in (
        VariationalLinear,
        VariationalConv1d,
        VariationalConv2d,
        VariationalConv3d,
        VariationalConvTranspose1d,
        VariationalConvTranspose2d,
        VariationalConvTranspose3d,
    )
}
"""The variational layer of each torch.nn class that has one; register a class here to have it converted."""

COMPUTING = {"__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__", "weight", "bias"}
"""Names that a subclass must not define itself, whatever the known class."""

HARMLESS = {"__init__", "extra_repr", "__repr__", "reset_parameters", "__setstate__"}
"""Names that a subclass may define itself although the known class has them too."""

_made: dict[tuple[type[nn.Module], type[VariationalLayer]], type[VariationalLayer] | None] = {}


def register_loaded() -> None:
    """Register the layers of imported packages: transformers' Conv1D. A model that has one has imported its package."""
    if "transformers.pytorch_utils" in sys.modules:
        from svdcompress.layers._hf import VariationalHFConv1D

        VARIATIONAL_CLASSES.setdefault(VariationalHFConv1D.dense_class, VariationalHFConv1D)


def known_class(kind: type) -> type[nn.Module] | None:
    """The registered class that a class is or derives from; None if there is none."""
    return next((base for base in kind.__mro__ if base in VARIATIONAL_CLASSES), None)


def changes(kind: type) -> list[str]:
    """Names that a subclass overrides and its known class computes with, such as `forward`; [] if it computes the same."""
    known = known_class(kind)
    if known is None or known is kind:
        return []
    of_known = {name for base in known.__mro__ if base not in nn.Module.__mro__ for name in vars(base)}
    computing = COMPUTING | {name for name in of_known if name not in HARMLESS and not _is_about_the_class(name)}
    return sorted(computing & _added(kind, known))


def clashes(module: nn.Module) -> list[str]:
    """Names that a layer of a subclass uses itself, but that its variational layer would need."""
    known = known_class(type(module))
    if known is None:
        return []
    layer = VARIATIONAL_CLASSES[known]
    needed = {name for base in layer.__mro__ if base not in known.__mro__ for name in vars(base)}
    needed |= {name for kind in Posterior.registry.values() for name in kind.parameters}
    needed |= {"mask", "bias_sigma2", "share", "threshold", "variance_dtype"}
    needed -= {name for name in vars(nn.Module) if not name.startswith("__")} | {"forward", "__init__", "transposed"}
    own = (
        _added(type(module), known) | set(vars(module)) | set(module._parameters) | set(module._buffers) | set(module._modules)
    )
    return sorted(name for name in needed & own if not _is_about_the_class(name))


def variational_class(kind: type[nn.Module]) -> type[VariationalLayer] | None:
    """The variational layer for a dense class: the registered one, or, for a subclass that computes what its known class
    does, a class made here that derives from both. None if there is none."""
    known = known_class(kind)
    if known is None or changes(kind):
        return None
    base = VARIATIONAL_CLASSES[known]
    if known is kind:
        return base
    if (kind, base) not in _made:
        about: dict[str, Any] = {
            "__doc__": f"{kind.__name__} with Gaussian weights, as {base.__name__}.",
            "__module__": kind.__module__,
            "__reduce_ex__": _reduce,  # makes it picklable although no module has it by name
            "dense_class": kind,
            "generated": True,
        }
        try:
            _made[kind, base] = types.new_class(f"Variational{kind.__name__}", (base, kind), {}, lambda own: own.update(about))
        except TypeError:  # a class whose subclasses need arguments, or whose bases conflict with ours
            _made[kind, base] = None
    return _made[kind, base]


def class_name(layer: VariationalLayer) -> str:
    """The name that files store for a layer's class: that of the registered class, also for a subclass."""
    kind = type(layer)
    return (kind.__bases__[0] if "generated" in vars(kind) else kind).__name__


def _added(kind: type, known: type) -> set[str]:
    """Names defined by a class or one of its bases, other than the known class and its bases."""
    return {name for base in kind.__mro__ if base not in known.__mro__ for name in vars(base)}


def _is_about_the_class(name: str) -> bool:
    return name.startswith("__") and name.endswith("__") and name not in COMPUTING


def _reduce(self: Any, protocol: Any) -> tuple:
    state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__  # Python 3.10 does not have it
    return _empty, (self.dense_class,), state


def _empty(kind: type[nn.Module]) -> VariationalLayer:
    found: Any = variational_class(kind)
    return found.__new__(found)
