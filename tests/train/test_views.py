"""Epochs that come again: the training is that by hand on the same batches, and the teacher is asked about each once."""

import copy
import random
from contextlib import nullcontext
from itertools import islice
from types import SimpleNamespace

import numpy
import pytest
import torch
from pydantic import ValidationError
from test_answers import LOSS, Counted, net, weights
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from svdcompress.errors import Interrupted, RecipeError
from svdcompress.recipe import Distillation, Training, load_recipe
from svdcompress.sources import FromDataset, InMemory
from svdcompress.train import _views, fit, mix

COUNT, BATCH = 61, 16
STEPS = 4  # in an epoch


def soft(views, **more):
    return Distillation(weight=0.7, temperature=3.0, views=views, **more)


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


def trained(student, teacher, distill, data=None, epochs=5, said=None, **more):
    fields = {"batch_size": BATCH} | {name: more.pop(name) for name in ("accumulate", "batch_size") if name in more}
    settings = Training(epochs=epochs, lr=1e-2, schedule={"name": "constant"}, **fields)
    more = {"device": "cpu", "on_note": lambda line, settled: (said if said is not None else []).append((line, settled))} | more
    fit(student, data or examples(), LOSS, settings, teacher=teacher, distill=distill, **more)
    return student


def by_hand(batches, targets, teacher, orders, accumulate=1):
    """Hinton's loss in plain PyTorch on batches that are known, the teacher asked about each of them anew."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
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


def orders(epochs, views):
    first = _views.first_view("train", max(views, 1))
    seeds = [mix(0, "view", (first + epoch) % views) if views else mix(0, "train", epoch, "order") for epoch in range(epochs)]
    return [torch.randperm(COUNT, generator=torch.Generator().manual_seed(seed)) for seed in seeds]


def epochs_of(seen):
    return [torch.cat(seen[start : start + STEPS]) for start in range(0, len(seen), STEPS)]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_training_is_that_by_hand_on_batches_that_come_again(accumulate):
    student, teacher, said = Watched(net()), Counted(net(5)), []
    trained(student, teacher, soft(2), said=said, accumulate=accumulate)
    assert teacher.asked == 2 * COUNT + BATCH  # each of two views once, and the first batch twice
    found = epochs_of(student.seen)
    assert all(torch.equal(found[epoch], found[epoch + 2]) for epoch in range(3))
    assert not torch.allclose(found[0][orders(1, 2)[0].argsort()], found[1][orders(2, 2)[1].argsort()], atol=0.1)
    given = student.seen, examples().targets
    hand, other = (by_hand(*given, net(seed), orders(5, 2), accumulate) for seed in (5, 6))
    assert torch.allclose(weights(student), weights(hand), atol=1e-6)
    assert not torch.allclose(weights(student), weights(other), atol=1e-3)
    assert not said


def test_without_views_each_epoch_draws_its_own():
    student, teacher = Watched(net()), Counted(net(5))
    trained(student, teacher, soft(0))
    assert teacher.asked == 5 * COUNT
    found = [epoch[order.argsort()] for epoch, order in zip(epochs_of(student.seen), orders(5, 0), strict=True)]
    assert all(not torch.allclose(one, other, atol=0.1) for i, one in enumerate(found) for other in found[:i])


def test_batches_that_come_again_meet_other_noise():
    """The network's own randomness does not repeat with the data's."""
    dropped = []
    dropout = nn.Dropout(0.5)
    dropout.register_forward_hook(lambda module, given, output: dropped.append(output == 0) if module.training else None)
    student = Watched(nn.Sequential(dropout, *net()))
    trained(student, Counted(net(5)), soft(1), epochs=2)
    first, second = epochs_of(student.seen)
    assert torch.equal(first, second)
    again = torch.cat(dropped[:STEPS]) == torch.cat(dropped[STEPS:])
    assert 0.3 < again.float().mean() < 0.7


def test_data_are_drawn_alike_whatever_the_network_draws():
    seen = []
    for more in ([], [nn.Dropout(0.5)]):
        student = Watched(nn.Sequential(*more, *net()))
        trained(student, Counted(net(5)), soft(2), epochs=3)
        seen.append(torch.cat(student.seen))
    assert torch.equal(*seen)


def test_a_stopped_fit_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr("svdcompress.train._state.SHARE_OF_TIME", 1e9)  # save after each epoch
    whole = weights(trained(net(), net(5), soft(2), state=tmp_path / "whole.pt"))
    asked = iter([False] * (3 * STEPS + 1))
    with pytest.raises(Interrupted, match="epoch 4 of 5"):
        trained(net(), net(5), soft(2), state=tmp_path / "parts.pt", stop=lambda: next(asked, True))
    teacher = Counted(net(5))
    assert torch.equal(weights(trained(net(), teacher, soft(2), state=tmp_path / "parts.pt")), whole)
    assert teacher.asked == 2 * COUNT + BATCH  # epoch 4 is the second view, epoch 5 the first: both are new to this process


def test_fits_of_one_run_share_their_views():
    """As the trials of a search do; where each begins, and so its training, does not depend on what is kept already."""
    held, teacher, alone = {}, Counted(net(5)), []
    stages = ("recover-1", "recover-2", "recover-3")
    assert len({_views.first_view(stage, 3) for stage in stages}) > 1
    for stage in stages:
        student, other = Watched(net()), Watched(net())
        trained(student, teacher, soft(3), epochs=3, stage=stage, held=held)
        trained(other, net(5), soft(3), epochs=3, stage=stage)
        assert torch.equal(weights(student), weights(other))
        alone.append(epochs_of(student.seen))
    assert teacher.asked == 3 * COUNT + BATCH
    views = [sorted(float(epoch.sum()) for epoch in epochs) for epochs in alone]
    assert views[0] == pytest.approx(views[1], rel=1e-5) == views[2]  # the same three, in turn
    assert len({float(epochs[0].sum()) for epochs in alone}) > 1  # but they begin with different ones
    trained(net(), teacher, soft(3), epochs=3, held=held, batch_size=20)
    assert teacher.asked == 3 * COUNT + BATCH + 3 * 60 + 20  # other batches; a last one of one example is left out


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
def test_a_dataset_that_draws_from_the_global_generators_comes_again(workers):
    student, teacher, said = Watched(net()), Counted(net(5)), []
    trained(student, teacher, soft(2), FromDataset(Shaky(), workers=workers), epochs=3, said=said)
    first, second, third = epochs_of(student.seen)
    assert torch.equal(first, third) and not torch.equal(first.sort(0).values, second.sort(0).values)
    assert teacher.asked == 2 * COUNT + BATCH and not said


def test_data_with_a_generator_of_their_own_are_told_and_taught_right():
    student, teacher, said = Watched(net()), Counted(net(5)), []
    trained(student, teacher, soft(2), FromDataset(Shaky(own=True)), said=said)
    assert len(said) == 1
    assert said[0][0].startswith("train.distill.views: batches do not come again as they were") and not said[0][1]
    assert teacher.asked == 5 * COUNT + BATCH
    hand = by_hand(student.seen, examples().targets, net(5), orders(5, 2))
    assert torch.allclose(weights(student), weights(hand), atol=1e-6)


def test_between_checks_a_changed_batch_is_found_at_the_next_one():
    """On devices where each check would wait, only some batches are compared, the first of an epoch among them."""
    calls = iter(range(10**6))
    data = examples(lambda x: x + (next(calls) >= STEPS))  # the first epoch alone is as it was
    student, teacher, said = Watched(net()), Counted(net(5)), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("svdcompress.train._loop.LOOK_EVERY", {"cpu": 3})
        trained(student, teacher, soft(1), data, epochs=3, said=said)
    assert len(said) == 1 and teacher.asked == 3 * COUNT + BATCH


class Fresh(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


@pytest.mark.parametrize(
    ("teacher", "most", "why"),
    [
        (nn.Sequential(net(5), Fresh()), None, "the teacher's outputs change from call to call"),
        (net(5), 2 * COUNT * 2 * 4 - 1, "would take 0.0 GB (1 would fit)"),
        (net(5), COUNT, "would take 0.0 GB, so"),
        (Counted(net(5), lambda logits: (logits, [logits])), None, "neither a tensor nor several"),
    ],
)
def test_outputs_that_cannot_be_kept_are_told(teacher, most, why, monkeypatch):
    if most is not None:
        monkeypatch.setattr(_views, "MOST_BYTES", most)
    teacher, said = Counted(copy.deepcopy(teacher)), []
    trained(net(), teacher, soft(2), said=said, epochs=3)
    assert len(said) == 1 and why in said[0][0] and "--set train.distill.views=0" in said[0][0] and not said[0][1]
    assert teacher.asked >= 3 * COUNT


def test_outputs_that_just_fit_are_kept(monkeypatch):
    monkeypatch.setattr(_views, "MOST_BYTES", 2 * (COUNT + 3) * 2 * 4)
    teacher, said = Counted(net(5)), []
    trained(net(), teacher, soft(2), said=said)
    assert teacher.asked == 2 * COUNT + BATCH and not said
    for held, kept in ((None, True), ({}, False)):  # other fits of the run would need the third view, too
        said.clear()
        trained(net(), net(5), soft(3), said=said, epochs=2, held=held)
        assert any("no epoch comes again" in line for line, _ in said)
        assert any("would take" in line for line, _ in said) != kept


def test_a_setting_that_changes_nothing_is_told():
    for distill, epochs, why in (
        (Distillation(views=2), 3, "it changes nothing, as distill.weight is 0"),
        (soft(3), 3, "no epoch comes again in 3 epochs, so only the trials"),
        (soft(2, layers=1.0), 3, "it changes nothing, as distill.layers needs the teacher in each step"),
    ):
        said, teacher = [], Counted(net(5))
        trained(net(), teacher, distill, epochs=epochs, said=said)
        assert [line for line, _ in said if why in line] and not said[0][1]
        assert teacher.asked >= (3 * COUNT if distill.wanted else 0)


def test_where_nothing_is_augmented_each_epoch_still_has_its_own_order():
    teacher = Counted(net(5))
    one = trained(net(), teacher, soft(2), examples(None))
    assert torch.equal(weights(one), weights(trained(net(), net(5), soft(0), examples(None))))
    assert teacher.asked == COUNT + BATCH // 2


def test_processes_take_their_parts_of_a_view():
    """Each process reads its own part, and the same one when the view comes again."""
    parts = {}
    for rank in range(2):
        settings = Training(epochs=4, batch_size=BATCH)
        teacher = SimpleNamespace(settings=soft(2), answer=net(5), layers=None)
        more = {"seed": 0, "stage": "train", "section": "train", "rank": rank, "world": 2, "on_note": None}
        more |= {"held": None, "compiled": False, "accelerator": SimpleNamespace(mixed_precision="no")}
        work = SimpleNamespace(examples=examples(), settings=settings, teacher=teacher, right=nullcontext(), **more)
        work.autocast = nullcontext
        views = _views.views_of(work, False)
        for epoch in range(3):
            stream = views.batches(epoch, check_every=1, rank=rank, world=2)
            parts[rank, epoch] = torch.cat([x for (x, _), _ in islice(stream, 2)])
    for rank in range(2):
        assert torch.equal(parts[rank, 0], parts[rank, 2]) and not torch.equal(parts[rank, 0], parts[rank, 1])
    assert not torch.equal(parts[0, 0], parts[1, 0])


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
    assert torch.equal(_views.marks(tensor), _views.marks(tensor.clone()))
    assert not torch.equal(_views.marks(tensor), _views.marks(flipped))
    named = {"x": (tensor, tensor[:1])}
    assert torch.equal(_views.marks(named), torch.cat([_views.marks(tensor), _views.marks(tensor[:1])]))


def test_marks_of_large_tensors_look_at_a_part(monkeypatch):
    monkeypatch.setattr(_views, "NUMBERS", 10)
    large = torch.rand(1000)
    changed = large.clone()
    changed[500] += 1
    assert not torch.equal(_views.marks(large), _views.marks(changed))
    changed = large.clone()
    changed[501] += 1  # not one of those that are looked at
    assert torch.equal(_views.marks(large), _views.marks(changed))


def test_a_recipe_sets_it_and_refuses_nonsense():
    assert load_recipe(None, ["recover.distill.views=8"]).recover.distill.views == 8
    with pytest.raises(RecipeError, match=r"recover\.distill\.views"):
        load_recipe(None, ["recover.distill.views=-1"])
    with pytest.raises(ValidationError):
        Distillation(views=1.5)
