"""A teacher whose answers stay the same is asked once; the training equals one that asks it in each step."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from svdcompress.errors import Interrupted
from svdcompress.likelihoods import make_loss
from svdcompress.recipe import Distillation, LossSection, Training
from svdcompress.sources import InMemory
from svdcompress.train import _ask, fit, mix

LOSS = make_loss(LossSection())
SOFT = Distillation(weight=0.7, temperature=3.0)


def examples(count=61, augment=None):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(0))
    return InMemory(x, (x[:, 0] + x[:, 1] > 0).long(), augment)


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


def settings(**fields):
    return Training(**{"epochs": 3, "batch_size": 16, "lr": 1e-2, "schedule": {"name": "constant"}, **fields})


class Counted(nn.Module):
    """A teacher that counts the examples it is asked about."""

    def __init__(self, net, answer=lambda logits: logits):
        super().__init__()
        self.net, self.form, self.asked = net, answer, 0

    def forward(self, x):
        self.asked += len(x)
        return self.form(self.net(x))


def by_hand(model, teacher, data, epochs=3, batch=16, lr=1e-2, accumulate=1):
    """Hinton's loss in plain PyTorch; the teacher is asked in each step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for epoch in range(epochs):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(mix(0, "train", epoch, "order")))
        batches = order.split(batch)
        for index, rows in enumerate(batches):
            output = model(data.inputs[rows])
            with torch.no_grad():
                wanted = (teacher(data.inputs[rows]) / 3).softmax(1)
            soft = -9 * (wanted * ((output / 3).log_softmax(1) - wanted.log())).sum(1).mean()
            (0.3 * F.cross_entropy(output, data.targets[rows]) + 0.7 * soft).backward()
            if (index + 1) % accumulate == 0 or index + 1 == len(batches):
                group = (index % accumulate) + 1
                for parameter in model.parameters():
                    parameter.grad /= group
                optimizer.step()
                optimizer.zero_grad()
    return model


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_training_is_that_by_hand_with_a_teacher_asked_in_each_step(accumulate):
    ours, theirs, teacher, data = net(), net(), Counted(net(5)), examples()
    fit(ours, data, LOSS, settings(accumulate=accumulate), teacher=teacher, distill=SOFT, device="cpu")
    assert teacher.asked == 61 + 8  # all of them once, and half of the first batch again
    by_hand(theirs, net(5), data, accumulate=accumulate)
    assert torch.allclose(weights(ours), weights(theirs), atol=1e-6)
    assert not torch.allclose(weights(ours), weights(by_hand(net(), net(6), data, accumulate=accumulate)), atol=1e-3)


def test_what_has_names_and_pairs_are_kept_too():
    expected = net()
    fit(expected, examples(), LOSS, settings(), teacher=net(5), distill=SOFT, device="cpu")
    for form in (lambda logits: {"hidden": logits.sum(), "logits": logits}, lambda logits: [logits, logits.exp()]):
        model, teacher = net(), Counted(net(5), form)
        fit(model, examples(), LOSS, settings(), teacher=teacher, distill=SOFT, device="cpu")
        assert teacher.asked == 61 + 8
        assert torch.equal(weights(model), weights(expected))


def test_a_pair_of_mean_and_log_variance_is_kept_whole():
    data = InMemory(examples().inputs, examples().inputs[:, :1])
    pair = lambda output: (output[:, :1], output[:, 1:])  # noqa: E731
    models = []
    for form in (lambda output: output, pair):
        models.append(net())
        teacher = Counted(net(5), form)
        likelihood = {"task": "gaussian", "loss": make_loss(LossSection(name="gaussian-nll"))}
        fit(models[-1], data, settings=settings(), teacher=teacher, distill=SOFT, device="cpu", **likelihood)
        assert teacher.asked == 61 + 8
    assert torch.equal(weights(models[0]), weights(models[1]))


class Fresh(nn.Module):
    def forward(self, x):
        return x + 0.3 * torch.randn_like(x)


def bound_to_a_batch(logits):
    return logits - logits.mean(0)


