"""The module that a Monte-Carlo file is traced from: one draw's statistics, and the outputs from their sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.errors import ExportError
from svdcompress.export._inputs import Signature
from svdcompress.export._noise import Call, Source, calls
from svdcompress.export._outputs import running
from svdcompress.export._statistics import Statistics
from svdcompress.export._trace import TRACE_BATCH

NOISE, SAMPLES, SUM = "noise", "samples", "sum_"


class Draw(nn.Module):
    """One pass of a model with given noise, and the statistics that it adds to the sums.

    model: a copy whose stochastic layers read `source`.
    """

    def __init__(self, model: nn.Module, source: Source, signature: Signature, statistics: Statistics) -> None:
        super().__init__()
        self.model = model
        self.source, self.signature, self.statistics = source, signature, statistics
        self.calls: list[Call] = []
        self.sums: list[tuple[int, ...]] = []
        self.widest = 1  # numbers in the widest activation, for one row of the batch

    def probe(self) -> None:
        """Find out about the calls of the layers, and the shapes of the sums for one row of the batch."""
        shapes: list[list[torch.Size]] = []

        def run(batch: int) -> None:
            def look(module: nn.Module, args: Any, output: Any) -> None:
                if isinstance(output, Tensor):
                    self.widest = max(self.widest, math.ceil(output.numel() / batch))

            tensors = self.signature.resized(batch)
            with running(self.model, self.signature.names, tensors), _hooked(self.model, look):
                sums = self.statistics.of_draw(self.signature.call(self.model, tensors))
            if any(total.shape[:1] != (batch,) for total in sums):
                raise ExportError(
                    f"monte_carlo: the output has the shape {tuple(sums[0].shape)} for {batch} rows; the batch goes first"
                )
            shapes.append([total.shape[1:] for total in sums])

        self.calls = calls(self.source, run, (TRACE_BATCH, TRACE_BATCH + 2))
        if not self.calls:
            raise ExportError("monte_carlo: the model's stochastic layers are not called: there is no uncertainty to sample")
        if shapes[0] != shapes[1]:
            raise ExportError("monte_carlo: the shape of the output depends on the batch size beyond its first dimension")
        self.sums = [tuple(shape) for shape in shapes[0]]

    def may_repeat(self) -> bool:
        """Whether a round of the loop may make several draws: by the noise's shapes, the batch goes first everywhere."""
        return all(call.shape[:1] == (None,) and None not in call.shape[1:] and not call.fixed for call in self.calls)

    def size(self, batch: Any) -> Any:
        """Numbers that one draw takes at a batch size."""
        return sum(call.size(batch) for call in self.calls)

    def of_draw(self, tensors: Sequence[Tensor], noise: Tensor) -> tuple[Tensor, ...]:
        """Statistics of one draw. noise: (size(batch),)."""
        batch = tensors[0].shape[0]
        self.source.give(noise.split([call.size(batch) for call in self.calls]))
        return self.statistics.of_draw(self.signature.call(self.model, tensors))


@contextmanager
def _hooked(model: nn.Module, hook: Callable[..., None]) -> Iterator[None]:
    handles = [module.register_forward_hook(hook) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Traced(nn.Module):
    """All that the file computes but the loop: (*inputs, noise, *sums, samples) -> (*statistics of one draw, *outputs)."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.draw = draw
        self.names = [f"statistic_{i}" for i in range(len(draw.sums))]
        self.names += list(draw.statistics.outputs(self._example_sums(1), torch.tensor(1)))

    def _example_sums(self, batch: int) -> tuple[Tensor, ...]:
        return tuple(torch.full((batch, *shape), 0.5, dtype=torch.float64) for shape in self.draw.sums)

    def forward(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        tensors, noise, sums, samples = self._parts(arguments)
        return (*self.draw.of_draw(tensors, noise), *self.draw.statistics.outputs(sums, samples).values())

    def _parts(self, arguments: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor, tuple[Tensor, ...], Tensor]:
        count = len(self.draw.signature.names)
        return arguments[:count], arguments[count], tuple(arguments[count + 1 : -1]), arguments[-1]

    def examples(self, batch: int) -> list[Tensor]:
        """Arguments of a batch size."""
        noise = torch.linspace(-1, 1, self.draw.size(batch))
        return [*self.draw.signature.varied(batch), noise, *self._example_sums(batch), torch.tensor(2)]

    def argument_names(self) -> list[str]:
        sums = [f"{SUM}{i}" for i in range(len(self.draw.sums))]
        return [*self.draw.signature.names, NOISE, *sums, SAMPLES]

    def dynamic(self, batch: Any) -> list[dict[int, Any]]:
        """What is dynamic of each argument, in terms of the dimension `batch`."""
        inputs = len(self.draw.signature.names)
        numbers = sum(call.per_row for call in self.draw.calls) * batch + sum(call.fixed for call in self.draw.calls)
        return [*({0: batch} for _ in range(inputs)), {0: numbers}, *({0: batch} for _ in self.draw.sums), {}]


@torch.no_grad()
def oracle(draw: Draw, tensors: Sequence[Tensor], noise: Tensor) -> dict[str, Tensor]:
    """What the file has to give for a noise of shape (samples, size(batch)), the slow way."""
    sums = [torch.zeros((tensors[0].shape[0], *shape), dtype=torch.float64) for shape in draw.sums]
    for row in noise:
        sums = [total + new for total, new in zip(sums, draw.of_draw(tensors, row), strict=True)]
    return draw.statistics.outputs(tuple(sums), torch.tensor(len(noise)))
