"""Each process's part of the batches, against accelerate's own sampler."""

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler

from svdcompress.sources import InMemory


@pytest.mark.parametrize(("count", "batch", "world"), [(64, 8, 2), (70, 8, 2), (61, 4, 3), (5, 2, 4)])
@pytest.mark.parametrize("shuffle", [None, 7])
def test_parts_are_those_of_accelerate(count, batch, world, shuffle):
    data = InMemory(torch.arange(count)[:, None], torch.arange(count))
    order = torch.arange(count) if shuffle is None else torch.randperm(count, generator=torch.Generator().manual_seed(shuffle))
    sampler = BatchSampler(order.tolist(), batch * world, drop_last=shuffle is not None)  # training drops incomplete batches
    parts = []
    for rank in range(world):
        ours = [y.tolist() for _, y in data.batches(batch, shuffle=shuffle, rank=rank, world=world)]
        assert ours == list(BatchSamplerShard(sampler, world, rank, split_batches=True, even_batches=False))
        parts += [example for one in ours for example in one]
    assert len(set(parts)) == len(parts) == (count if shuffle is None else count - count % (batch * world))
