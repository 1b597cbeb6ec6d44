"""Targets for unlabeled data: the dense model's own answers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from svdcompress.batch import call, main_output, map_tensors
from svdcompress.errors import DataError, ModelError
from svdcompress.likelihoods import likelihood_for
from svdcompress.pipeline._figures import there
from svdcompress.pipeline._loss import no_classes
from svdcompress.pipeline._tokens import unlabelled_dim
from svdcompress.sources import Data, InMemory, fitting

BATCH, FEW = 500, 2


def check_label(data: Data, trained: bool) -> None:
    """Raises ModelError if the model is yet to be trained, DataError for a regression or for data that are not in memory."""
    if not trained:
        raise ModelError("data.unlabelled: there is nothing to learn from but the dense model's answers; name its --weights")
    if not likelihood_for(data.task).probabilities:
        raise DataError(
            f"data.unlabelled: works for classification and binary, not for {data.task}: there the dense model has no error "
            "of its own by which to measure a budget or the noise. Save its answers, and pass them as the targets; --goal then "
            "says how small, or --max-error how far from them (a percentage of an error of 0, --max-drop, means nothing)"
        )
    for name in ("train", "validation", "test"):
        if not isinstance(getattr(data, name), InMemory):
            raise DataError(f"data.unlabelled: works only for data in memory, but the {name} data is read as needed")


@torch.no_grad()
def label(data: Data, model: nn.Module, trained: bool, device: torch.device | str, dim: int | None = None) -> None:
    """Replace the targets of all splits by a trained model's answers, in place.

    classification: the class of the largest output. binary: whether the logit is above 0. dim: the dimension of the classes,
    as a run has recorded it; None: it is found (`unlabelled_dim`), and put into `data`.
    Raises what `check_label` raises, and ModelError for an output without a dimension of classes.
    """
    check_label(data, trained)
    model.eval()
    output, classes = torch.empty(0), likelihood_for(data.task).classes
    for name in ("train", "validation", "test"):
        examples = getattr(data, name)
        answers = []
        with there(torch.device(device), model):
            plain = InMemory(examples.inputs, examples.targets)
            for inputs, _ in plain.batches(fitting(model, plain, BATCH, device=device), device=device):
                output = main_output(whole := call(model, inputs))
                if classes and output.dim() < 2:
                    said = f"an output of shape {tuple(output.shape)} has no dimension of classes"
                    raise ModelError(f"model: {said}, and {no_classes('classification')}")
                if dim is None:
                    by_name = not isinstance(whole, Tensor | tuple | list)  # as in transformers
                    few = map_tensors(inputs, lambda tensor: tensor[:FEW])
                    dim, warned = unlabelled_dim(model, few, output[:FEW], by_name) if classes else (1, [])
                    data.warnings += warned
                answers.append(likelihood_for(data.task, dim).answers(output).cpu())
        examples.targets = torch.cat(answers)
    data.target_scale = None
    data.dim = 1 if dim is None else dim
    if classes:
        data.outputs = output.shape[data.dim]
