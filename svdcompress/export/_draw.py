"""The module that a Monte-Carlo file is traced from: the statistics of one draw, and the outputs from their sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.errors import ExportError
from svdcompress.export._inputs import Signature
from svdcompress.export._noise import Call, Source, calls, same_noise
from svdcompress.export._outputs import running
from svdcompress.export._parity import BATCHES
from svdcompress.export._trace import OWN, TRACE_BATCH
from svdcompress.hooks import hooked
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
        self.sums: list[tuple[int | None, ...]] = []  # shapes but for the batch, with None for what open dimensions change
        self.widest = 1  # numbers in the widest activation, for one row of the batch

    def probe(self) -> None:
        """Record the calls of the layers, the widest activation, and the shapes of the sums, for one row of the batch."""
        shapes: dict[int, list[torch.Size]] = {}

        def run(batch: int) -> None:
            def look(module: nn.Module, args: Any, output: Any) -> None:
                if isinstance(output, Tensor):
                    self.widest = max(self.widest, math.ceil(output.numel() / batch))

            tensors = self.signature.resized(batch)
            hooks = (module.register_forward_hook(look) for module in self.model.modules())
            with running(self.model, self.signature.names, tensors), hooked(hooks):
                sums = self.statistics.of_draw(self.signature.call(self.model, tensors))
            if any(total.shape[:1] != (batch,) for total in sums):
                raise ExportError(
                    f"monte_carlo: the output has the shape {tuple(sums[0].shape)} for {batch} rows; the first dimension must "
                    "be the batch"
                )
            shapes[batch] = [total.shape[1:] for total in sums]

        first, second = TRACE_BATCH, TRACE_BATCH + 2
        self.calls = calls(self.source, run, (first, second))
        if not self.calls:
            raise ExportError("monte_carlo: the model's stochastic layers are not called: there is no uncertainty to sample")
        if shapes[first] != shapes[second]:
            raise ExportError("monte_carlo: the shape of the output depends on the batch size beyond its first dimension")
        if self.signature.open:
            for batch in (BATCHES[0], BATCHES[-1]):  # these have other sizes
                same_noise(self.source, run, batch, self.calls)
        self._shapes = {batch: [tuple(shape) for shape in found] for batch, found in shapes.items()}
        self.sums = [_in_common(each) for each in zip(*self._shapes.values(), strict=True)]

    def example_sums(self, batch: int) -> tuple[Tensor, ...]:
        """Sums of the shapes that they have at a batch size of the checks."""
        known = self._shapes.get(batch, self._shapes[TRACE_BATCH])
        return tuple(torch.full((batch, *shape), 0.5, dtype=torch.float64) for shape in known)

    def size(self, batch: Any) -> Any:
        """How many numbers of noise one draw takes at a batch size."""
        return sum(call.size(batch) for call in self.calls)

    def of_draw(self, tensors: Sequence[Tensor], chunks: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Statistics of one draw. chunks: for each call its noise, or the drawn parameter if the source is `placed`."""
        self.source.give(chunks)
        return self.statistics.of_draw(self.signature.call(self.model, tensors))


def _in_common(shapes: Sequence[tuple[int, ...]]) -> tuple[int | None, ...]:
    """The sizes that all shapes have, None where they differ. Raises ExportError if they differ in their number."""
    if len({len(shape) for shape in shapes}) > 1:
        raise ExportError("monte_carlo: the number of the output's dimensions depends on the sizes of `dynamic_axes`")
    return tuple(sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*shapes, strict=True))


class Traced(nn.Module):
    """Everything that the file computes, except for the loop and the draws themselves.

    (*inputs, *chunks, *sums, samples) -> (*statistics of one draw, *outputs); chunks: for each call its noise, flattened, or
    the drawn parameter.
    """

    def __init__(self, draw: DrawModule) -> None:
        super().__init__()
        self.draw = draw
        self.names = [f"statistic_{i}" for i in range(len(draw.sums))]
        self.names += list(draw.statistics.outputs(draw.example_sums(1), torch.tensor(1)))

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
        return [*tensors, *chunks, *self.draw.example_sums(batch), torch.tensor(2)]

    def argument_names(self) -> list[str]:
        chunks = [chunk_name(i) for i in range(len(self.draw.calls))]
        sums = [f"{SUM}{i}" for i in range(len(self.draw.sums))]
        return [*self.draw.signature.names, *chunks, *sums, SAMPLES]

    def dynamic(self, batch: Any) -> list[dict[int, Any]]:
        """The dynamic dimensions of each argument, in terms of the dimension `batch`."""
        chunks: list[dict[int, Any]] = [{0: call.size(batch)} if call.per_row else {} for call in self.draw.calls]
        free = torch.export.Dim.DYNAMIC
        sums = [{0: batch, **{dim: free for dim, size in enumerate(shape, 1) if size is None}} for shape in self.draw.sums]
        return [*self.draw.signature.open.dynamic(batch), *chunks, *sums, {}]


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
    sizes = [call.size(batch) for call in draw.calls]
    draws = [draw.of_draw(tensors, row.split(sizes)) for row in noise]
    sums = tuple(torch.stack([each.double() for each in column]).sum(0) for column in zip(*draws, strict=True))
    return draw.statistics.outputs(sums, torch.tensor(len(noise)))
