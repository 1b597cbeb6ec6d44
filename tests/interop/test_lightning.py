"""The Lightning callback against a hand-written loop."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)

import svdcompress as svdc
from svdcompress.errors import UsageError

L = pytest.importorskip("lightning.pytorch")
from lightning.pytorch import tuner  # noqa: E402

from svdcompress.interop.lightning import SparsifyCallback  # noqa: E402

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}


class Module(L.LightningModule):
    """A user's module, with attribute names of its own."""

    def __init__(self, as_dict: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.as_dict = as_dict

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.body(batch[0]), batch[1])
        return {"loss": loss, "more": 1} if self.as_dict else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data(count: int = 12) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randint(3, (count,), generator=generator))


def by_hand(module: Module, batches: list, steps_of: int, beta: float, count: int) -> nn.Module:
    """The same training without Lightning: the mean loss of a step, plus beta KL / N once."""
    model = copy.deepcopy(module.body)
    svdc.convert(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for first in range(0, len(batches), steps_of):
        optimizer.zero_grad()
        some = batches[first : first + steps_of]
        nll = sum(nn.functional.cross_entropy(model(x), y) for x, y in some) / len(some)
        layers = [layer for layer in model if isinstance(layer, nn.Linear)]
        kl = sum((0.5 * ((w.weight**2 + w.log_sigma2.exp() + 1e-8).log() - w.log_sigma2)).sum() for w in layers)
        (nll + beta / count * kl).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(("accumulate", "as_dict"), [(1, False), (3, True)])
def test_it_trains_as_a_loop_written_by_hand(accumulate, as_dict):
    module, loader = Module(as_dict), DataLoader(data(), batch_size=2)
    reference = copy.deepcopy(module)
    callback = SparsifyCallback(schedule=0.7)
    trainer = L.Trainer(max_epochs=1, accumulate_grad_batches=accumulate, callbacks=[callback], **QUIET)
    torch.manual_seed(5)
    trainer.fit(module, loader)
    torch.manual_seed(5)
    expected = by_hand(reference, list(loader), accumulate, 0.7, 12)
    for ours, theirs in zip(module.body.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert not torch.equal(module.body[0].log_sigma2, torch.full_like(module.body[0].log_sigma2, -10.0))


def test_beta_follows_the_schedule_within_the_epoch_and_the_module_is_left_as_it_was():
    seen = []

    class Watch(SparsifyCallback):
        def on_train_batch_end(self, *args, **kwargs):
            seen.append(self.penalty.beta)

    module = Module()
    trainer = L.Trainer(max_epochs=2, callbacks=[Watch(schedule=svdc.LinearWarmup(start=0, stop=2))], **QUIET)
    trainer.fit(module, DataLoader(data(), batch_size=3))
    assert seen == pytest.approx([i / 8 for i in range(8)])
    assert "training_step" not in vars(module)
    assert set(trainer.callback_metrics) >= {"svdc_beta", "svdc_sparsity"}


def test_what_cannot_work_is_said():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(data())

    with pytest.raises(UsageError, match="num_examples"):
        L.Trainer(max_epochs=1, callbacks=[SparsifyCallback()], **QUIET).fit(Module(), DataLoader(Stream(), batch_size=2))
    manual = Module()
    manual.automatic_optimization = False
    with pytest.raises(UsageError, match="optimizes manually"):
        L.Trainer(max_epochs=1, callbacks=[SparsifyCallback()], **QUIET).fit(manual, DataLoader(data(), batch_size=2))
    with pytest.raises(UsageError, match="num_examples: 0"):
        SparsifyCallback(num_examples=0)


@pytest.mark.parametrize("again", ["same module", "same callback", "both"])
def test_after_a_training_that_broke_off_the_kl_counts_once(again):
    class Break(L.Callback):
        def on_train_batch_end(self, *args):
            raise RuntimeError("out of memory")

    added = []

    class Watched(Module):
        def training_step(self, batch, index):
            self.nll = super().training_step(batch, index)
            return self.nll

    class Watch(L.Callback):
        def on_before_backward(self, trainer, module, loss):
            added.append((loss - module.nll).item() / (svdc.kl_divergence(module).item() / 12))

    module, callback, loader = Watched(), SparsifyCallback(schedule=1.0), DataLoader(data(), batch_size=6)
    with pytest.raises(RuntimeError, match="out of memory"):
        L.Trainer(max_epochs=1, callbacks=[callback, Break()], **QUIET).fit(module, loader)
    assert "training_step" not in vars(module)
    module = Watched() if again == "same callback" else module
    callback = SparsifyCallback(schedule=1.0) if again == "same module" else callback
    L.Trainer(max_epochs=1, callbacks=[callback, Watch()], **QUIET).fit(module, loader)
    assert added == pytest.approx([1.0] * 2, rel=1e-3)


@pytest.mark.parametrize("apart", [False, True])
def test_weight_decay_of_the_variances_is_told_of(apart, recwarn):
    class Decaying(Module):
        def configure_optimizers(self):
            variances = svdc.layers.variance_parameters(self)
            own = {id(p) for p in variances}
            groups = [
                {"params": [p for p in self.parameters() if id(p) not in own], "weight_decay": 0.1},
                {"params": variances, "weight_decay": 0.0 if apart else 0.1},
            ]
            return torch.optim.AdamW(groups, lr=0.1)

    trainer = L.Trainer(max_epochs=1, callbacks=[SparsifyCallback(schedule=0.1)], **QUIET)
    trainer.fit(Decaying(), DataLoader(data(), batch_size=6))
    said = [str(one.message) for one in recwarn if "weight decay" in str(one.message)]
    assert len(said) == (not apart) and all("variance_parameters" in line for line in said)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_variances_in_half_precision_are_told_of(precision, recwarn):
    trainer = L.Trainer(max_epochs=1, precision=precision, callbacks=[SparsifyCallback(schedule=1.0)], **QUIET)
    module = Module()
    trainer.fit(module, DataLoader(data(), batch_size=2))
    learned = any((layer.log_sigma2 != -10).any() for layer in module.body if isinstance(layer, nn.Linear))
    said = [str(one.message) for one in recwarn if "cannot be trained in bfloat16" in str(one.message)]
    assert learned == (precision == "bf16-mixed") and len(said) == (not learned)
    assert all("(body.0, body.2)" in line and 'precision="bf16-mixed"' in line for line in said)


def test_n_is_that_of_the_examples_that_a_sampler_takes():
    def counted(sampler) -> int:
        callback = SparsifyCallback()
        callback.penalty.count(DataLoader(data(), batch_size=2, sampler=sampler))
        return callback.penalty.num_examples

    wrapper = pytest.importorskip("lightning.fabric.utilities.distributed").DistributedSamplerWrapper
    subset = SubsetRandomSampler(range(5))
    assert counted(None) == counted(RandomSampler(data(), num_samples=30, replacement=True)) == 12
    assert counted(subset) == counted(wrapper(subset, num_replicas=2, rank=0)) == 5
    assert counted(DistributedSampler(data(), num_replicas=2, rank=0)) == 12


def test_a_callback_that_is_used_again_counts_again():
    callback, seen = SparsifyCallback(schedule=1.0), []
    for count in (12, 6):
        L.Trainer(max_epochs=1, callbacks=[callback], **QUIET).fit(Module(), DataLoader(data(count), batch_size=6))
        seen.append(callback.penalty.num_examples)
    assert seen == [12, 6]
    given = SparsifyCallback(num_examples=100, schedule=1.0)
    L.Trainer(max_epochs=1, callbacks=[given], **QUIET).fit(Module(), DataLoader(data(), batch_size=6))
    assert given.penalty.num_examples == 100


@pytest.mark.parametrize(
    ("limits", "shuffle", "given", "said"),
    [
        ({"limit_train_batches": 1}, False, None, True),
        ({"overfit_batches": 2}, True, None, True),
        ({"limit_train_batches": 0.5}, False, 6, False),
        ({"limit_train_batches": 1}, True, None, False),  # another part in each epoch
        ({"fast_dev_run": True}, False, None, False),
        ({}, False, 100, False),  # as the user says
    ],
)
def test_a_training_on_a_part_of_the_data_is_told_of(limits, shuffle, given, said, recwarn):
    trainer = L.Trainer(max_epochs=1, callbacks=[SparsifyCallback(num_examples=given, schedule=1.0)], **limits, **QUIET)
    trainer.fit(Module(), DataLoader(data(), batch_size=2, shuffle=shuffle))
    found = [str(one.message) for one in recwarn if "limit_train_batches or overfit" in str(one.message)]
    assert len(found) == said
    assert all("N = 12" in line and f"num_examples={2 * next(iter(limits.values()))})" in line for line in found)


@pytest.mark.parametrize(
    ("batches", "shuffle", "sampler", "said"),
    [
        (1, False, None, True),
        (1, True, None, False),
        (3, False, None, False),
        (1, False, SubsetRandomSampler(range(12)), False),
    ],
)
def test_so_is_one_in_several_processes(batches, shuffle, sampler, said, recwarn):
    wrapper = pytest.importorskip("lightning.fabric.utilities.distributed").DistributedSamplerWrapper
    kind, what = (DistributedSampler, data()) if sampler is None else (wrapper, sampler)
    loader = DataLoader(data(), batch_size=2, sampler=kind(what, num_replicas=2, rank=0, shuffle=shuffle))
    trainer = SimpleNamespace(train_dataloader=loader, num_training_batches=batches, world_size=2)
    callback = SparsifyCallback()
    callback.penalty.num_examples = 12
    callback._tell_part(trainer)
    assert [f"same {4 * batches} examples" in str(one.message) for one in recwarn] == [True] * said


def search_for_a_rate(trainer, module):
    tuner.Tuner(trainer).lr_find(module, num_training=4, min_lr=1e-4)


def search_for_a_batch_size(trainer, module):
    tuner.Tuner(trainer).scale_batch_size(module, max_trials=1, init_val=2, steps_per_trial=1)


def search_within_the_fit(trainer, module):
    trainer.callbacks.append(L.callbacks.LearningRateFinder(num_training_steps=4, min_lr=1e-4, update_attr=False))
    trainer.fit(module)


@pytest.mark.parametrize("search", [search_for_a_rate, search_for_a_batch_size, search_within_the_fit])
def test_a_search_before_the_training_counts_too(search, tmp_path):
    class Tuned(Module):
        lr = 0.1
        batch_size = 2

        def __init__(self):
            super().__init__()
            self.added = []

        def training_step(self, batch, index):
            self.nll = super().training_step(batch, index)
            return self.nll

        def on_before_backward(self, loss):
            self.added.append((loss - self.nll).item() / (svdc.kl_divergence(self).item() / 12))

        def train_dataloader(self):
            return DataLoader(data(), batch_size=self.batch_size)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    module, callback = Tuned(), SparsifyCallback(schedule=1.0)
    trainer = L.Trainer(max_epochs=1, callbacks=[callback], default_root_dir=tmp_path, **QUIET)
    search(trainer, module)
    assert module.added and module.added == pytest.approx([1.0] * len(module.added), rel=1e-3)


def test_options_of_convert_are_handed_on_and_a_converted_module_is_kept():
    callback, module = SparsifyCallback(schedule=0.1, exclude=["body.2"], prior="log-uniform"), Module()
    L.Trainer(max_epochs=1, callbacks=[callback], **QUIET).fit(module, DataLoader(data(), batch_size=6))
    assert module.body[0].prior == "log-uniform" and not hasattr(module.body[2], "log_sigma2")
    L.Trainer(max_epochs=1, callbacks=[callback], **QUIET).fit(module, DataLoader(data(), batch_size=6))


def test_callbacks_that_average_weights_come_after_it():
    averaging = L.callbacks.StochasticWeightAveraging
    loader = DataLoader(data(), 4)
    with pytest.raises(
        UsageError, match=r"StochasticWeightAveraging comes before SparsifyCallback.*name SparsifyCallback first"
    ):
        L.Trainer(max_epochs=2, callbacks=[averaging(0.1), SparsifyCallback()], **QUIET).fit(Module(), loader)
    module = Module()
    L.Trainer(max_epochs=4, callbacks=[SparsifyCallback(), averaging(0.1, swa_epoch_start=1)], **QUIET).fit(module, loader)
    assert len(list(svdc.layers.variational_layers(module))) == 2


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork", "ddp_notebook"])
def test_processes_that_would_convert_modules_of_their_own_are_refused(strategy):
    """As these processes call it; the module that the main process converted is trained and comes back."""
    callback, module = SparsifyCallback(), Module()
    trainer = L.Trainer(devices=2, strategy=strategy, callbacks=[callback], **QUIET)
    with pytest.raises(UsageError, match=r"svdcompress.convert\(module\) before Trainer.fit"):
        callback.setup(trainer, module, "fit")
    assert not list(svdc.layers.variational_layers(module))
    callback.setup(trainer, svdc.convert(module), "fit")
    callback.setup(L.Trainer(devices=2, strategy="ddp", **QUIET), Module(), "fit")


@pytest.mark.parametrize("name", ["FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"])
def test_strategies_that_divide_weights_are_refused(name):
    """Stand-ins: on a CPU, Lightning refuses some of them itself."""
    trainer = SimpleNamespace(strategy=type(f"My{name}", (type(name, (), {}),), {})(), callbacks=[])
    module = Module()
    with pytest.raises(UsageError, match=rf"My{name} divides weights.*strategy=\"ddp\""):
        SparsifyCallback().setup(trainer, module, "fit")
    assert not list(svdc.layers.variational_layers(module))
