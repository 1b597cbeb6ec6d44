"""The callback of Hugging Face's Trainer against gradients computed by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.errors import UsageError

transformers = pytest.importorskip("transformers")
from svdcompress.interop._decay import WithoutDecay  # noqa: E402
from svdcompress.interop.transformers import SparsifyCallback  # noqa: E402


def vit() -> nn.Module:
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=3, **size)
    return transformers.ViTForImageClassification(config)


def images(count: int = 8) -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    return [{"pixel_values": torch.randn(1, 8, 8, generator=generator), "labels": i % 3} for i in range(count)]


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    )


def texts(count: int = 8) -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(20, (6,), generator=generator) for _ in range(count)]
    return [{"input_ids": row, "labels": torch.where(torch.arange(6) < 6 - i % 3, row, -100)} for i, row in enumerate(rows)]


def trainer(model, rows, folder, accumulate=1, callback=None, **options):
    quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    arguments = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=1,
        gradient_accumulation_steps=accumulate,
        **{"per_device_train_batch_size": 2, **quiet, **options.pop("arguments", {})},
    )
    return transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[callback] if callback else None, **options)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("make", "rows"), [(vit, images()), (language_model, texts())], ids=["vit", "gpt2"])
def test_the_kl_counts_once_a_step_however_many_batches_it_takes(make, rows, accumulate, tmp_path):
    model, seen = make(), []

    class Watch(SparsifyCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            layers = [m for m in model.modules() if hasattr(m, "log_sigma2")]
            last = layers[-1]  # with a loss of 0, only the KL gives it a gradient
            expected = 0.5 * (last.log_sigma2.exp() / (last.weight**2 + last.log_sigma2.exp() + 1e-8) - 1) * 0.8 / len(rows)
            seen.append(torch.allclose(last.log_sigma2.grad, expected, rtol=1e-3, atol=1e-9))

    def nothing(*args, **kwargs):  # the model's loss, times 0
        return 0 * original(*args, **kwargs)

    original = model.loss_function
    model.loss_function = nothing
    trainer(model, rows, tmp_path, accumulate, Watch(schedule=0.8), arguments={"max_grad_norm": 0}).train()
    assert seen == [True] * (len(rows) // 2 // accumulate)


def bert() -> nn.Module:
    """Its forward accepts `num_items_in_batch`, but its loss ignores it."""
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 20}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**size, max_position_embeddings=8))


def llama() -> nn.Module:
    """The Trainer does not count the first label of a row, and neither does this model's loss; GPT-2 differs."""
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 20}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, max_position_embeddings=8))


def labelled(count: int = 8) -> list[dict]:
    return [{"input_ids": row["input_ids"], "labels": i % 2} for i, row in enumerate(texts(count))]


