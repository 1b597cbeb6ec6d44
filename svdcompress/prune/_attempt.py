"""Tries choices on copies until it finds the largest set of groups that passes the equivalence check."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from svdcompress.batch import first_tensor, map_tensors
from svdcompress.errors import PruneError
from svdcompress.layers import variational_layers
from svdcompress.prune._aside import tell_aside
from svdcompress.prune._choice import Analysis, Choice
from svdcompress.prune._compare import ROUGH
from svdcompress.prune._copies import full_copy, is_low, own_memory, sharing_copy, widened
from svdcompress.prune._groups import count_means, group_roots, tell_groups, tell_layers
from svdcompress.prune._record import Surgery
from svdcompress.prune._report import PruneReport
from svdcompress.prune._surgery import operate
from svdcompress.prune._verify import EquivalenceCheck
from svdcompress.relevance import hold

FAILS, CHANGES = "left masked: the model fails when it is removed", "left masked: the output would change"
PUT_BACK = (FAILS, CHANGES)
"""How the reasons begin for a group that had to be put back."""


class Attempt:
    """Tries choices on copies until it finds the largest set of groups that passes the equivalence check."""

    def __init__(
        self,
        model: nn.Module,
        masks: Mapping[str, Tensor],
        plain: nn.Module,
        inputs: Any,
        seconds: float,
        round_to: int,
        report: PruneReport,
        training: Any = None,
    ) -> None:
        self.model, self.masks, self.plain, self.inputs = model, masks, plain, inputs
        self.deadline = time.thread_time() + seconds
        self.round_to, self.report, self.training = round_to, report, training
        self.low = is_low(model) and not is_low(plain)
        self.modes = ["names", "heads", "every", "none"]
        self.failed: dict[int, str] = {}  # group -> why
        self.good: list[int] = []  # groups that the result was chosen from
        self.why = ""

    def result(self, analysis: Analysis | None, verify: bool) -> nn.Module:
        """The pruned model; fills in the report."""
        if analysis is None:
            return self._finish(None, None, "none")
        roots = group_roots(analysis)
        batch = first_tensor(self.inputs).shape[0]
        check = EquivalenceCheck(self.plain, self.inputs, batch, self.training) if verify else None
        everything = self.good = list(range(len(roots)))
        choice = self._choice(analysis, roots, everything)
        small = self._finish(analysis, choice, self.modes[0])
        if check is not None and (self.low or not self._passes(small, check, analysis)):
            del small
            good = everything if self.low and self._works(analysis, choice, check) else None
            if good is None:
                self._learn(analysis, check)
                works = self._works(analysis, self._choice(analysis, roots, everything), check)
                good = everything if works else self._search(analysis, roots, everything, [], check)
            self.good = good
            choice = self._choice(analysis, roots, good)
            self._works(analysis, choice, check)
            small = self._finish(analysis, choice, self.modes[0])
        if check is not None:
            if check.passed is not small and not self._passes(small, check, analysis):
                del small
                self.report.notes.append(
                    "left masked: the masked model does not compute what its layers do (it reads their weights directly, or "
                    "draws at random in eval())"
                )
                self.good = []
                choice = self._choice(analysis, roots, [])
                small = self._finish(analysis, choice, "none")
                check.worst = 0.0
            self.report.max_error = check.worst
        reasons = {root: why for group, why in self.failed.items() for root in roots[group].tolist()}
        self.report.groups = tell_groups(analysis, choice, reasons, self._unrounded(analysis, roots))
        if choice.removed.any():
            copied, own = widened if self.low else sharing_copy, self._feed(analysis)(self.inputs)
            self.report.notes += tell_aside(self.plain, lambda: copied(small), self.inputs, own, self.training is not None)
        return small

    def _unrounded(self, analysis: Analysis, roots: list[np.ndarray]) -> Choice | None:
        """The choice from the same groups without rounding; records how many parameters it would have left."""
        if self.round_to == 1:
            return None
        choice = self._choice(analysis, roots, self.good, round_to=1)
        trial = hold(sharing_copy(self.model), {name: mask.clone() for name, mask in self.masks.items()})
        try:
            operate(trial, analysis, choice, self.modes[0])
            self.report.parameters_unrounded = count_means(trial)
        except Exception:  # code that holds a length as a number may not be adaptable to these sizes
            self.report.parameters_unrounded = None
        return choice

    def _learn(self, analysis: Analysis, check: EquivalenceCheck) -> None:
        """Learn from the check's cases: what is constant on the examples may vary on inputs of another size or with holes."""
        for case, _ in check.cases:
            if time.thread_time() > self.deadline:
                return
            try:
                analysis.learn(case)
            except Exception:  # it is verified anyway  # nosec B112
                continue

    def _passes(self, small: nn.Module, check: EquivalenceCheck, analysis: Analysis) -> bool:
        """Whether a finished model passes the equivalence check."""
        check.feed = self._feed(analysis)
        try:
            agreed = check.agrees(widened(small), ROUGH) if self.low else check.agrees(small)
        except Exception:  # reported when the groups are tried one by one
            return False
        check.passed = small if agreed else None
        return agreed

    def _choice(self, analysis: Analysis, roots: list[np.ndarray], groups: list[int], round_to: int | None = None) -> Choice:
        allowed = np.zeros(analysis.count, bool)
        for group in groups:
            allowed[roots[group]] = True
        return analysis.choose(allowed, round_to or self.round_to)

    def _works(self, analysis: Analysis, choice: Choice, check: EquivalenceCheck) -> bool:
        """Whether a choice passes with one of the ways to adapt numbers in code; that way is tried first from then on."""
        if not choice.removed.any():
            return True
        whys = []
        for mode in list(self.modes):
            trial = sharing_copy(self.plain)
            try:
                operate(trial, analysis, choice, mode)
                self._take_inputs(analysis, choice)
                check.feed = self._feed(analysis)
                if check.agrees(trial):
                    self.modes.remove(mode)
                    self.modes.insert(0, mode)
                    return True
                whys.append(f"{CHANGES} by {check.worst:.1e}")
            except Exception as error:  # a length that code holds as a number
                whys.append(f"{FAILS} ({type(error).__name__}: {str(error)[:120]})")
        self.why = whys[0]
        return False

    def _search(
        self, analysis: Analysis, roots: list[np.ndarray], groups: list[int], good: list[int], check: EquivalenceCheck
    ) -> list[int]:
        """`good` and the groups that can be removed with it, found by halving; groups left when time is up stay masked."""
        if time.thread_time() > self.deadline:
            self.failed.update(dict.fromkeys(groups, "left masked: the time budget was spent"))
            return good
        if self._works(analysis, self._choice(analysis, roots, good + groups), check):
            return good + groups
        if len(groups) == 1:
            self.failed[groups[0]] = self.why
            return good
        half = len(groups) // 2
        good = self._search(analysis, roots, groups[:half], good, check)
        return self._search(analysis, roots, groups[half:], good, check)

    def _take_inputs(self, analysis: Analysis, choice: Choice) -> None:
        """Record in the report which features of the input are kept."""
        self.report.inputs_kept = self.report.inputs_dim = None
        for labels in analysis.trace.inputs.values():
            removed = choice.removed[labels.numpy()]
            if not removed.any():
                continue
            for d in range(removed.ndim):
                others = tuple(i for i in range(removed.ndim) if i != d)
                if (removed.all(others) == removed.any(others)).all():
                    self.report.inputs_kept = np.flatnonzero(~removed.all(others)).tolist()
                    self.report.inputs_dim = d + 1
                    break
            else:
                raise PruneError("the features are not whole indices of one dimension")

    def _feed(self, analysis: Analysis) -> Callable[[Any], Any]:
        """A function that cuts whole inputs to the features that the pruned model reads."""
        kept, dim = self.report.inputs_kept, self.report.inputs_dim
        if kept is None or dim is None:
            return lambda case: case
        (name,) = analysis.trace.inputs

        def feed(case: Any) -> Any:
            number = -1

            def select(tensor: Tensor) -> Tensor:
                nonlocal number
                number += 1
                return tensor.index_select(dim, torch.tensor(kept, device=tensor.device)) if str(number) == name else tensor

            return map_tensors(case, select)

        return feed

    def _finish(self, analysis: Analysis | None, choice: Choice | None, mode: str) -> nn.Module:
        if analysis is None or choice is None or not choice.removed.any():
            small = full_copy(self.model)
        else:
            small = sharing_copy(self.model)  # most of it is replaced by smaller tensors at once
        hold(small, {name: mask.clone() for name, mask in self.masks.items()})
        record = Surgery()
        if analysis is not None and choice is not None:
            self._take_inputs(analysis, choice)
            record = operate(small, analysis, choice, mode)
        own_memory(small, self.model)
        for _, layer in variational_layers(small):
            layer.train(layer.training)  # drops what it derived from its old weights
        tell_layers(self.report, self.model, small, self.masks, record)
        return small
