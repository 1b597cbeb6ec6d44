"""`prune` and `groups`: trace the model, choose units, try the choice, put back what fails, and report."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.batch import call, first_tensor, map_tensors, unwrapped
from svdcompress.convert import as_it_was, matches
from svdcompress.errors import PruneError, UsageError
from svdcompress.layers import StochasticLayer, Threshold, VariationalLayer, variational_layers
from svdcompress.prune._attempt import Attempt
from svdcompress.prune._branches import take_branches
from svdcompress.prune._choice import Analysis
from svdcompress.prune._copies import forget, is_low, plain_copy, torn
from svdcompress.prune._folding import foldable
from svdcompress.prune._groups import tell_groups
from svdcompress.prune._look import Look, look
from svdcompress.prune._report import PruneReport
from svdcompress.prune._trace import Trace
from svdcompress.prune._tracer import OutOfTime, Tracer, leave_idle
from svdcompress.prune._verify import evaluating, resized
from svdcompress.relevance import Masks, as_masks, relevance

FEW = 2
"""How many examples of the batch are traced."""


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

    Units (channels, features, attention heads) are removed if nothing reads them, or if their value is a constant, which is
    then folded into the layers that read it. Their means, variances, masks and norm statistics are removed with them. Units
    that cannot be removed exactly stay masked, and `.pruning` of the result, a `PruneReport`, says why. The given model is not
    changed. If the model is wrapped by torch.compile, for data-parallel training or for weight averaging, the model inside the
    wrapper is pruned and returned.

    example_inputs: a tensor, a tuple of positional inputs or a dict of keyword inputs, batch first.
    masks: which weights to keep, by layer (see `relevance`); None: by `threshold`, or each layer's own mask or limits.
    round_to: round channel counts up to multiples of this where units are removed.
    remove_inputs: also drop input features that no weight reads; the result takes inputs with only the features
        `.pruning.inputs_kept` along dimension `.pruning.inputs_dim`.
    protect: fnmatch patterns of modules whose units are kept, together with those of all layers inside them.
    time_budget: seconds of computing (CPU time of the calling thread, so that a busy machine makes no difference) after which
        units that have not been verified are left masked.
    verify: compare with the masked model on fresh inputs and two batch sizes, and put back groups that change the outputs.

    Raises UsageError if the model has no variational layer, PruneError if the masks belong to another model, or if the model
    cannot run on the example inputs or cannot be copied.

    Example:
        >>> small = svdc.prune(svdc.convert(model).eval(), x, threshold=3.0)
        >>> small.pruning
    """
    start = time.perf_counter()
    begun = time.thread_time()
    if masks is not None and threshold is not None:
        raise UsageError("prune: give masks or a threshold, not both")
    if round_to < 1:
        raise UsageError(f"round_to: {round_to} is not a number of channels")
    model = unwrapped(model)
    found = relevance(model, threshold) if masks is None else as_masks(model, masks)
    _known(model, protect)
    plain, inputs = _prepared(model, found, example_inputs)
    found, plain, inputs, seen = _looked_at(model, found, plain, inputs, example_inputs)
    report = PruneReport(round_to=round_to, notes=seen.notes)
    left = time_budget - (time.thread_time() - begun)
    attempt = Attempt(model, found, plain, inputs, left, round_to, report, seen.training)
    analysis = None
    if not seen.torn:  # otherwise no dense model computes what the masked one does
        analysis = _analyse(plain, model, found, inputs, protect, remove_inputs, report, left, seen.training)
    small = attempt.result(analysis, verify)
    if round_to == 1 or analysis is None:
        report.parameters_unrounded = report.parameters_after
    report.seconds = time.perf_counter() - start
    object.__setattr__(small, "pruning", report)
    return small


def groups(
    model: nn.Module, example_inputs: Any, *, masks: Mapping[str, Tensor] | None = None, protect: Sequence[str] = ()
) -> PruneReport:
    """Report what could be pruned and what can't, and why, without pruning. The model may be dense or converted, wrapped or
    not.

    example_inputs, protect: as for `prune`.
    masks: of a converted model, to see which units they would remove (None: no units).

    Example:
        >>> [(group.name, group.reason) for group in svdc.groups(model, x).groups]
    """
    start = time.perf_counter()
    model = unwrapped(model)
    _known(model, protect)
    everything = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}
    found = as_masks(model, masks) if masks is not None else everything
    plain, inputs = _prepared(model, found, example_inputs)
    seen = look(plain, inputs, [name for name, _ in variational_layers(model)])
    report = PruneReport(notes=seen.notes)
    analysis = _analyse(plain, model, found, inputs, protect, False, report, training=seen.training)
    if analysis is not None:
        report.groups = tell_groups(analysis, analysis.choose(), {})
    report.seconds = time.perf_counter() - start
    return report


