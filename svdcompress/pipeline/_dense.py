"""The dense model that a run begins with: made, loaded, and tried on the data."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.batch import call, first_example, main_name, main_output, other_outputs
from svdcompress.convert import matches
from svdcompress.errors import ModelError, cause, nearest
from svdcompress.layers import variational_layers
from svdcompress.likelihoods import is_pair, likelihood_for
from svdcompress.pipeline._alike import check_shapes
from svdcompress.pipeline._axes import open_dims
from svdcompress.pipeline._convert import check_dropout, planned
from svdcompress.pipeline._logits import check_logits
from svdcompress.pipeline._loss import check_loss, first_targets
from svdcompress.pipeline._tokens import among_positions, copied
from svdcompress.pipeline._types import other_type
from svdcompress.recipe import Recipe
from svdcompress.sources import (
    Data,
    arrives_trained,
    both_fit,
    came_in,
    channels_last,
    check_labels,
    class_dim,
    load_weights,
    make_model,
    outputs_hint,
    start_from,
)
from svdcompress.sources.given import shown
from svdcompress.train import seed_everything


def dense_model(recipe: Recipe, notes: list[str] | None = None) -> tuple[nn.Module, bool]:
    """The recipe's model with its weights, and whether they are trained already. Raises ModelError, CheckpointError.

    notes: receives lines on weights that a file to start from has in excess or lacks, on other weights in a file, and on a
    model that came in another precision than float32.
    """
    seed_everything(recipe.seed, "model")
    model = make_model(recipe.model)
    if notes is not None and (other := came_in(model)):
        half = (
            f": log variances would hardly move in {other}. --set train.precision=auto (or bf16) computes in bfloat16"
            if other != "float64"
            else ", like its data"
        )
        notes.append(f"{shown(recipe.model.name)} has {other} weights but is trained in float32{half}")
    weights = recipe.weights
    if weights.file and weights.trained is False:
        found = start_from(model, weights.file, weights.strip_prefix)
        if notes is not None:
            notes += found
        return model, False
    if weights.file:
        return load_weights(model, weights.file, weights.strip_prefix, notes), True
    return model, weights.trained if weights.trained is not None else arrives_trained(recipe.model, model)


def tried(model: nn.Module, recipe: Recipe, data: Data, inputs: Any) -> Any:
    """The model's output for the first few training examples; leaves it in `eval()`. Raises ModelError if it does not run."""
    model.eval()
    try:
        with torch.no_grad():
            output = call(model, inputs)
        main_output(output)
    except Exception as error:  # whatever the user's model raises
        name = shown(recipe.model.name)
        reason = cause(error)
        why = token_limits(model, inputs) or channels_last(inputs) or other_type(model, inputs, data.place)
        raise ModelError(f"model: {name} fails on inputs{_shapes(inputs)}: {type(error).__name__}: {reason}{why}") from error
    return output


