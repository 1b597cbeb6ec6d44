"""`prune` and `groups`: trace, choose, try, put back what fails, and tell."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from svdcompress.convert import to_dense, variational_layers
from svdcompress.errors import PruneError, UsageError
from svdcompress.layers import StochasticLayer, Threshold, VariationalLayer
from svdcompress.prune._choice import Analysis, Choice
from svdcompress.prune._groups import group_roots, tell_groups, tell_layers
from svdcompress.prune._report import PruneReport
from svdcompress.prune._surgery import foldable, operate
from svdcompress.prune._trace import Trace, tensors_in
from svdcompress.prune._verify import Judge, evaluating, resized
from svdcompress.relevance import as_masks, hold, relevance
from svdcompress.sources import call, first_tensor, map_tensors

FEW = 2
"""Examples of the batch that are traced."""


def prune(
    model: nn.Module,
    example_inputs: Any,
    *,
    masks: Mapping[str, Tensor] | None = None,
    threshold: Threshold | None = None,
    round_to: int = 1,
    remove_inputs: bool = False,
    protect: Sequence[str] = (),
    time_budget: float = 60.0,
    verify: bool = True,
) -> nn.Module:
    """A physically smaller copy of a converted model, still variational, that computes what the masked model does.

    Units (channels, features, attention heads) go when nothing reads them or when their value is a constant, which is then
    folded into what reads them; their means, variances, masks and norm statistics go along. What cannot be done exactly
    stays masked, and `.pruning` of the result, a `PruneReport`, says why. The given model is left as it is.

    example_inputs: a tensor, a tuple of positional inputs or a dict of keyword inputs, batch first.
    masks: which weights stay, by layer (see `relevance`); None: by `threshold`, or each layer's own.
    round_to: keep channel counts at multiples of this where units go.
    remove_inputs: also drop input features that no weight reads; the result takes inputs with only the features
        `.pruning.inputs_kept` along dimension `.pruning.inputs_dim`.
    protect: fnmatch patterns of layers whose units stay.
    time_budget: seconds after which what has not been verified is left masked.
    verify: compare with the masked model on fresh inputs and two batch sizes, and put back groups that differ.

    Raises UsageError if the model has no variational layer, PruneError if masks are another model's, if the model cannot
    run on the example inputs or cannot be copied.
    """
    start = time.perf_counter()
    if masks is not None and threshold is not None:
        raise UsageError("prune: give masks or a threshold, not both")
    if round_to < 1:
        raise UsageError(f"round_to: {round_to} is not a number of channels")
    held = relevance(model, threshold) if masks is None else as_masks(model, masks)
    _known(model, protect)
    plain = _plain(model, held)
    inputs = _few(plain, example_inputs)
    report = PruneReport()
    attempt = _Attempt(model, held, plain, inputs, time_budget - (time.perf_counter() - start), round_to, report)
    analysis = _analyse(plain, model, held, inputs, protect, remove_inputs, report)
    small = attempt.result(analysis, verify)
    report.seconds = time.perf_counter() - start
    object.__setattr__(small, "pruning", report)
    return small


def groups(
    model: nn.Module, example_inputs: Any, *, masks: Mapping[str, Tensor] | None = None, protect: Sequence[str] = ()
) -> PruneReport:
    """What could be pruned and what can't, and why, without doing it; the model may be dense or converted.

    example_inputs: as for `prune`. masks: of a converted model, to see what would go with them (None: nothing would).
    """
    start = time.perf_counter()
    _known(model, protect)
    everything = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}
    held = as_masks(model, masks) if masks is not None else everything
    plain = _plain(model, held)
    inputs = _few(plain, example_inputs)
    report = PruneReport()
    analysis = _analyse(plain, model, held, inputs, protect, False, report)
    if analysis is not None:
        report.groups = tell_groups(analysis, analysis.choose(), {})
    report.seconds = time.perf_counter() - start
    return report


def analyse(model: nn.Module, example_inputs: Any) -> Analysis | None:
    """The units of a model as it stands, all weights taken as alive; None where its graph cannot be followed."""
    everything = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}
    plain = _plain(model, everything)
    return _analyse(plain, model, everything, _few(plain, example_inputs), (), False, PruneReport())


def _known(model: nn.Module, protect: Sequence[str]) -> None:
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for pattern in protect:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise PruneError(f"protect: {pattern!r} matches no module of {type(model).__name__}")


def _plain(model: nn.Module, masks: Mapping[str, Tensor]) -> nn.Module:
    """A dense copy in `eval()` with irrelevant weights at 0."""
    try:
        variances = {id(layer.log_sigma2): layer.log_sigma2 for _, layer in variational_layers(model)}
        plain = _copy(model, variances)  # these are dropped at once, so they need no copy
    except Exception as error:
        raise PruneError(f"{type(model).__name__} cannot be copied, and pruning works on a copy ({error})") from error
    if masks:
        hold(plain, masks)
        _untie(plain)
    return to_dense(plain).eval()


def _copy(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy; what the model keeps of an earlier forward pass is copied without its gradient, which torch refuses to."""
    memo = dict(memo or {})
    for module in model.modules():
        for key, value in vars(module).items():
            for tensor in tensors_in(value) if key not in ("_parameters", "_modules", "_buffers") else ():
                if not tensor.is_leaf:
                    memo[id(tensor)] = tensor.detach().clone()
    return copy.deepcopy(model, memo)


