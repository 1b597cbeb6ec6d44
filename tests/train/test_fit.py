"""The loop: the same numbers as training written by hand, schedules, state, and what happens if a loss is not finite."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from svdcompress import ELBO, Constant, LinearWarmup, convert, hold, relevance
from svdcompress.errors import DataError, Interrupted, TrainingError, UsageError
from svdcompress.layers import variational_layers
from svdcompress.likelihoods import make_loss
from svdcompress.recipe import Distillation, LossSection, Training
from svdcompress.sources import InMemory
from svdcompress.train import _loop, evaluate, fit, mix, seed_everything

LOSS = make_loss(LossSection())


def examples(count=60):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 6, generator=generator)
    return InMemory(x, (x[:, 0] + x[:, 1] > 0).long())


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


def settings(**fields):
    return Training(**{"epochs": 3, "batch_size": 16, "schedule": {"name": "linear", "start": "50%"}, **fields})


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def by_hand(model, data, epochs=3, batch=16, lr=1e-2, lr_noise=3e-2, clip=1.0, seed=0):
    """The same training in plain PyTorch: Adam, two learning rates, linear decay, clipping, an annealed ELBO."""
    noise = [layer.log_sigma2 for _, layer in variational_layers(model)]
    others = [p for p in model.parameters() if not any(p is n for n in noise)]
    optimizer = torch.optim.Adam([{"params": others, "lr": lr}, {"params": noise, "lr": lr_noise}])
    elbo = ELBO(model, F.cross_entropy, len(data), LinearWarmup(1, 2, 0.5))
    model.train()
    for epoch in range(epochs):
        seed_everything(seed, "train", epoch, "noise", 0)
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(mix(seed, "train", epoch, "order")))
        batches = order.split(batch)
        for index, rows in enumerate(batches):
            where = epoch + index / len(batches)
            fall = 1.0 if where <= 1.5 else (3 - where) / 1.5
            for group, base in zip(optimizer.param_groups, (lr, lr_noise), strict=True):
                group["lr"] = base * fall
            elbo.set_epoch(where)
            loss = elbo(model(data.inputs[rows]), data.targets[rows])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return model.eval()


def test_a_fit_gives_the_numbers_of_the_training_by_hand():
    ours, theirs = convert(net(), log_sigma2=-6.0), convert(net(), log_sigma2=-6.0)
    result = fit(
        ours, examples(), LOSS, settings(lr=1e-2, clip=1.0), schedule=LinearWarmup(1, 2, 0.5), lr_log_sigma2=3e-2, device="cpu"
    )
    by_hand(theirs, examples())
    assert torch.allclose(weights(ours), weights(theirs), atol=1e-6)
    assert not torch.allclose(weights(ours), weights(convert(net(), log_sigma2=-6.0)), atol=1e-2)
    assert [row["beta"] for row in result.history] == pytest.approx([0, 0.375, 0.5])
    assert result.history[0]["kl"] is None and result.history[2]["kl"] > 0


def test_accumulated_batches_are_one_large_batch():
    whole, parts = net(), net()
    fit(whole, examples(64), LOSS, settings(batch_size=32, optimizer="sgd", lr=0.1), device="cpu")
    fit(
        parts,
        examples(64),
        LOSS,
        settings(batch_size=8, accumulate=4, optimizer="sgd", lr=0.1, schedule="constant"),
        device="cpu",
    )
    plain = net()
    fit(plain, examples(64), LOSS, settings(batch_size=32, optimizer="sgd", lr=0.1, schedule="constant"), device="cpu")
    assert torch.allclose(weights(parts), weights(plain), atol=1e-6)
    assert not torch.allclose(weights(whole), weights(plain), atol=1e-4)  # the schedule matters


def test_the_last_batches_of_an_epoch_count_by_their_own_number():
    """5 batches of 8, two at a time: steps of 16, 16 and 8 examples, each averaged over its own."""
    parts, expected = net(), net()
    data = examples(40)
    fit(parts, data, LOSS, settings(epochs=1, batch_size=8, accumulate=2, optimizer="sgd", momentum=0, lr=0.5,
                                    schedule="constant"), device="cpu")  # fmt: skip
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.5)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(mix(0, "train", 0, "order")))
    for rows in order.split(16):
        optimizer.zero_grad()
        F.cross_entropy(expected(data.inputs[rows]), data.targets[rows]).backward()
        optimizer.step()
    assert [len(rows) for rows in order.split(16)] == [16, 16, 8]
    assert torch.allclose(weights(parts), weights(expected), atol=1e-6)


class Watched(InMemory):
    """Records the first number of each example."""

    def __init__(self, data):
        super().__init__(data.inputs, data.targets)
        self.seen = []

    def batches(self, *args, **kwargs):
        for x, y in super().batches(*args, **kwargs):
            self.seen.append(x[:, 0].tolist())
            yield x, y


def test_the_seed_decides_the_order_of_the_batches():
    def order(seed):
        data = Watched(examples())
        fit(net(), data, LOSS, settings(epochs=2), device="cpu", seed=seed)
        return data.seen[:4], data.seen[4:]

    first, again, other = order(5), order(5), order(6)
    assert first == again
    assert first[0] != other[0] and first[1] != other[1]  # and not by its place in a batch alone
    assert first[0] != first[1]  # each epoch has its own order
    assert sorted(x for batch in first[0] for x in batch) == sorted(x for batch in other[1] for x in batch)


@pytest.mark.parametrize("keep", ["best", "last"])
def test_the_epoch_that_is_kept_is_the_best_one(keep):
    errors, after = iter([3.0, 1.0, 2.0, 1.0]), []

    def validate(model):
        after.append(weights(model).clone())
        return {"error": next(errors), "nll": 0.5}

    model = net()
    result = fit(model, examples(), LOSS, settings(epochs=4, keep=keep), validate=validate, device="cpu")
    kept = 2 if keep == "best" else 4  # the first of two equally good epochs
    assert result.kept_epoch == kept and torch.equal(weights(model), after[kept - 1])


class Halt:
    """Asks for a stop after a number of steps, as a signal would."""

    def __init__(self, steps):
        self.left = steps

    def __call__(self):
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize("steps", [1, 5, 9])
def test_a_stopped_fit_goes_on_to_the_same_result(tmp_path, steps):
    def run(state=None, stop=lambda: False):
        model = convert(net(), log_sigma2=-6.0)
        validate = lambda m: evaluate(m, examples(), "classification")  # noqa: E731
        more = {"schedule": Constant(0.5), "validate": validate, "device": "cpu", "state": state, "stop": stop}
        return fit(model, examples(), LOSS, settings(lr=1e-2, keep="best"), **more), model

    undisturbed, expected = run()
    with pytest.raises(Interrupted):
        run(tmp_path / "fit.pt", Halt(steps))
    resumed, model = run(tmp_path / "fit.pt")
    assert torch.equal(weights(model), weights(expected))
    assert resumed.history == undisturbed.history
    again, model = run(tmp_path / "fit.pt")  # a finished fit does nothing again
    assert again.history == undisturbed.history
    assert torch.equal(weights(model), weights(expected))


def test_a_stopped_fit_goes_on_with_another_learning_rate(tmp_path, monkeypatch):
    monkeypatch.setattr("svdcompress.train._state.SHARE_OF_TIME", 1e9)  # save after each epoch
    more = {"device": "cpu", "state": tmp_path / "fit.pt"}
    with pytest.raises(Interrupted):
        fit(net(), examples(), LOSS, settings(schedule="constant", lr=1e-2), stop=Halt(9), **more)
    result = fit(net(), examples(), LOSS, settings(schedule="constant", lr=1e-4, clip=1.0), **more)
    assert [row["lr"] for row in result.history] == [1e-2, 1e-2, 1e-4]


def test_the_best_epoch_is_the_one_kept():
    model, seen = net(), []

    def validate(m):
        seen.append(copy.deepcopy(m.state_dict()))
        return {"error": [5.0, 1.0, 1.0][len(seen) - 1], "nll": [0.1, 0.3, 0.2][len(seen) - 1]}

    result = fit(model, examples(), LOSS, settings(keep="best"), validate=validate, device="cpu")
    assert result.kept_epoch == 3
    assert all(torch.equal(value, seen[2][name]) for name, value in model.state_dict().items())


def test_a_loss_that_is_not_finite_names_step_and_layer_and_keeps_the_state(tmp_path):
    model = convert(net())

    class Overflow(nn.Module):
        def forward(self, x):
            return x * float("inf") if self.training and x.abs().max() > 0 and next(calls) == 5 else x

    calls = iter(range(10**6))
    model.insert(1, Overflow())
    with pytest.raises(TrainingError) as error:
        fit(model, examples(), LOSS, settings(), device="cpu", state=tmp_path / "fit.pt")
    text = str(error.value)
    assert "at step 5 (epoch 2)" in text
    assert "train.lr" in text and "train.clip=1" in text and "norms" not in text
    assert str(tmp_path / "fit.pt") in text
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert torch.load(tmp_path / "fit.pt", weights_only=True)["epoch"] <= 1


def test_a_bad_loss_seen_late_is_traced_to_its_step(tmp_path, monkeypatch):
    """As on an accelerator, where the loss is not checked at each step."""
    monkeypatch.setitem(_loop.LOOK_EVERY, "cpu", 20)
    data = examples()
    data.inputs[:, 3] *= 1e30
    with pytest.raises(TrainingError) as error:
        fit(net(), data, LOSS, settings(lr=1e6, optimizer="sgd"), device="cpu", state=tmp_path / "fit.pt")
    assert "at step 1 (epoch 1)" in str(error.value)
    assert "layer '0'" in str(error.value)


def test_the_first_layer_with_bad_values_is_named():
    from svdcompress.train._nonfinite import first_nonfinite

    model = net()
    x = torch.randn(4, 6)
    assert first_nonfinite(model, x) == ""
    with torch.no_grad():
        model[2].bias[0] = float("nan")
    assert first_nonfinite(model, x) == "the weights of layer '2'"
    model = nn.Sequential(nn.Linear(6, 3), nn.Softplus(), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight.fill_(1e38)
        assert first_nonfinite(model, x * 1e9) == "the output of layer '0'"
    assert first_nonfinite(model, x * float("nan")) == "in the input batch"


def test_an_overflow_of_mixed_precision_is_found_in_it():
    """bfloat16 rounds 3.4e38 to infinity, which float32 can hold; the search for the layer must use the same precision."""
    data = InMemory(torch.full((32, 2), 3.4e38), torch.zeros(32).long())
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(2))
    with pytest.raises(TrainingError, match=r"first values that are not finite are the output of layer '0'") as caught:
        fit(model, data, LOSS, settings(precision="bf16", lr=0.25), device="cpu")
    assert caught.value.rate == 0.25  # a smaller one may help
    data = InMemory(torch.full((32, 2), float("nan")), data.targets)
    with pytest.raises(TrainingError, match="are in the input batch") as caught:
        fit(model, data, LOSS, settings(lr=0.25), device="cpu")
    assert caught.value.rate is None


def test_without_noise_the_mean_is_trained_with_its_mask_held():
    model = convert(net())
    masks = relevance(model, 3.0)
    some = {name: mask.clone() for name, mask in masks.items()}
    some["0"][:4] = False
    hold(model, some)
    spreads = [layer.log_sigma2.detach().clone() for _, layer in variational_layers(model)]
    before = weights(model)
    frozen = []
    model.register_forward_pre_hook(lambda m, a: frozen.append(not m[0].log_sigma2.requires_grad))
    model[2].log_sigma2.requires_grad_(False)  # by the caller
    fit(model, examples(), LOSS, settings(), noise=False, device="cpu")
    assert frozen and all(frozen)
    assert [layer.log_sigma2.requires_grad for _, layer in variational_layers(model)] == [True, False]  # unchanged
    assert all(torch.equal(layer.log_sigma2, old) for (_, layer), old in zip(variational_layers(model), spreads, strict=True))
    assert not torch.equal(weights(model), before)
    assert torch.equal(model[0].weight[:4], net()[0].weight[:4])  # dead weights have no gradient


def test_distillation_pulls_towards_the_teacher():
    teacher = net(seed=5)
    data = examples(200)
    far, near = net(), net()
    fit(far, data, LOSS, settings(epochs=20), device="cpu")
    fit(near, data, LOSS, settings(epochs=20), device="cpu", teacher=teacher, distill=Distillation(weight=1.0, temperature=1.0))

    def distance(model):
        with torch.no_grad():
            return float((model(data.inputs).softmax(1) - teacher(data.inputs).softmax(1)).abs().mean())

    assert distance(near) < 0.7 * distance(far)


def test_metrics_against_their_definitions():
    torch.manual_seed(0)
    x, y = torch.randn(50, 3), torch.randint(0, 3, (50,))
    model = nn.Linear(3, 3)
    logits = model(x).detach()
    found = evaluate(model, InMemory(x, y), "classification", batch_size=7)
    assert found["error"] == pytest.approx(100 * float((logits.argmax(1) != y).float().mean()))
    assert found["nll"] == pytest.approx(float(F.cross_entropy(logits, y)), rel=1e-6)
    target = torch.randn(50)
    model = nn.Linear(3, 1)
    found = evaluate(model, InMemory(x, target), "regression", tau=4.0, scale=(10.0, 3.0))
    mean = model(x)[:, 0].detach()
    assert found["rmse"] == pytest.approx(3 * float((mean - target).square().mean().sqrt()), rel=1e-6)
    exact = -torch.distributions.Normal(10 + 3 * mean, 3 * 0.5).log_prob(10 + 3 * target).mean()
    assert found["nll"] == pytest.approx(float(exact), rel=1e-5)
    model = nn.Linear(3, 2)
    mean, log_variance = model(x).detach().chunk(2, 1)
    exact = -torch.distributions.Normal(mean[:, 0], (0.5 * log_variance[:, 0]).exp()).log_prob(target).mean()
    assert evaluate(model, InMemory(x, target), "gaussian")["nll"] == pytest.approx(float(exact), rel=1e-5)
    found = evaluate(nn.Linear(3, 1), InMemory(x, (target > 0).float()), "binary")
    assert 0 <= found["error"] <= 100


def test_bad_settings_are_said():
    with pytest.raises(UsageError, match="device: unknown 'gpu'"):
        fit(net(), examples(), LOSS, settings(), device="gpu")
    with pytest.raises(TrainingError, match="fp16 needs a CUDA device"):
        fit(net(), examples(), LOSS, settings(precision="fp16"), device="cpu")
    with pytest.raises(DataError, match="no examples"):
        fit(net(), InMemory(torch.zeros(0, 6), torch.zeros(0).long()), LOSS, settings(), device="cpu")


def test_bf16_trains_and_leaves_the_model_as_it_was():
    model = net()
    result = fit(model, examples(), LOSS, settings(epochs=5, precision="bf16"), device="cpu")
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    assert "forward" not in model.__dict__  # accelerate would leave this behind
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("noise", [True, False])
def test_a_compiled_student_learns_from_its_compiled_teacher_as_another(noise):
    torch.compiler.reset()

    def run(compiled):
        model = convert(net(), log_sigma2=-60.0)  # compiled noise comes from its own generator
        more = {"teacher": net(seed=5), "distill": Distillation(weight=0.5, temperature=3.0), "device": "cpu", "noise": noise}
        return fit(model, examples(64), LOSS, settings(lr=1e-2), compiled=compiled, **more), model

    (plain, expected), (result, model) = run(False), run(True)
    assert torch.allclose(weights(model), weights(expected), atol=1e-5)
    assert [row["loss"] for row in result.history] == pytest.approx([row["loss"] for row in plain.history], rel=1e-4)
    torch.compiler.reset()


@pytest.mark.slow
def test_a_compiled_fit_trains_as_another_and_goes_on_after_a_stop(tmp_path, monkeypatch):
    monkeypatch.setattr("svdcompress.train._state.SHARE_OF_TIME", 1e9)  # save after each epoch
    torch.compiler.reset()

    def run(compiled, state=None, stop=lambda: False):
        model = convert(net(), log_sigma2=-60.0)  # compiled noise comes from its own generator
        more = {"schedule": Constant(1e-3), "device": "cpu", "state": state, "stop": stop, "lr_log_sigma2": 1e-9}
        return fit(model, examples(64), LOSS, settings(lr=1e-2), compiled=compiled, **more), model

    (plain, expected), (result, model) = run(False), run(True)
    assert torch.allclose(weights(model), weights(expected), atol=1e-5)
    assert [row["loss"] for row in result.history] == pytest.approx([row["loss"] for row in plain.history], rel=1e-4)
    assert set(model.state_dict()) == set(expected.state_dict())  # without a wrapper's names
    with pytest.raises(Interrupted):
        run(True, tmp_path / "fit.pt", Halt(5))
    saved = torch.load(tmp_path / "fit.pt", weights_only=True)
    assert saved["epoch"] == 1 and set(saved["model"]) == set(model.state_dict())
    resumed, again = run(True, tmp_path / "fit.pt")
    assert torch.equal(weights(again), weights(model))
    assert resumed.history == result.history
    torch.compiler.reset()


def test_a_fit_rewound_by_a_loss_that_was_bad_by_chance_ends_as_an_undisturbed_one(tmp_path, monkeypatch):
    class Hiccup(nn.Module):
        def forward(self, x):
            return x * float("nan") if self.training and next(calls) == 6 else x

    def run(**more):
        model = convert(net(), log_sigma2=-6.0)
        model.append(Hiccup())
        return fit(model, examples(), LOSS, settings(lr=1e-2), schedule=Constant(0.5), device="cpu", **more), model

    calls = iter(range(7, 10**6))
    undisturbed, expected = run()
    monkeypatch.setitem(_loop.LOOK_EVERY, "cpu", 20)
    monkeypatch.setattr("svdcompress.train._state.SHARE_OF_TIME", 1e9)  # save after each epoch
    calls = iter(range(10**6))
    result, model = run(state=tmp_path / "fit.pt")
    assert next(calls) > 12 + 4 - 1  # the second epoch was done twice
    assert result.history == undisturbed.history
    assert torch.equal(weights(model), weights(expected))