@pytest.mark.parametrize(
    ("make", "rows", "accumulate"),
    [(bert, labelled(), 4), (llama, texts(), 1), (llama, texts(), 4), (language_model, texts(), 4), (vit, images(), 4)],
    ids=["bert", "llama", "llama in parts", "gpt2", "vit"],
)
def test_the_kl_is_in_the_units_of_the_loss(make, rows, accumulate, tmp_path):
    """The gradient of a step weights both equally, however the model's loss uses the number of items in its batches."""
    model, found = make(), {}

    class Watch(SparsifyCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            found.update((name, parameter.grad.clone()) for name, parameter in model.named_parameters())

    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    arguments = {"max_grad_norm": 0, "per_device_train_batch_size": len(rows) // accumulate, "learning_rate": 0.0}
    callback = Watch(schedule=1.0, log_sigma2=-40.0)
    trainer(model, rows, tmp_path, accumulate, callback, arguments=arguments).train()
    model.eval().zero_grad()
    model(**transformers.default_data_collator(rows)).loss.backward()
    kl = [2 * len(rows) * -grad.mean() for name, grad in found.items() if name.endswith("log_sigma2")]  # each is -1/2 / N
    other = {name: p.grad for name, p in model.named_parameters() if "norm" in name.lower() or "ln_" in name}
    nll = sum((found[name] * grad).sum() for name, grad in other.items()) / sum(grad.square().sum() for grad in other.values())
    assert float(torch.stack(kl).mean() / nll) == pytest.approx(1, rel=1e-3)


def test_it_is_converted_before_the_optimizer_is_made_and_the_hook_goes(tmp_path):
    model = vit()
    callback = SparsifyCallback(schedule=0.5, exclude=["classifier"])
    trainer(model, images(), tmp_path, callback=callback, arguments={"learning_rate": 1e-2}).train()
    assert callback.penalty.num_examples == 8
    assert not hasattr(model.classifier, "log_sigma2")
    layer = model.vit.embeddings.patch_embeddings.projection
    assert not torch.equal(layer.log_sigma2, torch.full_like(layer.log_sigma2, -10.0))
    assert not model._forward_hooks
    plain = vit()(pixel_values=torch.zeros(2, 1, 8, 8), labels=torch.tensor([0, 1]))
    assert plain.loss is not None


@pytest.mark.parametrize("again", ["same callback", "new callback"])
def test_after_a_training_that_broke_off_the_kl_counts_once(again, tmp_path):
    class Break(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    model, callback = vit(), SparsifyCallback(schedule=1.0)
    first = trainer(model, images(), tmp_path, callback=callback)
    first.add_callback(Break())
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            first.train()
    added = []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            torch.manual_seed(0)
            with_kl = model(pixel_values=torch.ones(2, 1, 8, 8), labels=torch.tensor([0, 1])).loss.item()
            hooks = model._forward_hooks.copy()
            model._forward_hooks.clear()
            torch.manual_seed(0)
            without = model(pixel_values=torch.ones(2, 1, 8, 8), labels=torch.tensor([0, 1])).loss.item()
            model._forward_hooks.update(hooks)
            added.append((with_kl - without) / (svdc.kl_divergence(model).item() / 8))

    callback = callback if again == "same callback" else SparsifyCallback(schedule=1.0)
    second = trainer(model, images(), tmp_path, callback=callback)
    second.add_callback(Watch())
    second.train()
    assert added == pytest.approx([1.0] * 4, rel=1e-3)
    assert not model._forward_hooks and not model._forward_hooks_with_kwargs


def test_a_callback_that_is_used_again_counts_again(tmp_path):
    callback, seen = SparsifyCallback(schedule=1.0), []
    for count in (8, 4):
        trainer(vit(), images(count), tmp_path, callback=callback).train()
        seen.append(callback.penalty.num_examples)
    assert seen == [8, 4]


def test_a_model_in_half_precision_is_told_of(tmp_path):
    callback = SparsifyCallback(schedule=1.0)
    one = trainer(vit(), images(2), tmp_path, callback=callback)
    one.model.to(torch.bfloat16)  # after the conversion, which would have said it itself
    one.data_collator = lambda rows: {
        "pixel_values": torch.stack([row["pixel_values"] for row in rows]).bfloat16(),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }
    with pytest.warns(UserWarning, match=r"cannot be trained in bfloat16.*TrainingArguments\(bf16=True\)"):
        one.train()


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_weight_decay_is_not_for_variances_and_a_training_goes_on_from_a_checkpoint(optim, tmp_path):
    """With a loss of 0 and no KL, only decay changes anything."""

    def train(**options):
        model = language_model()
        loss = model.loss_function
        model.loss_function = lambda *args, **kwargs: 0 * loss(*args, **kwargs)
        weight = model.transformer.h[0].mlp.c_fc.weight
        before = weight.detach().clone()
        settings = {"weight_decay": 0.5, "learning_rate": 0.1, "save_strategy": "steps", "save_steps": 2, "optim": optim}
        one = trainer(model, texts(), tmp_path, callback=SparsifyCallback(schedule=0.0), arguments=settings)
        one.train(**options)
        assert weight.norm() < 0.95 * before.norm()
        assert all((layer.log_sigma2 == -10).all() for _, layer in svdc.layers.variational_layers(model))
        assert all(group["lr"] == 0 for group in one.optimizer.param_groups)  # the schedule has ended
        parameters = [id(p) for group in one.optimizer.param_groups for p in group["params"]]
        assert len(one.optimizer.param_groups) == 2 and sorted(parameters) == sorted(map(id, model.parameters()))
        return model

    whole = train()
    again = train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    torch.testing.assert_close(whole.state_dict(), again.state_dict())


def test_decay_is_left_out_in_groups_that_a_schedule_changes_and_after_a_step_that_broke_off():
    layer = svdc.convert(nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.5)
    plain = torch.optim.AdamW([nn.Parameter(layer.weight.detach().clone())], lr=0.1, weight_decay=0.5)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (optimizer, plain)]
    spared = WithoutDecay(optimizer, [layer.log_sigma2])
    for step in range(4):
        for parameter in (layer.weight, layer.log_sigma2, *plain.param_groups[0]["params"]):
            parameter.grad = torch.zeros_like(parameter)
        if step == 1:
            with pytest.raises(ZeroDivisionError):
                optimizer.step(lambda: 1 / 0)
        optimizer.step()
        plain.step()
        for schedule in schedules:
            schedule.step()
    assert (layer.log_sigma2 == -10).all() and len(optimizer.param_groups) == 1
    assert torch.equal(layer.weight, plain.param_groups[0]["params"][0])
    spared.remove()
    optimizer.step()
    assert (layer.log_sigma2 != -10).all()


def test_what_cannot_work_is_said(tmp_path):
    with pytest.raises(UsageError, match="no loss"):
        trainer(
            vit(), images(), tmp_path, callback=SparsifyCallback(), compute_loss_func=lambda *a, **k: torch.zeros(())
        ).train()
    with pytest.raises(UsageError, match="label_smoothing_factor"):
        trainer(vit(), images(), tmp_path, callback=SparsifyCallback(), arguments={"label_smoothing_factor": 0.1}).train()
    model = vit()
    late = trainer(model, images(), tmp_path, optimizers=(torch.optim.SGD(model.parameters(), 0.1), None))
    late.add_callback(SparsifyCallback())
    with pytest.raises(UsageError, match=r"optimizer was made before"):
        late.train()
    assert svdc.convert(vit()) is not None


@pytest.mark.parametrize("way", ["fsdp", "deepspeed", "ACCELERATE_USE_FSDP"])
def test_divided_weights_are_refused(way, tmp_path, monkeypatch):
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    if way.isupper():
        monkeypatch.setenv(way, "true")
    else:
        setattr(arguments, way, True)  # as the arguments have it after they were read
    with pytest.raises(UsageError, match="FSDP divides the weights" if way.isupper() else f"{way}: it divides weights"):
        SparsifyCallback().on_init_end(arguments, transformers.TrainerState(), transformers.TrainerControl(), model=vit())
