"""Third-party trainers and pruners with models on a GPU, against hand-written loops."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import svdcompress as svdc
from svdcompress.layers import variational_layers

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ACCELERATORS = {"cuda": "gpu", "cpu": "cpu"}
"""Lightning's names for the devices."""


def data(n=12):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 6, generator=generator), torch.randint(3, (n,), generator=generator)


def body():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def lightning_module(model):
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.body = model

        def training_step(self, batch, index):
            return nn.functional.cross_entropy(self.body(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


def by_hand(model, batches, beta, n, device):
    """The same training by hand: one step per batch, loss plus beta KL / N; tiny variances, so that noise does not matter."""
    model = svdc.convert(model, log_sigma2=-40.0).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        kl = sum(
            0.5 * ((one.weight**2 + one.log_sigma2.exp() + 1e-8).log() - one.log_sigma2).sum()
            for one in model
            if hasattr(one, "log_sigma2")
        )
        (nn.functional.cross_entropy(model(x.to(device)), y.to(device)) + beta / n * kl).backward()
        optimizer.step()
    return model


def test_lightning_trains_on_the_device_as_a_loop_by_hand_does_on_the_cpu(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from svdcompress.interop.lightning import SparsifyCallback

    module, loader, seen = lightning_module(body()), DataLoader(TensorDataset(*data()), batch_size=4), []

    class Watch(SparsifyCallback):
        def on_train_batch_end(self, trainer, module, *args, **kwargs):
            seen.extend(own.device.type for own in module.parameters())
            super().on_train_batch_end(trainer, module, *args, **kwargs)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator=ACCELERATORS[torch.device("cuda").type],
        devices=1,
        default_root_dir=tmp_path,
        callbacks=[Watch(schedule=0.7, log_sigma2=-40.0)],
        **quiet,
    )
    trainer.fit(module, loader)
    assert set(seen) == {torch.device("cuda").type} and len(seen) == 18
    expected = by_hand(body(), list(loader), 0.7, 12, "cpu")
    for ours, theirs in zip(module.body.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_a_transformer_on_the_device_has_the_gradients_of_the_cpu(tmp_path, kind, accumulate):
    transformers = pytest.importorskip("transformers")
    from svdcompress.interop.transformers import SparsifyCallback

    if torch.cuda.device_count() > 1:
        pytest.skip("the Trainer would spread a batch over all devices")
    torch.manual_seed(0)
    if kind == "gpt2":
        size = {
            "vocab_size": 20,
            "n_positions": 8,
            "n_embd": 16,
            "n_layer": 1,
            "n_head": 2,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size))
    else:
        size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 20}
        model = transformers.BertForSequenceClassification(transformers.BertConfig(**size, max_position_embeddings=8))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(20, (6,), generator=generator) for _ in range(8)]
    rows = [{"input_ids": row, "labels": row if kind == "gpt2" else i % 2} for i, row in enumerate(texts)]

    def gradients(on_cpu):
        found = {}

        class Watch(SparsifyCallback):
            def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
                found.update({name: own.grad.clone() for name, own in model.named_parameters() if own.grad is not None})

        quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "max_grad_norm": 0, "learning_rate": 0.0}
        arguments = transformers.TrainingArguments(
            str(tmp_path / str(on_cpu)),
            num_train_epochs=1,
            use_cpu=on_cpu,
            per_device_train_batch_size=8 // accumulate,
            gradient_accumulation_steps=accumulate,
            **quiet,
        )
        callback = Watch(schedule=1.0, log_sigma2=-40.0)
        transformers.Trainer(copy.deepcopy(model), arguments, train_dataset=rows, callbacks=[callback]).train()
        return found

    here, there = gradients(True), gradients(False)
    assert set(here) == set(there) and any("log_sigma2" in name for name in here)
    for name, own in there.items():
        assert own.is_cuda, name
        torch.testing.assert_close(own.cpu(), here[name], rtol=1e-2, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


class Stream(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.inner, self.outer = nn.Conv2d(8, 6, 3, padding=1), nn.Conv2d(6, 8, 1)
        self.head = nn.Linear(8 * 4, 5)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        return self.head((x + self.outer(torch.relu(self.inner(x)))).flatten(1))


def test_a_pruner_of_somebody_elses_chooses_the_same_channels_on_the_device():
    tp = pytest.importorskip("torch_pruning")
    from svdcompress.interop.torch_pruning import RelevanceImportance, chosen

    torch.manual_seed(0)
    model = svdc.convert(Stream()).eval()
    for _, layer in variational_layers(model):
        layer.log_sigma2.data.normal_(-7, 2)
    x, found = torch.randn(2, 3, 2, 2), []
    for device in ("cpu", "cuda"):
        there = copy.deepcopy(model).to(device)
        how = {"pruning_ratio": 0.4, "global_pruning": True, "ignored_layers": [there.head]}
        masks = chosen(tp.pruner.BasePruner(there, x.to(device), RelevanceImportance(), **how))
        assert all(mask.device.type == torch.device(device).type for mask in masks.values())
        small = svdc.prune(there, x.to(device), masks=masks)
        with torch.no_grad():
            torch.testing.assert_close(small(x.to(device)), svdc.hold(there, masks)(x.to(device)), rtol=1e-3, atol=1e-3)
        found.append({name: mask.cpu() for name, mask in masks.items()})
    assert all(torch.equal(mask, found[1][name]) for name, mask in found[0].items())
    assert not all(bool(mask.all()) for mask in found[0].values())


def test_units_that_are_coupled_are_judged_as_on_the_cpu():
    torch.manual_seed(0)
    model, x = svdc.convert(Stream(), share=["weight", "input"]).eval(), torch.randn(2, 3, 2, 2)
    for _, layer in variational_layers(model):
        layer.log_sigma2.data.normal_(-4, 4)
    here = svdc.coupled_relevance(model, x, threshold=1.0)
    there = svdc.coupled_relevance(copy.deepcopy(model).cuda(), x.cuda(), threshold=1.0)
    assert all(there[name].is_cuda and torch.equal(there[name].cpu(), mask) for name, mask in here.items())
    assert 0 < here.kept < here.total
