"""Dense layers to variational ones and back, in place; and the plan of what is touched and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from svdcompress.errors import ModelError
from svdcompress.layers import (
    DEFAULT_LOG_SIGMA2,
    DEFAULT_THRESHOLD,
    DROPOUT_CLASSES,
    VARIATIONAL_CLASSES,
    BernoulliDropout,
    GaussianDropout,
    Share,
    Threshold,
    VariationalLayer,
    check_prior,
    check_variance_dtype,
    parse_share,
    parse_threshold,
    register_loaded,
    start_at,
)


@dataclass(frozen=True)
class PlanEntry:
    """What conversion does with one module.

    name: its dotted name. kind: its class. converted: whether it is touched. reason: why not ("" if it is).
    parameters: numbers in its weight (0 where it has none).
    """

    name: str
    kind: str
    converted: bool
    reason: str
    parameters: int


def plan(model: nn.Module, include: Sequence[str] = ("*",), exclude: Sequence[str] = ()) -> list[PlanEntry]:
    """What `convert` would do with each module that has parameters of its own, in the model's order.

    Raises ModelError for a pattern that matches no module.
    """
    return [entry for entry, _ in _entries(model, _patterns(include), _patterns(exclude))]


def convert(
    model: nn.Module,
    *,
    prior: str = "ard",
    share: Share = "weight",
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    log_sigma2: float = DEFAULT_LOG_SIGMA2,
    log_alpha: float | None = None,
    threshold: Threshold = DEFAULT_THRESHOLD,
    variance_dtype: str = "auto",
) -> nn.Module:
    """Turn Linear and convolution layers into variational ones, in place; returns the model.

    Weights are kept bit for bit, and parameters, hooks and module objects stay the same ones (an optimizer made before
    knows nothing of the new `log_sigma2`). Tied layers are converted once and stay tied.

    prior: "ard" (Kharitonov et al. 2018) or "log-uniform" (Molchanov et al. 2017).
    share: who shares a prior variance: "weight", "input", "output", "layer", a list of them (equal parts), or {name: part}.
    include, exclude: fnmatch patterns on dotted module names; a layer is converted if one of `include` and none of
        `exclude` matches it (any of its names, where a module has several).
    log_sigma2: where every log variance starts: near -10 for small nets, -15 for large pretrained ones.
    log_alpha: where log alpha of a layer's root-mean-square weight starts, in place of `log_sigma2`: each layer has noise in
        proportion to its weights, at -6 of 5% of them, whatever their scale.
    threshold: limit on log alpha, from which a weight is irrelevant in `eval()`; one number or {share: limit}.
    variance_dtype: precision of the variances' computation: "float32", "bfloat16", or "auto" for bfloat16 where the chip is
        fast at it and the layer large enough to gain.

    Raises ModelError if a pattern matches no module, if nothing is left to convert, or for an unknown prior or share;
    the model is then as it was.
    """
    check_prior(prior)
    check_variance_dtype(variance_dtype)
    share, threshold = parse_share(share), parse_threshold(threshold)
    entries = _entries(model, _patterns(include), _patterns(exclude))
    chosen = [(entry, module) for entry, module in entries if entry.converted]
    if not chosen and not any(isinstance(module, VariationalLayer) for module in model.modules()):
        reasons = "; ".join(f"{entry.name}: {entry.reason}" for entry, _ in entries[:8]) or "it has no layers"
        raise ModelError(f"nothing to convert in {type(model).__name__} ({reasons})")
    # One log_sigma2 for each weight, so that tied weights keep one posterior.
    shared: dict[int, Any] = {id(layer.weight): layer.log_sigma2 for _, layer in variational_layers(model)}
    module: Any
    for _, module in chosen:
        start = shared.get(id(module.weight), log_sigma2 if log_alpha is None else start_at(module.weight, log_alpha))
        layer = VARIATIONAL_CLASSES[type(module)].from_dense(
            module, prior=prior, share=share, log_sigma2=start, threshold=threshold, variance_dtype=variance_dtype
        )
        shared[id(layer.weight)] = layer.log_sigma2
    leave_fused_paths(model)
    return model


def to_dense(model: nn.Module) -> nn.Module:
    """Turn every variational layer back into its torch.nn class, in place: the mean, with irrelevant weights at 0."""
    layers = [layer for _, layer in variational_layers(model)]
    for layer, keep in [(layer, layer.relevant()) for layer in layers]:
        layer.mask = keep  # decided for all before any weight changes: tied layers would see each other's zeros
        layer.to_dense()
    return model


def convert_dropout(model: nn.Module, p: float | None = None, gaussian: bool = False) -> nn.Module:
    """Turn torch's dropout layers into MC-dropout ones that obey `sampling`, in place; returns the model.

    p: a rate for all of them (None: each keeps its own). gaussian: multiplicative Gaussian noise of the same variance.
    Raises ModelError if the model has no dropout layer.
    """
    kind = GaussianDropout if gaussian else BernoulliDropout
    made: dict[nn.Module, nn.Module] = {}  # one object under several names stays one
    for parent in list(model.modules()):
        child: Any
        for name, child in list(parent._modules.items()):  # named_children would give each object once only
            if type(child) in DROPOUT_CLASSES:
                if child not in made:
                    layer = kind(child.p if p is None else p, channels=DROPOUT_CLASSES[type(child)])
                    made[child] = layer.train(child.training)
                setattr(parent, name, made[child])
    if not made:
        raise ModelError(f"{type(model).__name__} has no dropout layer (torch.nn.Dropout, Dropout1d, Dropout2d or Dropout3d)")
    return model


def variational_layers(model: nn.Module) -> Iterator[tuple[str, VariationalLayer]]:
    """Name and layer of each variational layer, each object once."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, VariationalLayer))


