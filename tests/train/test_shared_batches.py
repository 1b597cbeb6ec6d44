"""Fits that share their batches: each is the training by hand on them, and the teacher is asked about each batch once."""

import copy
import random
from contextlib import nullcontext
from itertools import islice
from types import SimpleNamespace

import numpy
import pytest
import torch
from test_answers import LOSS, Counted, net, weights
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from svdcompress.errors import Interrupted
from svdcompress.recipe import Distillation, Training
from svdcompress.sources import FromDataset, InMemory
from svdcompress.train import _shared, fit, mix

COUNT, BATCH = 61, 16
STEPS = 4  # in an epoch
SOFT = Distillation(weight=0.7, temperature=3.0)


def shaken(x):
    return x + 0.5 * torch.randn_like(x)


def examples(augment=shaken, count=COUNT):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(0))
    return InMemory(x, (x[:, 0] + x[:, 1] > 0).long(), augment)


class Watched(nn.Module):
    """A student that notes the batches it is trained on."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.seen = inner, []

    def forward(self, x):
        if self.training:
            self.seen.append(x.clone())
        return self.inner(x)


def trained(student, teacher, held, data=None, *, epochs=3, stage="a", distill=SOFT, shared=True, **more):
    fields = {"batch_size": BATCH} | {name: more.pop(name) for name in ("accumulate", "batch_size") if name in more}
    settings = Training(epochs=epochs, lr=1e-2, schedule={"name": "constant"}, **fields)
    more = {"teacher": teacher, "distill": distill, "held": held, "shared": shared, "stage": stage, "device": "cpu"} | more
    fit(student, data or examples(), LOSS, settings, **more)
    return student


def by_hand(batches, teacher, accumulate=1, start=0):
    """Hinton's loss in plain PyTorch on batches that are known, the teacher asked about each of them anew."""
    model, targets = net(start), examples().targets
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    seeds = [mix(0, "shared", epoch) for epoch in range(len(batches) // STEPS)]
    orders = [torch.randperm(COUNT, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    rows = [part for order in orders for part in order.split(BATCH)]
    for step, (x, which) in enumerate(zip(batches, rows, strict=True)):
        output = model(x)
        with torch.no_grad():
            wanted = (teacher(x) / 3).softmax(1)
        soft_loss = -9 * (wanted * ((output / 3).log_softmax(1) - wanted.log())).sum(1).mean()
        (0.3 * F.cross_entropy(output, targets[which]) + 0.7 * soft_loss).backward()
        place = step % STEPS
        if (place + 1) % accumulate == 0 or place + 1 == STEPS:
            for parameter in model.parameters():
                parameter.grad /= place % accumulate + 1
            optimizer.step()
            optimizer.zero_grad()
    return model


def epochs_of(seen):
    return [torch.cat(seen[start : start + STEPS]) for start in range(0, len(seen), STEPS)]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_each_fit_is_that_by_hand_on_the_same_batches(accumulate):
    held, teacher, seen = {}, Counted(net(5)), []
    for start, stage in enumerate(("a", "b")):
        student = Watched(net(start))
        trained(student, teacher, held, stage=stage, accumulate=accumulate)
        seen.append(student.seen)
        hand, other = (by_hand(student.seen, net(seed), accumulate, start) for seed in (5, 6))
        assert torch.allclose(weights(student), weights(hand), atol=1e-6)
        assert not torch.allclose(weights(student), weights(other), atol=1e-3)
    assert teacher.asked == 3 * COUNT + BATCH  # each once, and the first batch twice
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))
    sums = [float(epoch.sum()) for epoch in epochs_of(seen[0])]
    assert len(set(sums)) == 3  # each epoch has its own augmentation
    trained(net(), teacher, held, batch_size=20)
    assert teacher.asked == 3 * COUNT + BATCH + 3 * 60 + 20  # other batches; a last one of one example is left out


def test_without_it_each_fit_draws_its_own():
    teacher, seen = Counted(net(5)), []
    for stage, more in (("a", {"shared": False}), ("b", {"shared": False}), ("b", {"held": None})):
        student = Watched(net())
        trained(student, teacher, **({"held": {}} | more), stage=stage)
        seen.append(student.seen)
    assert teacher.asked == 3 * 3 * COUNT
    assert not torch.equal(seen[0][0], seen[1][0]) and torch.equal(seen[1][0], seen[2][0])


def test_the_same_batches_meet_other_noise():
    """The network's own randomness differs between stages, and does not change what the data draw."""
    dropped, seen, held = [], [], {}
    for stage, p in (("a", 0.5), ("b", 0.5), ("c", 0.0)):
        dropout = nn.Dropout(p)
        dropout.register_forward_hook(lambda module, given, output: dropped.append(output == 0) if module.training else None)
        student = Watched(nn.Sequential(dropout, *net()))
        trained(student, net(5), held, stage=stage, epochs=2)
        seen.append(torch.cat(student.seen))
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])
    steps = 2 * STEPS
    again = torch.cat(dropped[:steps]) == torch.cat(dropped[steps : 2 * steps])
    assert 0.3 < again.float().mean() < 0.7