def check_model(model: nn.Module, recipe: Recipe, data: Data, inputs: Any) -> float:
    """Try, before any training, what a run will need of its dense model; leaves it in `eval()` and returns its loss.

    inputs: the first few training examples. What is found goes into `data`: the dimension of the classes, warnings and notes.
    Raises ModelError if the model does not run on the inputs or on the first one alone, if its output does not fit the loss or
    holds probabilities in place of logits, or if a pattern of the recipe matches nothing in it; DataError if it has fewer
    outputs than there are classes, or if examples differ in shape; RecipeError for a wrong number of class weights, if
    `convert.dropout: draw` finds no dropout, or if `export.dynamic_axes` names what the inputs do not have or the model cannot
    take.
    """
    output = tried(model, recipe, data, inputs)
    main = main_output(output)
    _check_one(model, recipe, inputs)
    check_shapes(data, recipe.data.name, inputs, model, open_dims(model, recipe, data, inputs))
    targets = first_targets(data, inputs)
    by_name = not isinstance(output, Tensor | tuple | list)  # as in transformers
    if not recipe.data.unlabelled:  # there `label` has found it, and made the targets by it
        data.dim = class_dim(main.shape, targets.shape, data.task, last_if_both=by_name)
    if not recipe.data.unlabelled and not by_name and both_fit(main.shape, targets.shape, data.task):
        data.dim, told = among_positions(model, inputs, main)
        data.warnings += told
    data.warnings += copied(inputs, targets, data.task)
    if already := sum(1 for _ in variational_layers(model)):
        data.notes.append(
            f"{already} layers are variational already: they keep their own priors, shares, thresholds and variances, whatever "
            "convert says (svdcompress.to_dense makes them plain)"
        )
    if likelihood_for(data.task).classes and main.dim() > 1:
        _check_classes(model, recipe, data, main, targets)
    data.warnings += check_logits(model, recipe, data, inputs, main)
    data.notes += check_dropout(model, recipe, inputs)
    check_patterns(model, recipe, inputs)
    loss = check_loss(model, recipe, data, targets, output)
    data.warnings += _left_alone(model, recipe, data, inputs, output)
    return loss


def _check_one(model: nn.Module, recipe: Recipe, inputs: Any) -> None:
    """Try a single example, as counting costs, pruning and the files do later."""
    try:
        with torch.no_grad():
            call(model, first_example(inputs))
    except Exception as error:  # whatever the user's model raises
        raise ModelError(
            f"model: {shown(recipe.model.name)} fails for a batch of one example: {type(error).__name__}: {cause(error)}. "
            "It has to take any number of examples: a squeeze() without a dimension drops that of the batch, too"
        ) from error


def _left_alone(model: nn.Module, recipe: Recipe, data: Data, inputs: Any, output: Any) -> list[str]:
    """A warning about outputs besides the main one that the loss does not use; a user's own loss gets them all."""
    both = data.task == "gaussian" and is_pair(output)
    if ":" in recipe.loss.name or both or not other_outputs(output):
        return []
    try:
        with torch.enable_grad():
            output = call(model, inputs)
    except RuntimeError:  # a forward that changes weights in place, say
        pass
    main, others = main_output(output), other_outputs(output)
    told = [f"{name} {tuple(each.shape)}" for name, each in others.items() if not _made_of(each, main)]
    if not told:
        return []
    it, its = ("it", "its") if len(told) == 1 else ("them", "their")
    more = " ..." if len(told) > 4 else ""
    return [
        f"{main_name(output)} {tuple(main.shape)} is what is trained and evaluated. The model also returns "
        f"{', '.join(told[:4])}{more}: nothing here trains or evaluates {it}; leave {its} "
        "layers out (--set 'convert.exclude=[...]'; their inputs change nevertheless), or use a loss of your own"
    ]


def _made_of(output: Tensor, main: Tensor) -> bool:
    """Whether an output depends on weights only through the main output, as its probabilities do."""
    seen, ahead, met = set(), [output.grad_fn], False
    while ahead:
        node = ahead.pop()
        met |= node is not None and node is main.grad_fn
        if node is None or node is main.grad_fn or node in seen:
            continue
        if hasattr(node, "variable"):  # a weight
            return False
        seen.add(node)
        ahead += [source for source, _ in node.next_functions]
    return met


