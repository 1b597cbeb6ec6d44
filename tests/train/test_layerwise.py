"""Layers of a student compared with those of its teacher, against hand-written passes and loops."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import svdcompress as svdc
from svdcompress.layers import variational_layers
from svdcompress.recipe import Distillation, Training, load_recipe
from svdcompress.relevance import hold
from svdcompress.sources import InMemory
from svdcompress.train import fit
from svdcompress.train._layerwise import Layerwise


class Block(nn.Module):
    """Two normalized convolutions in parallel with an identity, as in a ResNet, and a head."""

    def __init__(self):
        super().__init__()
        self.stem, self.bn0 = nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv1, self.bn1 = nn.Conv2d(6, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6, affine=False)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = F.relu(self.bn0(self.stem(x)))
        return self.head((x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))).mean((2, 3)))


def block():
    torch.manual_seed(0)
    model = Block().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.3, 0.3)
            module.running_var.uniform_(0.5, 2)
    return model


def pruned(teacher, x, gone):
    """The variational student without the given outputs; gone: {layer: outputs}."""
    model = svdc.convert(copy.deepcopy(teacher)).eval()
    masks = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}
    for name, rows in gone.items():
        masks[name][rows] = False
    return svdc.prune(model, x, masks=masks), masks


CUT = {"conv1": [1, 4, 5], "stem": [2], "conv2": [2]}


def test_pruning_tells_which_outputs_stay():
    """The outputs of the small model equal those of the masked one at these indices."""
    teacher, x = block(), torch.randn(4, 2, 5, 5)
    small, masks = pruned(teacher, x, CUT)
    kept = small.pruning.outputs_kept
    assert kept["conv1"] == kept["bn1"] and 4 < len(kept["bn1"]) < 8  # one that is constant except at the borders may stay
    masked = svdc.convert(copy.deepcopy(teacher)).eval()
    hold(masked, masks)
    found = {}
    for label, model in (("small", small), ("masked", masked)):
        for name, module in model.named_modules():
            module.register_forward_hook(lambda m, i, out, key=(label, name): found.__setitem__(key, out.detach()))
        model(x)
    for name in ("stem", "bn0", "conv1", "bn1", "conv2", "bn2"):
        own, whole = found["small", name], found["masked", name]
        torch.testing.assert_close(own, whole[:, kept.get(name, range(whole.shape[1]))])
    assert {"stem", "conv1", "bn1"} <= set(kept)


def test_places_are_told_of_the_dense_model_alone():
    """A model that was pruned before would give indices among its remaining units, which are wrong for the dense model."""
    teacher, x = block(), torch.randn(4, 2, 5, 5)
    once, _ = pruned(teacher, x, {"conv1": [1, 4, 5]})
    masks = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(once)}
    masks["conv2"][2] = masks["stem"][2] = False
    twice = svdc.prune(once, x, masks=masks)
    assert twice.stem.weight.shape[0] < once.stem.weight.shape[0] and once.pruning.outputs_kept
    assert twice.pruning.outputs_kept == {}


def by_hand(student, teacher, x, kept):
    """The mean over the three normalizations, each written out."""

    def outputs(model):
        a = model.bn0(model.stem(x))
        b = model.bn1(model.conv1(F.relu(a)))
        return a, b, model.bn2(model.conv2(F.relu(b)))

    parts = []
    for name, own, whole in zip(("bn0", "bn1", "bn2"), outputs(student), outputs(teacher), strict=True):
        whole = whole.detach()[:, kept.get(name, list(range(whole.shape[1])))]
        spread = np.var(whole.numpy().astype(np.float64), axis=(0, 2, 3)).mean()
        parts.append(((own - whole) ** 2).mean() / spread)
    return sum(parts) / 3


def test_the_error_of_layers_and_its_gradient_are_those_of_a_hand_written_pass():
    teacher, x = block(), torch.randn(8, 2, 5, 5)
    small, _ = pruned(teacher, x[:2], CUT)
    small.train()
    for _, layer in variational_layers(small):
        layer.eval()
    kept = small.pruning.outputs_kept
    layers = Layerwise(small, teacher, kept)
    layers.clear()
    small(x)
    with torch.no_grad():
        teacher(x)
    found = layers.error()
    found.backward()
    gradients = {name: p.grad.clone() for name, p in small.named_parameters() if p.grad is not None}
    small.zero_grad()
    layers.close()
    wanted = by_hand(small, teacher, x, kept)
    wanted.backward()
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5) and float(found.detach()) > 0.01
    others = {name: p.grad for name, p in small.named_parameters() if p.grad is not None}
    assert set(others) == set(gradients) >= {"conv1.weight", "bn1.bias", "stem.weight"}
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[name], rtol=1e-3, atol=1e-5)
    assert layers.error() is None


def test_layers_without_normalisations_but_the_last_one_are_compared():
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 2))
    x = torch.randn(9, 5)
    small, _ = pruned(teacher, x[:2], {"0": [3], "2": [0, 1]})
    for p in small.parameters():
        p.data += 0.1
    layers = Layerwise(small, teacher, small.pruning.outputs_kept)
    small.eval()(x)
    with torch.no_grad():
        teacher(x)
    found, parts = layers.error(), []
    kept = {"0": [0, 1, 2, 4, 5, 6], "2": [2, 3, 4, 5]}
    assert small.pruning.outputs_kept == kept
    first, whole = small[0](x), teacher[0](x)
    for own, wanted in ((first, whole[:, kept["0"]]), (small[2](first.tanh()), teacher[2](whole.tanh())[:, kept["2"]])):
        parts.append(float((((own - wanted) ** 2).mean() / wanted.var(0, correction=0).mean()).detach()))
    assert float(found.detach()) == pytest.approx(sum(parts) / 2, rel=1e-5)


def test_what_runs_twice_or_gives_constants_says_nothing():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.twice, self.once = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

        def forward(self, x):
            return self.once(self.twice(self.twice(x)))

    torch.manual_seed(0)
    teacher, x = Twice().eval(), torch.randn(6, 4)
    student = copy.deepcopy(teacher)
    student.once.weight.data += 0.5
    layers = Layerwise(student, teacher, {})
    with torch.no_grad():
        wanted = teacher(x)
    got = student(x)
    alone = ((got - wanted) ** 2).mean() / wanted.var(0, correction=0).mean()
    assert float(layers.error().detach()) == pytest.approx(float(alone.detach()))
    teacher.once.weight.data.zero_()  # constant outputs from here on
    with torch.no_grad():
        teacher(x)
    student(x)
    error = layers.error()
    error.backward()
    assert float(error.detach()) == 0 and all(p.grad is None or p.grad.isfinite().all() for p in student.parameters())
    with torch.no_grad():  # an evaluation without gradients
        student(x)
        teacher(x)
    assert layers.error() is None


def data(count=64):
    generator = torch.Generator().manual_seed(0)
    return InMemory(torch.randn(count, 2, 5, 5, generator=generator), torch.randint(3, (count,), generator=generator))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_fit_is_that_of_a_hand_written_loop(compiled):
    teacher, examples = block(), data()
    small, _ = pruned(teacher, torch.randn(2, 2, 5, 5), CUT)
    kept, other = small.pruning.outputs_kept, copy.deepcopy(svdc.to_dense(small))  # it shares the parameters
    made = Training(epochs=3, batch_size=64, optimizer="sgd", lr=0.02, momentum=0.0, schedule="constant", norms="batch")
    more = {"teacher": teacher, "distill": Distillation(weight=0.5, temperature=3.0, layers=4.0), "outputs_kept": kept}
    before = sum(len(module._forward_hooks) for model in (small, teacher) for module in model.modules())
    fit(small, examples, F.cross_entropy, made, noise=False, device="cpu", compiled=compiled, **more)
    after = sum(len(module._forward_hooks) for model in (small, teacher) for module in model.modules())
    assert before == after

    other.train()
    optimizer = torch.optim.SGD(other.parameters(), 0.02)
    ((x, y),) = list(examples.batches(64))
    for epoch in range(3):
        output = other(x)
        running = {name: own.clone() for name, own in other.named_buffers()}
        with torch.no_grad():
            answer = teacher(x)
        soft = 9 * F.kl_div((output / 3).log_softmax(1), (answer / 3).softmax(1), reduction="batchmean")
        soft = soft + 9 * float(-((answer / 3).softmax(1) * (answer / 3).log_softmax(1)).sum(1).mean())
        layers = by_hand(other, teacher, x, kept)
        optimizer.zero_grad()
        (0.5 * F.cross_entropy(output, y) + 0.5 * soft + 4.0 * (1 - epoch / 3) ** 2 * layers).backward()
        optimizer.step()
        for name, own in other.named_buffers():  # that pass updated the statistics a second time
            own.copy_(running[name])
    own, wanted = svdc.to_dense(small.eval()).state_dict(), other.state_dict()
    for name in ("stem.weight", "conv1.weight", "bn1.weight", "conv2.weight", "head.weight", "head.bias", "bn1.running_mean"):
        torch.testing.assert_close(own[name], wanted[name], rtol=1e-4, atol=1e-5)


def test_without_a_weight_of_outputs_layers_alone_teach():
    teacher, examples = block(), data()
    small, _ = pruned(teacher, torch.randn(2, 2, 5, 5), CUT)
    kept = small.pruning.outputs_kept
    made = Training(epochs=30, batch_size=32, optimizer="adam", lr=0.01, norms="keep")
    ((x, _),) = list(examples.batches(64))

    def nothing(output, target):
        return 0 * output.sum()

    with torch.no_grad():
        before = float(by_hand(small, teacher, x, kept))
    more = {"teacher": teacher, "distill": Distillation(layers=1.0), "outputs_kept": kept}
    fit(small, examples, nothing, made, noise=False, device="cpu", **more)
    with torch.no_grad():
        after = float(by_hand(small.eval(), teacher, x, kept))
    assert after < 0.7 * before


def test_layers_that_cannot_be_compared_are_told():
    """A single layer, which is the last one; and a student whose remaining units are unknown."""
    examples, said = data(), []
    made = Training(epochs=1, batch_size=32)
    more = {"distill": Distillation(layers=1.0), "device": "cpu", "on_note": lambda *line: said.append(line)}
    alone = nn.Sequential(nn.Flatten(), nn.Linear(50, 3))
    fit(svdc.convert(copy.deepcopy(alone)), examples, F.cross_entropy, made, teacher=alone, **more)
    assert len(said) == 1 and said[0][0].startswith("train.distill.layers: 0 of 0 layers") and not said[0][1]
    teacher = block()
    small, _ = pruned(teacher, torch.randn(2, 2, 5, 5), CUT)
    fit(small, examples, F.cross_entropy, made, teacher=teacher, **more)
    assert len(said) == 2 and "0 of 3 layers" in said[1][0]
    fit(small, examples, F.cross_entropy, made, teacher=teacher, outputs_kept=small.pruning.outputs_kept, **more)
    assert len(said) == 2
    outer = nn.Sequential(small)  # like a model that takes all inputs and passes on some
    more["outputs_kept"] = small.pruning.outputs_kept
    fit(outer, examples, F.cross_entropy, made, teacher=teacher, student=small, **more)
    assert len(said) == 2
    fit(outer, examples, F.cross_entropy, made, teacher=teacher, **more)
    assert len(said) == 3 and "0 of 0 layers" in said[2][0]


def test_a_fit_that_was_done_before_says_nothing_of_layers(tmp_path):
    teacher, said = block(), []
    small, _ = pruned(teacher, torch.randn(2, 2, 5, 5), CUT)
    more = {
        "outputs_kept": small.pruning.outputs_kept,
        "on_note": lambda *line: said.append(line),
        "state": tmp_path / "fit.pt",
    }
    for _ in range(2):
        made = Training(epochs=1, batch_size=32)
        fit(small, data(), F.cross_entropy, made, teacher=teacher, distill=Distillation(layers=1.0), device="cpu", **more)
    assert said == []


def test_a_run_recovers_by_layers_and_keeps_the_report_as_it_was(tiny_recipe, tmp_path):
    from svdcompress.pipeline import run
    from svdcompress.recipe import dump_recipe, parse_recipe, parse_yaml

    made = {}
    for layers in (0.0, 2.0):
        content = parse_yaml(dump_recipe(tiny_recipe))
        content["recover"]["distill"] = {"weight": 0.5, "layers": layers}
        content["recover"]["epochs"] = 2
        content["train"]["epochs"] = 0
        content["search"] |= {"goal": "macs=2x", "trials": 1}  # units are removed
        content["export"]["onnx"] = content["report"]["html"] = content["report"]["latency"] = False
        made[layers] = run(parse_recipe(content), tmp_path / str(layers), quiet=True)
        assert "outputs_kept" not in made[layers]["pruning"]
        assert made[layers]["sparse"]["macs"] < 0.6 * made[layers]["dense"]["macs"]
        assert not any("distill.layers" in line for line in made[layers]["warnings"])  # all could be compared
    hashes = [found["files"]["model.safetensors"]["sha256"] for found in made.values()]
    assert hashes[0] != hashes[1]
    assert load_recipe(tmp_path / "2.0" / "recipe.yaml").recover.distill.layers == 2.0