def test_a_stopped_fit_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr("svdcompress.train._state.SHARE_OF_TIME", 1e9)  # save after each epoch
    whole = weights(trained(net(), net(5), {}, state=tmp_path / "whole.pt"))
    asked = iter([False] * (STEPS + 1))
    with pytest.raises(Interrupted, match="epoch 2 of 3"):
        trained(net(), net(5), {}, state=tmp_path / "parts.pt", stop=lambda: next(asked, True))
    teacher = Counted(net(5))
    assert torch.equal(weights(trained(net(), teacher, {}, state=tmp_path / "parts.pt")), whole)
    assert teacher.asked == 2 * COUNT + BATCH  # what the earlier process kept is gone
    other = trained(net(), net(6), held := {}, stage="b", epochs=1)
    held.clear()
    assert torch.equal(weights(other), weights(trained(net(), net(6), held, stage="b", epochs=1)))


class Shaky(Dataset):
    """Draws from each generator that a dataset uses, or from its own."""

    def __init__(self, own=False):
        self.data, self.own = examples(), numpy.random.default_rng(0) if own else None

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        drawn = torch.rand(1) + random.random() + numpy.random.rand() if self.own is None else self.own.random()
        return self.data.inputs[index] + drawn, self.data.targets[index]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_draws_from_the_global_generators_gives_the_same_batches(workers):
    held, teacher, seen = {}, Counted(net(5)), []
    for stage in ("a", "b"):
        student = Watched(net())
        trained(student, teacher, held, FromDataset(Shaky(), workers=workers), stage=stage, epochs=2)
        seen.append(torch.cat(student.seen))
    assert torch.equal(*seen) and teacher.asked == 2 * COUNT + BATCH
    first, second = seen[0].split(COUNT)
    assert not torch.equal(first.sort(0).values, second.sort(0).values)


def test_data_with_a_generator_of_their_own_are_taught_right():
    held, teacher, data = {}, Counted(net(5)), FromDataset(Shaky(own=True))
    for count, stage in enumerate(("a", "b"), 1):
        student = Watched(net())
        trained(student, teacher, held, data, stage=stage)
        assert torch.allclose(weights(student), weights(by_hand(student.seen, net(5))), atol=1e-6)
        assert teacher.asked == count * 3 * COUNT + BATCH


def test_a_changed_batch_is_found_at_the_next_check():
    """On devices where each check would wait, only some batches are compared, the first of an epoch among them."""
    calls, held, teacher = iter(range(10**6)), {}, Counted(net(5))
    data = examples(lambda x: x + (next(calls) >= 3 * STEPS))  # the second fit's are others
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("svdcompress.train._loop.LOOK_EVERY", {"cpu": 3})
        for stage in ("a", "b"):
            trained(net(), teacher, held, data, stage=stage)
    assert teacher.asked == 2 * 3 * COUNT + BATCH