def analyse(
    model: nn.Module,
    example_inputs: Any,
    *,
    masks: Mapping[str, Tensor] | None = None,
    protect: Sequence[str] = (),
    remove_inputs: bool = False,
) -> Analysis | None:
    """Analyze the units of a model under masks (None: all weights are kept); returns None if its graph cannot be followed.

    Arguments and errors are those of `prune`, which finds the same units and, with the same masks, makes the same choice.
    """
    model = unwrapped(model)
    _known(model, protect)
    if masks is None:
        everything = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}
        plain, inputs = _prepared(model, everything, example_inputs)
        training = look(plain, inputs).training
        return _analyse(plain, model, everything, inputs, protect, remove_inputs, PruneReport(), training=training)
    own = as_masks(model, masks)
    plain, inputs = _prepared(model, own, example_inputs)
    own, plain, inputs, seen = _looked_at(model, own, plain, inputs, example_inputs)
    if seen.torn:
        return None
    found = _analyse(plain, model, own, inputs, protect, remove_inputs, PruneReport(), training=seen.training)
    if found is not None:
        found.past = frozenset(seen.past)
    return found


def _looked_at(
    model: nn.Module, masks: Masks, plain: nn.Module, inputs: Any, example_inputs: Any
) -> tuple[Masks, nn.Module, Any, Look]:
    """The masks that the masked model really computes with, its dense copy, the inputs, and what `look` found."""
    seen = look(plain, inputs, list(masks))
    if seen.past:  # the masked model computes with all of these weights, whatever their masks say
        masks = as_masks(model, {name: torch.ones_like(mask) if name in seen.past else mask for name, mask in masks.items()})
        plain, inputs = _prepared(model, masks, example_inputs)
    return masks, plain, inputs, seen


def _known(model: nn.Module, protect: Sequence[str]) -> None:
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for pattern in protect:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise PruneError(f"protect: {pattern!r} matches no module of {type(model).__name__}")


def _protected(model: nn.Module, protect: Sequence[str]) -> Iterator[str]:
    """All names of the modules that match a pattern, and of the modules inside them."""
    for name, _ in model.named_modules(remove_duplicate=False):
        if matches(name, protect):
            yield name


def _prepared(model: nn.Module, masks: Mapping[str, Tensor], example_inputs: Any) -> tuple[nn.Module, Any]:
    """A dense copy of the masked model and a few of the examples, both in single precision if the model has less."""
    plain = plain_copy(model, masks)
    inputs = _few(plain, example_inputs)
    if is_low(plain):
        wide = map_tensors(inputs, lambda t: t.float() if t.is_floating_point() else t)
        try:
            with evaluating(plain.float()):
                call(plain, wide)
            return plain, wide
        except Exception:  # code that casts by itself: the model keeps its own precision
            return plain_copy(model, masks), inputs
    return plain, inputs


def _few(plain: nn.Module, example_inputs: Any) -> Any:
    """A few of the examples, or all of them if the model doesn't run on a few. Raises PruneError if it runs on neither."""
    inputs = map_tensors(example_inputs, lambda tensor: tensor.detach())
    few = resized(inputs, FEW) if first_tensor(inputs).dim() and first_tensor(inputs).shape[0] > FEW else inputs
    with evaluating(plain):
        try:
            call(plain, few)
            return few
        except Exception:  # all of the examples come next  # nosec B110
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
    seconds: float = 60.0,
    training: Any = None,
) -> Analysis | None:
    """Trace the plain model; returns None, with a note in the report, if that fails or takes longer than `seconds`.

    training: inputs for a second trace in `train()`, whose branches are taken into account too (None: there are none).
    """
    masks_of = {f"{name}.weight" if name else "weight": mask.cpu() for name, mask in masks.items()}
    random: dict[str, Tensor] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, VariationalLayer) and module.bias_sigma2 is not None:
            random[f"{name}.weight" if name else "weight"] = (module.bias_sigma2 > 0).cpu()
        elif isinstance(module, StochasticLayer) and not isinstance(module, VariationalLayer):
            random[name] = torch.ones(())
    names = {name: "protected" for name in _protected(model, protect)}
    names.update(torn(model, plain))
    deadline = time.thread_time() + seconds

    def watch(case: Any) -> Trace:
        forget(plain)  # a value kept from an earlier pass would not be traced to its parameter
        trace = Trace(plain, masks_of, random, names)
        Tracer(trace, deadline).run(case, remove_inputs)
        return trace

    def trained() -> Trace:
        with as_it_was(plain, True):
            return watch(training)

    try:
        trace = watch(inputs)
        if training is not None:
            report.notes += take_branches(trace, trained)
        leave_idle(trace)
        analysis = Analysis(trace, lambda use: foldable(plain, use), watch)
    except OutOfTime:
        report.notes.append(f"left masked: its graph was not followed within the time budget ({seconds:.0f} s)")
        return None
    except Exception as error:  # whatever a forward pass may raise: the model is then left masked
        report.notes.append(f"left masked: its graph could not be followed ({type(error).__name__}: {error})")
        return None
    report.notes += trace.bugs
    if remove_inputs and not analysis.trace.inputs:
        report.notes.append(
            "inputs are kept: features can be removed only if there is a single floating-point input of moderate size"
        )
    return analysis