def leave_fused_paths(model: nn.Module) -> None:
    """Keep torch's transformer encoder from its fused inference path, which reads the weights past our layers."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _patterns(patterns: str | Sequence[str]) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _entries(model: nn.Module, include: list[str], exclude: list[str]) -> list[tuple[PlanEntry, nn.Module]]:
    register_loaded()
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for field, patterns in (("include", include), ("exclude", exclude)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                known = ", ".join([n for n in names if n][:12])
                raise ModelError(f"{field}: {pattern!r} matches no module of {type(model).__name__}; there are {known} ...")
    attention = tuple(name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention))
    aliases: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        aliases.setdefault(module, []).append(name)
    reasons = {m: _why_not(names, m, include, exclude, attention) for m, names in aliases.items() if _own_parameters(m)}
    ties = _broken_ties(model, {module for module, reason in reasons.items() if not reason})
    entries = []
    for name, module in model.named_modules(remove_duplicate=False):
        if module in reasons:
            reason = ties.get(module, reasons[module])
            if name != aliases[module][0]:
                reason = f"shared with another module: it is {aliases[module][0]!r} too"
            weight = getattr(module, "weight", None)
            numbers = weight.numel() if isinstance(weight, Tensor) and not isinstance(weight, UninitializedParameter) else 0
            entries.append((PlanEntry(name, type(module).__name__, not reason, reason, numbers), module))
    return entries


def _own_parameters(module: nn.Module) -> int:
    own = sum(1 for _ in module.parameters(recurse=False))
    return own + parametrize.is_parametrized(module)


def _broken_ties(model: nn.Module, chosen: set[nn.Module]) -> dict[nn.Module, str]:
    """Chosen modules whose weight is also that of a module which stays as it is, with the reason to leave them alone.

    The other module would read the weight without its mask, and its noise would be missing.
    """
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((name, module))
    reasons = {}
    for module in chosen:
        for other, owner in owners[id(module.weight)]:
            same = owner.dense_class if isinstance(owner, VariationalLayer) else type(owner) if owner in chosen else None
            if same is not type(module):
                reasons[module] = f"shared with another module: its weight is also that of {other!r}, which stays dense"
    return reasons


def _why_not(names: list[str], module: nn.Module, include: list[str], exclude: list[str], attention: tuple[str, ...]) -> str:
    """Why a module is skipped, by its own nature and names; "" if it is to be converted."""
    if isinstance(module, VariationalLayer):
        return "already converted"
    inside = next((p for p in attention for name in names if name != p and name.startswith(f"{p}." if p else "")), None)
    if inside is not None:
        return f"inside MultiheadAttention {inside!r}, which reads its weights past its layers"
    if parametrize.is_parametrized(module):
        return "parametrised (torch.nn.utils.parametrize): remove the parametrisation first"
    if "weight_g" in module._parameters or "weight_orig" in module._parameters:
        return "weight-normed or pruned by torch.nn.utils hooks: remove them first"
    if isinstance(module, LazyModuleMixin):
        return "lazy: run the model once first"
    if type(module) not in VARIATIONAL_CLASSES:
        return f"not a type we know: {type(module).__name__}"
    if not any(fnmatchcase(name, pattern) for pattern in include for name in names):
        return "excluded: no include pattern matches"
    if any(fnmatchcase(name, pattern) for pattern in exclude for name in names):
        return "excluded"
    return ""