def bound_to_earlier_rows(logits):
    return logits - logits.cumsum(0)


@pytest.mark.parametrize(
    ("changed", "teacher"),
    [
        ({"augment": lambda x: x + torch.randn_like(x)}, Counted(net(5))),
        ({"epochs": 1}, Counted(net(5))),
        ({"layers": 1.0}, Counted(net(5))),
        ({"most": 61 * 2 * 4 - 1}, Counted(net(5))),
        ({}, Counted(nn.Sequential(net(5), Fresh()))),  # its own randomness
        ({}, Counted(nn.Sequential(net(5), nn.BatchNorm1d(2, track_running_stats=False)))),
        ({}, Counted(net(5), bound_to_a_batch)),
        ({}, Counted(net(5), bound_to_earlier_rows)),
        ({}, Counted(net(5), lambda logits: {"logits": logits, "loss": logits.sum()})),
    ],
    ids=[
        "augmented",
        "one epoch",
        "layers",
        "too many",
        "by chance",
        "batch statistics",
        "of a batch",
        "of earlier rows",
        "named",
    ],
)
def test_it_is_asked_in_each_step_where_answers_change_or_count_once(changed, teacher, monkeypatch, request):
    changed, teacher = dict(changed), copy.deepcopy(teacher)
    monkeypatch.setattr(_ask, "MOST_BYTES", changed.pop("most", 2**29))
    data = examples(augment=changed.pop("augment", None))
    distill = Distillation(weight=0.7, layers=changed.pop("layers", 0.0))
    once = "named" in request.node.name  # the control: nothing prevents asking once
    fit(net(), data, LOSS, settings(**changed), teacher=teacher, distill=distill, device="cpu")
    epochs = changed.get("epochs", 3)
    assert (teacher.asked < epochs * 61) == once


def test_rounding_is_no_change():
    teacher, data = Counted(net(5), lambda logits: logits.bfloat16() + len(logits) / 4000), examples()
    fit(net(), data, LOSS, settings(), teacher=teacher, distill=SOFT, device="cpu")
    assert teacher.asked == 61 + 8


def test_a_stopped_fit_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr("svdcompress.train._state.SHARE_OF_TIME", 1e9)  # save after each epoch

    def run(name, stop=lambda: False):
        model, more = net(), {"teacher": net(5), "distill": SOFT, "device": "cpu", "state": tmp_path / name}
        fit(model, examples(), LOSS, settings(), stop=stop, **more)
        return weights(model)

    whole = run("whole.pt")
    asked = iter([False] * 9)
    with pytest.raises(Interrupted, match="epoch 2 of 3"):
        run("parts.pt", lambda: next(asked, True))
    assert torch.equal(run("parts.pt"), whole)


def test_a_stop_is_heard_while_the_teacher_is_asked(tmp_path):
    with pytest.raises(Interrupted, match=r"before its next epoch. The state before that is kept in .*fit\.pt"):
        state = {"state": tmp_path / "fit.pt"}
        fit(net(), examples(), LOSS, settings(), teacher=net(5), distill=SOFT, device="cpu", stop=lambda: True, **state)


def test_several_fits_with_one_teacher_ask_once_in_all():
    held, teacher, models = {}, Counted(net(5)), []
    for one in (held, None):
        model = net()
        for stage in ("a", "b"):  # one epoch each, like the parts of a search
            more = {"stage": stage, "teacher": teacher, "distill": SOFT, "device": "cpu", "held": one}
            fit(model, examples(), LOSS, settings(epochs=1), **more)
        models.append(model)
        assert teacher.asked == (61 + 8 if one is held else 61 + 8 + 2 * 61)
    assert torch.allclose(weights(models[0]), weights(models[1]), atol=1e-6)
    fit(net(), examples(), LOSS, settings(epochs=1, batch_size=20), teacher=teacher, distill=SOFT, device="cpu", held=held)
    assert teacher.asked == 61 + 8 + 2 * 61 + 61 + 10  # for other batches, so that a resumed run has the same bits
