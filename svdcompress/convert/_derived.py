"""Turns layers whose weight is computed from other tensors in each forward pass into plain ones, exactly in `eval()`.

These are torch's parametrizations (weight_norm, spectral_norm, orthogonal), the older hooks of weight_norm, spectral_norm and
torch.nn.utils.prune, and classes whose own forward does so, such as weight-standardized convolutions.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm, remove_spectral_norm
from torch.nn.utils.weight_norm import WeightNorm, remove_weight_norm
from torch.overrides import TorchFunctionMode

from svdcompress.convert._undo import unchanged_on_error
from svdcompress.layers import changes, known_class, variational_class

OWN = ("weight", "bias")
FUNCTIONS = frozenset(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)) | {"linear"}
ABOUT = ("__dict__", "__weakref__")
MARK = "derived_from"
"""The attribute of a folded layer that says what it was."""

HOOKS: dict[type, str] = {WeightNorm: "weight_norm", SpectralNorm: "spectral_norm", prune.BasePruningMethod: "pruned"}


def derivation(module: nn.Module) -> str:
    """How a layer computes its weight in each forward pass, if `fold` can make a plain layer of it; otherwise "".

    A class with a forward of its own is tried out: a copy runs on inputs of two sizes.
    """
    kind: Any = parametrize.type_before_parametrizations(module)
    if parametrize.is_parametrized(module):
        parts: Any = module.parametrizations
        inside = ", ".join(type(part).__name__.strip("_") for name in parts for part in parts[name])
        return f"{inside} (torch.nn.utils.parametrize)" if set(parts) <= set(OWN) and variational_class(kind) else ""
    hooks = _hooks(module)
    if hooks:
        plain = variational_class(kind) and all(name in OWN for _, name in hooks)
        return (
            ", ".join(next(word for base, word in HOOKS.items() if isinstance(hook, base)) for hook, _ in hooks)
            if plain
            else ""
        )
    if "forward" in changes(kind) and set(changes(kind)) <= {"forward", "_conv_forward"}:
        return f"the forward of {kind.__name__}" if _computed(module) is not None else ""
    return ""


def fold(module: nn.Module) -> None:
    """Compute the weight of such a layer once, as in `eval()`, and make a plain layer of it, in place.

    Its class becomes the one before the parametrization, or the known class whose map its forward computes.
    """
    how = derivation(module)
    wanted = any(p.requires_grad for name, p in module.named_parameters() if "bias" not in name)
    if parametrize.is_parametrized(module):
        parts: Any = module.parametrizations
        parts.eval()
        kind: Any = type(module)  # torch deletes properties of the class, but copies of the module share it
        module.__class__ = type(kind.__name__, kind.__bases__, {k: v for k, v in vars(kind).items() if k not in ABOUT})
        for name in list(parts):
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    elif _hooks(module):
        for hook, name in _hooks(module):
            if isinstance(hook, WeightNorm):
                remove_weight_norm(module, name)
            elif isinstance(hook, SpectralNorm):
                remove_spectral_norm(module, name)
            else:
                prune.remove(module, name)
    else:
        found = _computed(module)
        assert found is not None, "asked for a layer that has no derivation"
        _become_plain(module, *found)
    _own_tensors(module, wanted)
    setattr(module, MARK, how)


def fold_all(modules: Iterable[nn.Module]) -> None:
    """`fold` all of these modules, or none if one fails."""
    wanted = list(modules)
    with unchanged_on_error(nn.ModuleList(wanted)):
        for module in wanted:
            fold(module)


def fold_like(module: nn.Module, how: str, bias: bool) -> None:
    """Give a layer of a fresh model the form that `fold` leaves, in place; its values come from a file.

    how: what the layer was. bias: whether the file has one. Raises ValueError for a layer of another kind.
    """
    if parametrize.is_parametrized(module) or _hooks(module):
        fold(module)
    elif "forward" in changes(type(module)) and isinstance(module._parameters.get("weight"), Tensor):
        weight: Any = module.weight
        old = module._parameters.get("bias")
        _become_plain(module, weight, (weight.new_zeros(0) if old is None else old) if bias else None)
        _own_tensors(module, weight.requires_grad)
    elif known_class(type(module)) is None or getattr(module, MARK, how) != how:
        raise ValueError(f"{type(module).__name__} is not a folded layer ({how})")
    setattr(module, MARK, how)


def folded(model: nn.Module) -> dict[str, str]:
    """{name: what it was} of the layers of a model that `fold` made plain."""
    return {name: how for name, module in model.named_modules() if (how := vars(module).get(MARK))}


def _hooks(module: nn.Module) -> list[tuple[Any, str]]:
    """Hooks of the older kind: (hook, name of the tensor that it computes)."""
    hooks: list[Any] = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, tuple(HOOKS))]
    return [(hook, str(getattr(hook, "name", None) or getattr(hook, "_tensor_name", ""))) for hook in hooks]


def _become_plain(module: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
    for names in (module._parameters, module._buffers, module._modules):
        names.clear()
    for name in OWN:
        module.__dict__.pop(name, None)
    module.__class__ = known_class(type(module)) or type(module)
    module._parameters["weight"] = nn.Parameter(weight.detach().clone())
    module._parameters["bias"] = None if bias is None else nn.Parameter(bias.detach().clone())


def _own_tensors(module: nn.Module, requires_grad: bool) -> None:
    """Make weight and bias contiguous parameters of the module. requires_grad: of the weight."""
    for name in OWN:
        tensor = getattr(module, name, None)
        if isinstance(tensor, Tensor):
            if not isinstance(tensor, nn.Parameter):
                module.__dict__.pop(name, None)
                module._buffers.pop(name, None)
                tensor = nn.Parameter(tensor.detach().clone())
                module.register_parameter(name, tensor)
            tensor.data = tensor.data.contiguous()
            if name == "weight":
                tensor.requires_grad_(requires_grad)


# A forward of its own


class _Capture(TorchFunctionMode):
    """Records weight and bias of each linear map that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Tensor, Tensor | None]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in FUNCTIONS:
            given: dict[str, Any] = dict(zip(("input", *OWN), args, strict=False)) | kwargs
            self.found.append((given["weight"], given.get("bias")))
        return func(*args, **kwargs)


