"""The plan of a conversion: which layers become variational, and why the others do not."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from svdcompress.convert._derived import derivation
from svdcompress.convert._patterns import matches
from svdcompress.convert._reads import read_past
from svdcompress.errors import ModelError
from svdcompress.layers import VariationalLayer, changes, clashes, known_class, register_loaded, variational_class

DERIVED = ("keep", "fold")
"""What to do with layers whose weight is computed in each forward pass: leave them as they are, or make them plain."""


FOLD = "derived='fold' (convert.derived: fold) computes it once and turns the layer into a plain one, exact in eval()"


ALREADY = "already converted"

FROZEN = "but frozen (requires_grad=False): training can't drop its weights"

Filter = Callable[[nn.Module, str], bool]
"""Takes a module and its dotted name, and returns whether to convert it."""


@dataclass(frozen=True)
class PlanEntry:
    """What conversion does with one module.

    name: its dotted name. kind: its class. converted: whether it is touched. reason: why not ("" if it is).
    parameters: number of elements of its weight (0 if it has none). note: what is done to it before conversion, and whether it
        is frozen ("": nothing).
    """

    name: str
    kind: str
    converted: bool
    reason: str
    parameters: int
    note: str = ""


def plan(
    model: nn.Module,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    *,
    filter_fn: Filter | None = None,
    derived: str = "keep",
    example_inputs: Any = None,
) -> list[PlanEntry]:
    """What `convert` would do with each module that has parameters of its own, in the model's order.

    The arguments are those of `convert`; the model is not changed. Raises ModelError for a pattern that matches no module, and
    if the model cannot run on the example inputs.

    Example:
        >>> [(entry.name, entry.converted, entry.reason) for entry in svdc.plan(model)]
    """
    return [entry for entry, _ in entries(model, include, exclude, derived, example_inputs, filter_fn)]


def entries(
    model: nn.Module,
    include: str | Sequence[str],
    exclude: str | Sequence[str],
    derived: str,
    example_inputs: Any,
    filter_fn: Filter | None = None,
) -> list[tuple[PlanEntry, nn.Module]]:
    """The plan, each entry with its module."""
    if derived not in DERIVED:
        raise ModelError(f"derived: unknown {derived!r}; use one of {', '.join(DERIVED)}")
    register_loaded()
    aliases: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        aliases.setdefault(module, []).append(name)
    rules = _Rules(model, _patterns(include), _patterns(exclude), derived, filter_fn)
    reasons = {module: rules.why_not(names, module) for module, names in aliases.items() if _own_parameters(module)}
    chosen = {module for module, reason in reasons.items() if not reason}
    if example_inputs is not None and chosen:
        reads = read_past(model, example_inputs, [(aliases[module][0], module) for module in chosen])
        past = {module: reads.reason(aliases[module][0]) for module in chosen if aliases[module][0] in reads.past}
        reasons.update(past)
        chosen -= set(past)
    reasons.update(_broken_ties(model, chosen, rules.folded))
    found = []
    for name, module in model.named_modules(remove_duplicate=False):
        if module in reasons:
            reason = reasons[module]
            if name != aliases[module][0]:
                reason = f"shared with another module: it is also {aliases[module][0]!r}"
            note = [f"made plain first: its weight comes from {rules.folded[module]}"] if module in rules.folded else []
            note += [FROZEN] if _is_frozen(module) else []
            entry = PlanEntry(
                name, type(module).__name__, not reason, reason, _numbers(module), "" if reason else "; ".join(note)
            )
            found.append((entry, module))
    return found


def _is_frozen(module: nn.Module) -> bool:
    """Whether training leaves a layer's weight, or what it is computed from, as it is."""
    weight = getattr(module, "weight", None)
    own = [weight] if isinstance(weight, nn.Parameter) else list(module.parameters())
    return bool(own) and not any(parameter.requires_grad for parameter in own)


def _patterns(patterns: str | Sequence[str]) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _own_parameters(module: nn.Module) -> int:
    own = sum(1 for _ in module.parameters(recurse=False))
    return own + parametrize.is_parametrized(module)


def _numbers(module: nn.Module) -> int:
    """The number of elements of a module's weight; a parametrized weight is not computed for it."""
    if parametrize.is_parametrized(module, "weight"):
        parts: Any = module.parametrizations
        return max((tensor.numel() for tensor in parts.weight.parameters(recurse=False)), default=0)
    weight = getattr(module, "weight", None)
    return weight.numel() if isinstance(weight, Tensor) and not isinstance(weight, UninitializedParameter) else 0