def _untie(plain: nn.Module) -> None:
    """Layers that share a weight under different masks compute with different weights: here each gets its own."""
    first: dict[int, VariationalLayer] = {}
    for _, layer in variational_layers(plain):
        other = first.setdefault(id(layer.weight), layer)
        masks: Any = other.mask, layer.mask
        if other is not layer and not torch.equal(*masks):
            layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=layer.weight.requires_grad)


def _few(plain: nn.Module, example_inputs: Any) -> Any:
    """A few of the examples, on which the model runs; PruneError where it doesn't."""
    inputs = map_tensors(example_inputs, lambda tensor: tensor.detach())
    few = resized(inputs, FEW) if first_tensor(inputs).dim() and first_tensor(inputs).shape[0] > FEW else inputs
    with evaluating(plain):
        try:
            call(plain, few)
            return few
        except Exception:
            pass
        try:
            call(plain, inputs)
            return inputs
        except Exception as error:
            raise PruneError(f"the model cannot run on the example inputs: {type(error).__name__}: {error}") from error


def _analyse(
    plain: nn.Module,
    model: nn.Module,
    masks: Mapping[str, Tensor],
    inputs: Any,
    protect: Sequence[str],
    remove_inputs: bool,
    report: PruneReport,
) -> Analysis | None:
    """Trace the plain model; None, with a note, where that fails."""
    alive = {f"{name}.weight" if name else "weight": mask.cpu() for name, mask in masks.items()}
    noisy: dict[str, Tensor] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, VariationalLayer) and module.bias_sigma2 is not None:
            noisy[f"{name}.weight" if name else "weight"] = (module.bias_sigma2 > 0).cpu()
        elif isinstance(module, StochasticLayer) and not isinstance(module, VariationalLayer):
            noisy[name] = torch.ones(())
    names = {name: "protected" for name, _ in model.named_modules() if any(fnmatchcase(name, p) for p in protect)}
    names.update(_torn(model, plain))
    try:
        trace = Trace(plain, alive, noisy, names)
        trace.run(inputs, remove_inputs)
        return Analysis(trace, lambda use: foldable(plain, use))
    except Exception as error:  # whatever a forward pass may do: the model is then left masked
        report.notes.append(f"left masked: its graph could not be followed ({type(error).__name__}: {error})")
        return None


def _torn(model: nn.Module, plain: nn.Module) -> dict[str, str]:
    """Layers whose weight is tied in the model and not in the plain copy."""
    tied: dict[int, set[int]] = {}
    owners: dict[int, list[str]] = {}
    other = dict(plain.named_modules())
    for name, layer in variational_layers(model):
        tied.setdefault(id(layer.weight), set()).add(id(other[name].weight))
        owners.setdefault(id(layer.weight), []).append(name)
    torn = [name for key, found in tied.items() if len(found) > 1 for name in owners[key]]
    return dict.fromkeys(torn, "its weight is tied to another layer's, under another mask")