def _computed(module: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias with which a plain layer of the known class computes what the module's forward does; None if there are
    none, because the weight depends on the input or the forward does more."""
    kind: Any = known_class(type(module))
    try:
        trial = copy.deepcopy(module).eval()
        results = []
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for x in _probes(trial):
                with _Capture() as capture:
                    expected = type(trial).forward(trial, x)
                ((weight, bias),) = capture.found
                results.append((x, expected, weight, bias))
            _, _, weight, bias = results[0]
            _become_plain(trial, weight, bias)
            right = all(
                torch.equal(one[2], weight) and _same(one[3], bias) and _close(kind.forward(trial, one[0]), one[1])
                for one in results
            )
    except Exception:  # whatever a forward may raise for made-up inputs
        return None
    return (weight, bias) if right else None


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _close(found: Tensor, expected: Tensor) -> bool:
    scale = float(expected.abs().max())
    finite = bool(torch.isfinite(expected).all())
    return finite and found.shape == expected.shape and float((found - expected).abs().max()) <= 1e-6 * scale


def _probes(module: Any) -> list[Tensor]:
    """Random inputs of two sizes."""
    like = next(module.parameters())
    make = {"dtype": like.dtype, "device": like.device}
    if isinstance(module, nn.modules.conv._ConvNd):
        least = [d * (k - 1) + 1 for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return [torch.randn(2, module.in_channels, *(n + more for n in least), **make) for more in (2, 5)]
    return [torch.randn(*shape, module.in_features, **make) for shape in ((3,), (2, 4))]