def _check_classes(model: nn.Module, recipe: Recipe, data: Data, main: Tensor, targets: Tensor) -> None:
    """Compare the numbers of outputs and classes: fewer outputs are an error, more give a warning."""
    outputs, classes = main.shape[data.dim], _classes(data)
    at = class_dim(main.shape, targets.shape, data.task, last_if_both=data.dim == -1)
    fits = at == data.dim and main.dim() == targets.dim() + 1
    if not fits:  # `check_loss` says what that means
        return
    hint = f"; {outputs_hint(recipe.model, outputs, classes)}" if classes else ""
    if recipe.weights.file and recipe.weights.trained is not False:  # they would not fit another number of outputs
        hint = f"; its weights ({recipe.weights.file}) are for that many. Do they belong to the classes of these data?"
        hint = "" if outputs == 1 else hint
    if outputs == 1:
        hint = "; for a regression use --loss mse, for a yes-or-no question --loss binary" + hint.replace("; ", ". Otherwise ")
    check_labels(data, outputs, hint)
    vocabulary = main.dim() > 2 and outputs == getattr(getattr(model, "config", None), "vocab_size", None)
    if classes == 1:
        data.warnings.append("all labels are of the same class: nothing can be learned from them, and no error can be measured")
    elif classes and outputs > classes and not vocabulary:  # not every token has to occur
        data.warnings.append(f"the data has {classes:,} classes, the model {outputs:,} outputs{hint.replace('; ', ': ')}")


def _classes(data: Data) -> int:
    """The known number of classes, from the dataset's own list if the data are read as needed; 0: not known."""
    if data.outputs:
        return data.outputs
    names = getattr(getattr(data.train, "dataset", None), "classes", None)
    return len(names) if isinstance(names, list | tuple) else 0


def check_patterns(model: nn.Module, recipe: Recipe, inputs: Any = None) -> None:
    """Raises ModelError, naming the field, if a pattern matches no module, or if a rule or the whole recipe converts nothing.

    inputs: the first few training examples, for a model that runs on them.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    settings = recipe.convert
    fields = {"convert.include": settings.include, "convert.exclude": settings.exclude, "prune.protect": recipe.prune.protect}
    rules = {f"convert.layers.{index}.match": rule.patterns for index, rule in enumerate(settings.layers)}
    for field, patterns in {**fields, **rules}.items():
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                close = nearest(pattern, names)
                hint = f"did you mean {close}?" if close else f"there are {', '.join([n for n in names if n][:12])} ..."
                raise ModelError(f"{field}: {pattern!r} matches no module of {type(model).__name__}; {hint}")
    for field, patterns in rules.items():
        entries = planned(model, recipe, inputs, patterns)
        if not any(entry.converted for entry in entries):
            left = [f"{e.name}: {e.reason}" for e in entries if matches(e.name, patterns)]
            why = "; ".join(left[:4]) or "it has no weights"
            raise ModelError(f"{field}: no layer that {', '.join(patterns)} matches is converted ({why})")
    entries = planned(model, recipe, inputs)
    if not rules and not any(entry.converted or entry.reason == "already converted" for entry in entries):
        reasons = "; ".join(f"{entry.name}: {entry.reason}" for entry in entries[:8]) or "it has no layers"
        raise ModelError(f"convert: nothing to convert in {type(model).__name__} ({reasons})")


def token_limits(model: nn.Module, inputs: Any) -> str:
    """Why a language model fails on its token ids, as far as its config shows: too many of them, or ids too large; or ""."""
    config, ids = getattr(model, "config", None), inputs.get("input_ids") if isinstance(inputs, dict) else inputs
    if config is None or not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dim() != 2:
        return ""
    positions, vocabulary = (getattr(config, name, None) for name in ("max_position_embeddings", "vocab_size"))
    if isinstance(positions, int):
        positions -= 2 if "roberta" in str(getattr(config, "model_type", "")) else 0  # it counts from its padding id on
        if ids.shape[1] > positions:
            return (
                f". The inputs have {ids.shape[1]} tokens, but the model takes {positions} (max_position_embeddings): "
                f"add --data-arg max_length={positions}"
            )
    if isinstance(vocabulary, int) and int(ids.max()) >= vocabulary:
        return (
            f". There is a token {int(ids.max())}, but the model knows only 0 to {vocabulary - 1} (vocab_size): does the "
            "tokenizer belong to the model?"
        )
    return ""


def _shapes(inputs: Any) -> str:
    if isinstance(inputs, dict):
        return " " + ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in inputs.items())
    shapes = getattr(inputs, "shape", None)
    return f" of shape {tuple(shapes)}" if shapes is not None else ""
