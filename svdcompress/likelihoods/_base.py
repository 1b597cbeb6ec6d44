"""What all likelihoods have in common, and what a likelihood of your own needs."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from svdcompress.batch import main_output
from svdcompress.errors import UsageError
from svdcompress.likelihoods._statistics import MomentStatistics, Statistics
from svdcompress.likelihoods._sums import MomentSums, Sums
from svdcompress.sources import like

REGISTRY: dict[str, type[Likelihood]] = {}
"""All likelihood classes by name: those of the package, and further subclasses as soon as they are defined."""


class Likelihood:
    """The distribution of the targets given a model's output; called with an output and targets, it returns the loss.

    A likelihood of your own has a `name`, `nll` and `moments`, and `heads` if a model has several; the rest follows.
    Settings other than `dim` are arguments of the constructor and belong in `settings`, so that checkpoints keep them.

    dim: the dimension of an output that holds the classes or the heads, counted with the batch at 0.
    """

    temperature: float = 1.0
    """What the log likelihood is divided by: logits are divided by it, the variance of a normal distribution is multiplied
    by it. Calibration fits it on validation data. `heads` returns tempered heads."""

    name: ClassVar[str] = ""
    probabilities: ClassVar[bool] = False
    """Whether predictions are probabilities, judged by error and calibration; else they are values, judged by RMSE."""
    classes: ClassVar[bool] = False
    """Whether the dimension `dim` holds classes, one of which is the answer: one label and one entropy for all of them."""
    constant_noise: ClassVar[bool] = False
    """Whether observations have one precision tau for all inputs, which is fitted on the validation data."""
    std_of: ClassVar[str] = "variance"
    """The variance whose square root a table of predictions shows."""

    def __init__(self, dim: int = 1) -> None:
        if type(dim) is not int:
            raise UsageError(f"dim: {dim!r} is not a whole number")
        self.dim = dim

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name = cls.__dict__.get("name")
        if not name:
            return
        known = REGISTRY.get(name)
        if known is not None and known.__module__.startswith("svdcompress.") and known.__module__ != cls.__module__:
            raise UsageError(f"{cls.__name__}: the package has a likelihood called {name!r}; give yours another name")
        REGISTRY[name] = cls

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """The loss."""
        return self.loss(output, target)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in self.settings().items())})"

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments, JSON-able."""
        return {"dim": self.dim}

    def _with(self, **changed: Any) -> Any:
        """A copy with some settings changed (None: to their default); the others, also those of a subclass, are kept."""
        settings = {**self.settings(), **changed}
        return type(self)(**{name: value for name, value in settings.items() if name not in changed or value is not None})

    # What an output says about the targets

    def heads(self, output: Any) -> Any:
        """The part of a model's output that is read: its main tensor, or a tuple of equally shaped tensors for several
        heads."""
        return main_output(output)

    def head_variances(self, variances: Any) -> Any:
        """Variances of the heads, from the variances of a model's output in the form of that output."""
        return self.heads(variances)

    def tempered(self, output: Any) -> Any:
        """The heads in the form of the model's output: what a file has in place of its main output, or of a pair."""
        return self.heads(output)

    def of_mean(self) -> Likelihood:
        """The likelihood of the mean model's output, which is calibrated apart from draws; without that, `self`."""
        return self

    def plain(self) -> Likelihood:
        """The same without what calibration found for one model, for reading the outputs of another model."""
        return self

    def rescaled(self, scale: float) -> Likelihood:
        """The same for outputs that are `scale` times as large."""
        return self

    def moments(self, heads: Any) -> tuple[Tensor, Tensor]:
        """Mean and variance of an observation, from the heads (any shape, element by element) of one draw."""
        raise NotImplementedError

    def nll(self, output: Any, target: Tensor) -> Tensor:
        """The negative log likelihood of each number, in nats; target: in any shape that `like` takes."""
        raise NotImplementedError

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """The mean negative log likelihood of a batch, up to a constant; a scalar with gradient."""
        return self.nll(output, target).mean()

    def soft_loss(self, loss: Any, output: Any, teacher: Any, temperature: float) -> Tensor:
        """The loss against the output of a teacher (distillation). loss: the run's own loss."""
        heads = self.heads(teacher)
        return loss(output, self.moments(heads)[0])

    def answers(self, output: Any) -> Tensor:
        """The targets that an output predicts: means, in the shape of the outputs."""
        return self.moments(self.heads(output))[0]

    # Metrics

    @property
    def metric(self) -> str:
        """The name of the metric that models are chosen by."""
        return "error" if self.probabilities else "rmse"

    def counts(self, target: Tensor) -> Tensor:
        """Which targets count, a Boolean tensor."""
        return torch.ones_like(target, dtype=torch.bool)

    def figures(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For each number: its squared error (or if it is wrong), its negative log likelihood, and whether it counts."""
        mean = self.moments(self.heads(output))[0]
        square = (like(target, mean) - mean).double().square()
        return square, self.nll(output, target).double(), torch.ones_like(square)

    def metrics(self, first: float, second: float, count: float, scale: float = 1.0) -> dict[str, float]:
        """{"rmse", "nll"} (or {"error" in percent, "nll"}) from the sums of `figures`.

        scale: the standard deviation that the targets were divided by; the metrics are in the target's own units.
        """
        if self.probabilities:
            return {"error": 100 * first / count, "nll": second / count}
        return {"rmse": scale * math.sqrt(first / count), "nll": second / count + math.log(scale)}

    def blind(self, targets: Tensor, scale: float = 1.0) -> dict[str, float]:
        """Metrics of the best constant answer, the same for all inputs; targets: (N, numbers)."""
        values = targets.double()
        return {"rmse": scale * float((values - values.mean(0)).square().mean().sqrt())}

    def in_units(self, output: Any, shift: float, scale: float) -> Any:
        """An output for standardized targets converted to the targets' own units, in the form of the model's output."""
        return self.heads(output) * scale + shift

    # Draws

    def sums(self, size: int, full: bool = False) -> Sums:
        """Running sums over draws of `size` inputs, for `mc_predict`; full: covariance matrices."""
        return MomentSums(self, size, full)

    def statistics(self, parts: bool = False) -> Statistics:
        """The same for one draw at a time, as parts of a graph; parts: also output aleatoric and epistemic variance."""
        return MomentStatistics(self, parts)

    # Predictions

    def rows(self, tensor: Tensor) -> Tensor:
        """Predictions with one row for each target: (N,) numbers, or (N, C) where there are classes."""
        return tensor.movedim(self.dim, -1).flatten(0, -2) if self.classes else tensor.reshape(-1)

    def confidence(self, p: Tensor) -> Tensor:
        """The probability of each answer."""
        return p.amax(self.dim) if self.classes else torch.maximum(p, 1 - p)
