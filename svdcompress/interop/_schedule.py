"""What the callbacks of all frameworks share: beta by epoch, and the term added to a loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from svdcompress.convert import convert
from svdcompress.errors import UsageError
from svdcompress.interop._examples import count_examples
from svdcompress.layers import variational_layers
from svdcompress.objective import Constant, Schedule, kl_divergence


class Penalty:
    """`beta KL / N`, which a callback adds to the loss of a framework's training loop.

    num_examples: N, the number of training examples; None: `count` finds it, anew for each training.
    schedule: beta by epoch, or a constant.
    options: arguments of `convert`.
    """

    def __init__(self, num_examples: int | None, schedule: Schedule | float, options: dict[str, Any]) -> None:
        if num_examples is not None and num_examples < 1:
            raise UsageError(f"num_examples: {num_examples} is not a number of training examples")
        self.num_examples = num_examples
        self._given = num_examples is not None
        self.schedule = Constant(float(schedule)) if isinstance(schedule, int | float) else schedule
        self.options = options
        self.beta = self.schedule(0)

    def convert(self, model: nn.Module) -> None:
        """Convert a model in place, unless it has variational layers already."""
        if not any(variational_layers(model)):
            convert(model, **self.options)

    def begin(self) -> None:
        """Forget what an earlier training left behind: its beta, and N if it was counted."""
        self.beta = self.schedule(0)
        if not self._given:
            self.num_examples = None

    def count(self, loader: Any) -> None:
        """Take N from the data loaders of all processes if it was not given."""
        if not self._given:
            self.num_examples = count_examples(loader)

    def set_epoch(self, epoch: float) -> None:
        """Set beta to the schedule's value."""
        self.beta = self.schedule(epoch)

    def of(self, model: nn.Module) -> Tensor | float:
        """`beta KL / N` of a model, with gradient."""
        if self.beta == 0:
            return 0.0
        assert self.num_examples is not None, "count comes first"
        return self.beta / self.num_examples * kl_divergence(model)
