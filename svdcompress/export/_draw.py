"""The module that a Monte-Carlo file is traced from: the statistics of one draw, and the outputs from their sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.errors import ExportError
from svdcompress.export._inputs import Signature
from svdcompress.export._noise import Call, Source, calls
from svdcompress.export._outputs import running
from svdcompress.export._trace import OWN, TRACE_BATCH
from svdcompress.likelihoods import Statistics

NOISE, SAMPLES, SEED, SUM = "noise", "samples", "seed", "sum_"


class DrawModule(nn.Module):
    """Runs a model once with given noise, and returns the statistics to add to the sums.

    model: a copy whose stochastic layers read their noise from `source`.
    """

    def __init__(self, model: nn.Module, source: Source, signature: Signature, statistics: Statistics) -> None:
        super().__init__()
        self.model = model
        self.source, self.signature, self.statistics = source, signature, statistics
        self.calls: list[Call] = []
        self.sums: list[tuple[int, ...]] = []
        self.widest = 1  # numbers in the widest activation, for one row of the batch

    def probe(self) -> None:
        """Record the calls of the layers, the widest activation, and the shapes of the sums, for one row of the batch."""
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
                    f"monte_carlo: the output has the shape {tuple(sums[0].shape)} for {batch} rows; the first dimension must "
                    "be the batch"
                )
            shapes.append([total.shape[1:] for total in sums])

        self.calls = calls(self.source, run, (TRACE_BATCH, TRACE_BATCH + 2))
        if not self.calls:
            raise ExportError("monte_carlo: the model's stochastic layers are not called: there is no uncertainty to sample")
        if shapes[0] != shapes[1]:
            raise ExportError("monte_carlo: the shape of the output depends on the batch size beyond its first dimension")
        self.sums = [tuple(shape) for shape in shapes[0]]

    def size(self, batch: Any) -> Any:
        """How many numbers of noise one draw takes at a batch size."""
        return sum(call.size(batch) for call in self.calls)

    def of_draw(self, tensors: Sequence[Tensor], chunks: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Statistics of one draw. chunks: for each call its noise, or the drawn parameter if the source is `placed`."""
        self.source.give(chunks)
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
    """Everything that the file computes, except for the loop and the draws themselves.

    (*inputs, *chunks, *sums, samples) -> (*statistics of one draw, *outputs); chunks: for each call its noise, flattened, or
    the drawn parameter.
    """

    def __init__(self, draw: DrawModule) -> None:
        super().__init__()
        self.draw = draw
        self.names = [f"statistic_{i}" for i in range(len(draw.sums))]
        self.names += list(draw.statistics.outputs(self._example_sums(1), torch.tensor(1)))

    def _example_sums(self, batch: int) -> tuple[Tensor, ...]:
        return tuple(torch.full((batch, *shape), 0.5, dtype=torch.float64) for shape in self.draw.sums)

    def forward(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        draw, rest = self.draw, iter(arguments)
        tensors, chunks, sums = (list(islice(rest, len(part))) for part in (draw.signature.names, draw.calls, draw.sums))
        (samples,) = rest
        return (*draw.of_draw(tensors, chunks), *draw.statistics.outputs(tuple(sums), samples).values())

    def examples(self, batch: int) -> list[Tensor]:
        """Example arguments of a batch size."""
        chunks = [_example(call, batch) for call in self.draw.calls]

        def answer(tensors: list[Tensor]) -> dict[str, Tensor]:
            return dict(zip(self.names, self.draw.of_draw(tensors, chunks), strict=False))

        tensors, _ = self.draw.signature.tried(batch, answer)
        return [*tensors, *chunks, *self._example_sums(batch), torch.tensor(2)]

    def argument_names(self) -> list[str]:
        chunks = [chunk_name(i) for i in range(len(self.draw.calls))]
        sums = [f"{SUM}{i}" for i in range(len(self.draw.sums))]
        return [*self.draw.signature.names, *chunks, *sums, SAMPLES]

    def dynamic(self, batch: Any) -> list[dict[int, Any]]:
        """The dynamic dimensions of each argument, in terms of the dimension `batch`."""
        inputs = len(self.draw.signature.names)
        chunks: list[dict[int, Any]] = [{0: call.size(batch)} if call.per_row else {} for call in self.draw.calls]
        return [*({0: batch} for _ in range(inputs)), *chunks, *({0: batch} for _ in self.draw.sums), {}]


def chunk_name(index: int) -> str:
    """Name of the traced graph's input for the chunk of a call."""
    return f"{OWN}chunk_{index}"


def _example(call: Call, batch: int) -> Tensor:
    noise = torch.linspace(-1, 1, call.size(batch))
    return noise if call.posterior is None else call.posterior.at(noise)


@torch.no_grad()
def oracle(draw: DrawModule, tensors: Sequence[Tensor], noise: Tensor) -> dict[str, Tensor]:
    """The outputs that the file must give for noise of shape (samples, size(batch)), one draw at a time. draw: of a model
    that was made to `listen`."""
    batch = tensors[0].shape[0]
    sums = [torch.zeros((batch, *shape), dtype=torch.float64) for shape in draw.sums]
    for row in noise:
        chunks = row.split([call.size(batch) for call in draw.calls])
        sums = [total + new for total, new in zip(sums, draw.of_draw(tensors, chunks), strict=True)]
    return draw.statistics.outputs(tuple(sums), torch.tensor(len(noise)))