class _Attempt:
    """Tries choices on copies until the largest set of groups that verifies is found."""

    def __init__(
        self,
        model: nn.Module,
        masks: Mapping[str, Tensor],
        plain: nn.Module,
        inputs: Any,
        seconds: float,
        round_to: int,
        report: PruneReport,
    ) -> None:
        self.model, self.masks, self.plain, self.inputs = model, masks, plain, inputs
        self.deadline = time.perf_counter() + seconds
        self.round_to, self.report = round_to, report
        self.modes = ["names", "heads", "every", "none"]
        self.failed: dict[int, str] = {}  # group -> why
        self.why = ""

    def result(self, analysis: Analysis | None, verify: bool) -> nn.Module:
        if analysis is None:
            return self._finish(None, None, "none")
        roots = group_roots(analysis)
        judge = Judge(self.plain, self.inputs, first_tensor(self.inputs).shape[0]) if verify else None
        everything = list(range(len(roots)))
        choice = self._choice(analysis, roots, everything)
        small = self._finish(analysis, choice, self.modes[0])
        if judge is not None and not self._passes(small, judge):
            del small
            good = everything if self._works(analysis, choice, judge) else []
            if not good:
                good = self._search(analysis, roots, everything, [], judge)
            choice = self._choice(analysis, roots, good)
            self._works(analysis, choice, judge)
            small = self._finish(analysis, choice, self.modes[0])
        if judge is not None:
            if judge.passed is not small and not self._passes(small, judge):
                self.report.notes.append(
                    "left masked: the masked model does not compute what its layers do (it reads their weights past them, or "
                    "draws at random in eval())"
                )
                choice = self._choice(analysis, roots, [])
                small = self._finish(analysis, choice, "none")
                judge.worst = 0.0
            self.report.max_error = judge.worst
        reasons = {root: why for group, why in self.failed.items() for root in roots[group].tolist()}
        self.report.groups = tell_groups(analysis, choice, reasons)
        return small

    def _passes(self, small: nn.Module, judge: Judge) -> bool:
        """Whether a finished model verifies."""
        judge.feed = self._feed()
        try:
            agreed = judge.agrees(small)
        except Exception:  # told when the groups are tried one by one
            return False
        judge.passed = small if agreed else None
        return agreed

    def _choice(self, analysis: Analysis, roots: list[np.ndarray], groups: list[int]) -> Choice:
        allowed = np.zeros(analysis.count, bool)
        for group in groups:
            allowed[roots[group]] = True
        return analysis.choose(allowed, self.round_to)

    def _works(self, analysis: Analysis, choice: Choice, judge: Judge) -> bool:
        """Whether a choice verifies, with one of the ways to adapt numbers in code; the way that does comes first."""
        if not choice.removed.any():
            return True
        for mode in list(self.modes):
            trial = copy.deepcopy(self.plain)
            try:
                operate(trial, analysis, choice, mode)
                self._take_inputs(analysis, choice)
                judge.feed = self._feed()
                if judge.agrees(trial):
                    self.modes.remove(mode)
                    self.modes.insert(0, mode)
                    return True
                self.why = f"left masked: the output would change by {judge.worst:.1e}"
            except Exception as error:  # a length that code holds as a number
                self.why = f"left masked: without it the model fails ({type(error).__name__}: {str(error)[:120]})"
        return False

    def _search(
        self, analysis: Analysis, roots: list[np.ndarray], groups: list[int], good: list[int], judge: Judge
    ) -> list[int]:
        """The groups that can go together with `good`, by halving; what time does not allow is left masked."""
        if time.perf_counter() > self.deadline:
            self.failed.update(dict.fromkeys(groups, "left masked: the time budget was spent"))
            return good
        if self._works(analysis, self._choice(analysis, roots, good + groups), judge):
            return good + groups
        if len(groups) == 1:
            self.failed[groups[0]] = self.why
            return good
        half = len(groups) // 2
        good = self._search(analysis, roots, groups[:half], good, judge)
        return self._search(analysis, roots, groups[half:], good, judge)

    def _take_inputs(self, analysis: Analysis, choice: Choice) -> None:
        """Which features of the input stay."""
        self.report.inputs_kept = self.report.inputs_dim = None
        for labels in analysis.trace.inputs.values():
            removed = choice.removed[labels.numpy()]
            if not removed.any():
                continue
            if self.report.inputs_kept is not None or len(analysis.trace.inputs) > 1:
                raise PruneError("features of several inputs")
            for d in range(removed.ndim):
                others = tuple(i for i in range(removed.ndim) if i != d)
                if (removed.all(others) == removed.any(others)).all():
                    self.report.inputs_kept = np.flatnonzero(~removed.all(others)).tolist()
                    self.report.inputs_dim = d + 1
                    break
            else:
                raise PruneError("features that are no whole index of one dimension")

    def _feed(self) -> Callable[[Any], Any]:
        kept, dim = self.report.inputs_kept, self.report.inputs_dim
        if kept is None or dim is None:
            return lambda case: case

        def select(tensor: Tensor) -> Tensor:
            return tensor.index_select(dim, torch.tensor(kept, device=tensor.device)) if tensor.is_floating_point() else tensor

        return lambda case: map_tensors(case, select)

    def _finish(self, analysis: Analysis | None, choice: Choice | None, mode: str) -> nn.Module:
        small = hold(_copy(self.model), {name: mask.clone() for name, mask in self.masks.items()})
        if analysis is not None and choice is not None:
            self._take_inputs(analysis, choice)
            operate(small, analysis, choice, mode)
        for _, layer in variational_layers(small):
            layer.train(layer.training)  # forget what it derived from its old weights
        tell_layers(self.report, self.model, small, self.masks)
        return small
