"""Moving examples to a GPU: the same batches in the same order as on the CPU, from memory and from loader processes."""

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import svdcompress as svdc
from svdcompress.errors import DataError
from svdcompress.likelihoods import make_loss
from svdcompress.recipe import LossSection, Training
from svdcompress.sources import FromDataset, InMemory, _examples
from svdcompress.train import evaluate, fit

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def numbers(n=101):
    x = torch.arange(n * 3.0).view(n, 3)
    return x, (x[:, 0].long() // 3) % 4


class Rows(Dataset):
    """One example at a time; raises an error for the row `bad`."""

    def __init__(self, n=101, as_dict=False, bad=None):
        self.x, self.y = numbers(n)
        self.as_dict, self.bad = as_dict, bad

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        if row == self.bad:
            raise ValueError("this one is broken")
        x, y = self.x[row], self.y[row]
        return {"values": x, "twice": 2 * x, "labels": y} if self.as_dict else (x, y)


def flat(x):
    """The tensors of a batch in any form."""
    return [x] if isinstance(x, torch.Tensor) else list(x.values()) if isinstance(x, dict) else list(x)


def same(examples, size=16, **more):
    """Check that batches on the device equal those of the CPU; returns their number."""
    here, there = list(examples.batches(size, **more)), list(examples.batches(size, device="cuda", **more))
    assert len(here) == len(there)
    for (x, y), (moved, targets) in zip(here, there, strict=True):
        assert targets.is_cuda and torch.equal(targets.cpu(), y) and targets.dtype == y.dtype
        for one, other in zip(flat(x), flat(moved), strict=True):
            assert other.is_cuda and torch.equal(other.cpu(), one) and other.dtype == one.dtype
    return len(here)


FORMS = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, x.long()),
    "dict": lambda x: {"values": x, "ids": x.long()},
    "bytes": lambda x: (x % 256).to(torch.uint8),
}


@pytest.mark.parametrize("shuffle", [None, 3])
@pytest.mark.parametrize("resident", [True, False], ids=["moved at once", "moved by batches"])
@pytest.mark.parametrize("form", FORMS)
def test_batches_from_memory_are_those_of_the_cpu(form, resident, shuffle, monkeypatch):
    """Data too large for the device is moved batch by batch."""
    if not resident:
        monkeypatch.setattr(_examples, "ON_DEVICE_BYTES", 0)
    x, y = numbers()
    examples = InMemory(FORMS[form](x), y)
    assert same(examples, shuffle=shuffle) == 7
    assert same(examples.subset(torch.tensor([5, 3, 99])), shuffle=shuffle) == 1
    shares = [y for rank in range(2) for _, y in examples.batches(8, shuffle=3, rank=rank, world=2, device="cuda")]
    assert sum(map(len, shares)) == 96 and all(share.is_cuda for share in shares)


def test_augmentation_runs_on_the_device_and_in_training_alone():
    seen = []
    x, y = numbers()
    examples = InMemory(x, y, augment=lambda batch: (seen.append(batch.device.type), batch + 1)[1])
    plain = next(iter(examples.batches(16, device="cuda")))[0]
    assert not seen and torch.equal(plain.cpu(), x[:16])
    changed = torch.cat([batch for batch, _ in examples.batches(16, shuffle=0, device="cuda")])
    assert set(seen) == {torch.device("cuda").type}
    assert torch.equal(changed.cpu().sort(0).values, x + 1) and not torch.equal(changed.cpu(), x + 1)


@pytest.mark.parametrize("shuffle", [None, 3])
@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("as_dict", [False, True])
def test_batches_of_loader_processes_are_those_of_the_cpu(as_dict, workers, shuffle):
    """They come from pinned memory."""
    examples = FromDataset(Rows(as_dict=as_dict), workers=workers)
    assert same(examples, shuffle=shuffle) == 7
    assert same(examples.subset(torch.tensor([5, 3, 99, 7])), 2) == 2


def test_a_transform_sees_batches_on_the_device():
    seen = []
    transform = lambda batch: (seen.append(batch.device.type), batch / 3)[1]  # noqa: E731
    examples = FromDataset(Rows(), workers=2, transform=transform, augment=lambda batch: batch + 1)
    plain = torch.cat([x for x, _ in examples.batches(30, device="cuda")])
    assert set(seen) == {torch.device("cuda").type} and torch.allclose(plain.cpu(), numbers()[0] / 3)
    changed = torch.cat([x for x, _ in examples.batches(30, shuffle=1, device="cuda")])
    assert torch.allclose(changed.cpu().sort(0).values, numbers()[0] / 3 + 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_example_that_cannot_be_read_is_named(workers):
    with pytest.raises(DataError, match=r"could not be read: ValueError: this one is broken"):
        list(FromDataset(Rows(bad=40), workers=workers).batches(16, device="cuda"))


class Classes(Dataset):
    """Classifies the sign of a number; one in ten is positive."""

    def __init__(self, n=400):
        generator = torch.Generator().manual_seed(2)
        self.x = torch.randn(n, 4, generator=generator)
        self.y = (self.x[:, 0] > 1.28).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        return self.x[row], self.y[row]


@pytest.mark.parametrize("read", ["memory", "processes"])
def test_a_fit_by_batches_of_either_kind_ends_alike(read):
    """The order depends only on the seed, not on the device."""
    data, losses = Classes(), {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        examples = InMemory(data.x, data.y) if read == "memory" else FromDataset(data, workers=2)
        settings = Training(epochs=3, batch_size=50, lr=0.01)
        done = fit(model, examples, nn.functional.cross_entropy, settings, device=device)
        losses[device] = [row["loss"] for row in done.history]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-3) and losses["cuda"][-1] < losses["cuda"][0]


@pytest.mark.parametrize("name", ["cross-entropy", "binary"])
def test_weights_of_classes_follow_the_targets_to_the_device(name):
    torch.manual_seed(0)
    y = torch.tensor([0, 1, 0, 0, 1, 0])
    logits = torch.randn(6, 2) if name == "cross-entropy" else torch.randn(6)
    targets = y if name == "cross-entropy" else y.float()
    weights = torch.tensor([1.0, 5.0]) if name == "cross-entropy" else torch.tensor([5.0])
    loss = make_loss(LossSection(name=name), class_weights=weights)
    found = loss(logits.cuda().requires_grad_(), targets.cuda())
    assert found.is_cuda and float(found.detach()) == pytest.approx(float(loss(logits, targets)), rel=1e-5)
    plain = make_loss(LossSection(name=name))
    assert float(plain(logits, targets)) != pytest.approx(float(loss(logits, targets)), rel=1e-3)


def test_a_loss_with_weights_of_its_own_goes_along():
    """A loss that is a module is moved to the model's device; metrics are computed there."""
    data, settings = Classes(), Training(epochs=2, batch_size=50, lr=0.01)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0]))
    model = svdc.convert(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
    fit(model, InMemory(data.x, data.y), loss, settings, device="cuda")
    assert loss.weight.is_cuda
    found = evaluate(model, InMemory(data.x, data.y), "classification", device="cuda")
    expected = evaluate(model.cpu(), InMemory(data.x, data.y), "classification")
    assert found == pytest.approx(expected, rel=1e-3)