def _broken_ties(model: nn.Module, chosen: set[nn.Module], folded: Container[nn.Module]) -> dict[nn.Module, str]:
    """Chosen modules that share their weight with a module that stays dense, with the reason to leave them alone.

    The other module would read the weight without its mask and noise. A weight to be made plain may not be shared at all.
    """
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((name, module))
    reasons = {}
    for module in chosen:
        if module in folded:
            own = set(module.modules())
            others = [name for p in module.parameters() for name, owner in owners[id(p)] if owner not in own]
            if others:
                reasons[module] = f"shared with another module: its weight is derived from a tensor of {others[0]!r}"
            continue
        weight: Any = module.weight
        for other, owner in owners[id(weight)]:
            same = owner.dense_class if isinstance(owner, VariationalLayer) else type(owner) if owner in chosen else None
            if same is not type(module) or owner in folded:
                reasons[module] = f"shared with another module: its weight is also that of {other!r}, which stays dense"
    return reasons


class _Rules:
    """Decides by its type and names why a module is skipped. folded: {module: how its weight is derived} for those that have
    to be made plain if they are converted."""

    def __init__(
        self, model: nn.Module, include: list[str], exclude: list[str], derived: str, filter_fn: Filter | None
    ) -> None:
        self.include, self.exclude, self.fold, self.filter_fn = include, exclude, derived == "fold", filter_fn
        self.folded: dict[nn.Module, str] = {}
        names = [name for name, _ in model.named_modules(remove_duplicate=False)]
        for field, patterns in (("include", include), ("exclude", exclude)):
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in names):
                    known = ", ".join([n for n in names if n][:12])
                    raise ModelError(f"{field}: {pattern!r} matches no module of {type(model).__name__}; it has {known} ...")
        self.attention = tuple(n for n, module in model.named_modules() if isinstance(module, nn.MultiheadAttention))

    def why_not(self, names: list[str], module: nn.Module) -> str:
        """Why a module is not converted; "" if it is."""
        if isinstance(module, VariationalLayer):
            return self._excluded(names, module) or ALREADY
        inside = next((p for p in self.attention for n in names if n != p and n.startswith(f"{p}." if p else "")), None)
        if inside is not None:
            return f"inside MultiheadAttention {inside!r}, which reads the weights of its layers directly"
        if isinstance(module, LazyModuleMixin):
            return "lazy: run the model once first"
        if isinstance(module, parametrize.ParametrizationList):
            return f"the tensors that the weight of a parametrized layer comes from: {type(module).__name__}"
        reason = self._nature(module) or self._excluded(names, module)
        if reason:
            self.folded.pop(module, None)
        return reason

    def _nature(self, module: nn.Module) -> str:
        """Why the layer itself cannot be converted, or ""; records in `folded` those that have to be made plain first."""
        how = derivation(module)
        if how:
            self.folded[module] = how
        if parametrize.is_parametrized(module):
            if self.fold and how:
                return ""
            return f"parametrized (torch.nn.utils.parametrize): {FOLD if how else 'remove the parametrization first'}"
        if "weight_g" in module._parameters or "weight_orig" in module._parameters:
            if self.fold and how:
                return ""
            return f"weight-normed or pruned by torch.nn.utils hooks: {FOLD if how else 'remove them first'}"
        if how:
            return "" if self.fold else f"its forward computes the weight that it uses: {FOLD}"
        kind = type(module)
        known = known_class(kind)
        if known is not None and (own := changes(kind)):
            return f"a {known.__name__} with its own {' and '.join(own)}: {kind.__name__}"
        if known is not None and (taken := clashes(module)):
            return f"has its own {' and '.join(taken)}, which a variational layer needs for itself: {kind.__name__}"
        if known is None or variational_class(kind) is None:
            return f"not a type that is converted: {kind.__name__}"
        weight: Any = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and not weight.is_floating_point():
            return f"its weight is {weight.dtype}, not a real floating-point tensor"
        if isinstance(weight, Tensor) and not isinstance(weight, UninitializedParameter) and not weight.numel():
            return f"its weight is empty, of shape {tuple(weight.shape)}"
        if "forward" in vars(module):
            return "its forward method was replaced on the instance, so a variational one would never be called"
        return ""

    def _excluded(self, names: list[str], module: nn.Module) -> str:
        if not any(matches(name, self.include) for name in names):
            return "excluded: no include pattern matches"
        if any(matches(name, self.exclude) for name in names):
            return "excluded"
        if self.filter_fn is not None and not any(self.filter_fn(module, name) for name in names):
            return "excluded by filter_fn"
        return ""