class Fresh(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


@pytest.mark.parametrize(
    ("teacher", "most"),
    [
        (nn.Sequential(net(5), Fresh()), 2**29),  # its own randomness
        (net(5), 3 * COUNT * 2 * 4 - 1),
        (Counted(net(5), lambda logits: (logits, [logits])), 2**29),
    ],
    ids=["by chance", "too many", "nested"],
)
def test_it_is_asked_in_each_step_where_outputs_cannot_be_kept(teacher, most, monkeypatch):
    monkeypatch.setattr(_shared, "MOST_BYTES", most)
    teacher, held = Counted(copy.deepcopy(teacher)), {}
    for stage in ("a", "b"):
        trained(net(), teacher, held, stage=stage)
    assert teacher.asked >= 2 * 3 * COUNT


def test_outputs_that_just_fit_are_kept(monkeypatch):
    monkeypatch.setattr(_shared, "MOST_BYTES", 3 * COUNT * 2 * 4)
    teacher, held = Counted(net(5)), {}
    for stage in ("a", "b"):
        trained(net(), teacher, held, stage=stage)
    assert teacher.asked == 3 * COUNT + BATCH


def test_where_there_is_nothing_to_gain_nothing_changes():
    """Examples that do not change, whose answers are known before; layers, which need the teacher; no teacher."""
    for data, distill in (
        (examples(None), SOFT),
        (examples(), Distillation(weight=0.7, layers=1.0)),
        (examples(), Distillation()),
    ):
        one, other = (trained(net(), net(5), {}, data, distill=distill, shared=shared) for shared in (True, False))
        assert torch.equal(weights(one), weights(other))


def test_processes_take_their_parts_of_a_batch():
    parts = {}
    for rank in range(2):
        for stage in ("a", "b"):
            teacher = SimpleNamespace(settings=SOFT, answer=net(5), layers=None)
            more = {"seed": 0, "stage": stage, "section": "train", "rank": rank, "world": 2, "held": {}, "shared": True}
            more |= {"compiled": False, "accelerator": SimpleNamespace(mixed_precision="no"), "lower": nullcontext}
            settings = Training(epochs=4, batch_size=BATCH)
            work = SimpleNamespace(examples=examples(), settings=settings, teacher=teacher, **more)
            stream = _shared.shared_batches(work).batches(1, check_every=1, rank=rank, world=2)
            parts[rank, stage] = torch.cat([x for (x, _), _ in islice(stream, 2)])
    assert all(torch.equal(parts[rank, "a"], parts[rank, "b"]) for rank in range(2))
    assert not torch.equal(parts[0, "a"], parts[1, "a"])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(3, 8),
        torch.rand(3, 8).double(),
        torch.rand(3, 8).half(),
        torch.randint(9, (3, 8)),
        torch.randint(255, (3, 8), dtype=torch.uint8),
        torch.rand(3, 8) > 0.5,
        torch.rand(3, 8, dtype=torch.cfloat),
        torch.rand(3, 8).T,
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_marks_tell_a_batch_from_its_mirror_image(tensor):
    flipped = tensor.flip(1)
    assert torch.equal(_shared.marks(tensor), _shared.marks(tensor.clone()))
    assert not torch.equal(_shared.marks(tensor), _shared.marks(flipped))
    named = {"x": (tensor, tensor[:1])}
    assert torch.equal(_shared.marks(named), torch.cat([_shared.marks(tensor), _shared.marks(tensor[:1])]))


def test_marks_of_large_tensors_look_at_a_part(monkeypatch):
    monkeypatch.setattr(_shared, "NUMBERS", 10)
    large = torch.rand(1000)
    changed = large.clone()
    changed[500] += 1
    assert not torch.equal(_shared.marks(large), _shared.marks(changed))
    changed = large.clone()
    changed[501] += 1  # not one of those that are looked at
    assert torch.equal(_shared.marks(large), _shared.marks(changed))
