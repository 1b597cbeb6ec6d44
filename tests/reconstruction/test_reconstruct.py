"""Cut networks whose layers are fitted to their previous outputs: against normal equations by hand, layer by layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from svdcompress.convert import convert
from svdcompress.errors import PruneError, UsageError
from svdcompress.layers import variational_layers
from svdcompress.prune import prune
from svdcompress.reconstruction import RIDGES, reconstruct, reconstructed
from svdcompress.relevance import hold

HELD = 0.2
SURE = -40.0  # no weight is irrelevant


def everything(model: nn.Module) -> dict[str, Tensor]:
    """Masks that keep all weights."""
    return {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}


def without(model: nn.Module, between: dict[tuple[str, str], list[int]]) -> dict[str, Tensor]:
    """Masks without the given units, by the layers that write and read them."""
    masks = everything(model)
    for (writer, reader), units in between.items():
        masks[writer][units] = False
        masks[reader][:, units] = False
    return masks


def shuffled(rows: np.ndarray, examples: int) -> np.ndarray:
    """Rows of the examples, all of one together, in the order in which `reconstruct` takes them with its seed 0."""
    place = torch.randperm(examples, generator=torch.Generator().manual_seed(0)).numpy()
    order = sorted(range(examples), key=lambda example: place[example])
    return rows.reshape(examples, -1, rows.shape[1])[order].reshape(rows.shape)


def best(x: np.ndarray, y: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
    """The weight (outputs, inputs) and bias that map x closest to y, by explicit normal equations in double precision."""

    def fit(rows: slice, ridge: float) -> tuple[np.ndarray, np.ndarray | None]:
        a, b = x[rows], y[rows] - x[rows] @ weight.T
        mean, target = (a.mean(0), b.mean(0)) if bias is not None else (0 * a[0], 0 * b[0])
        a, b = a - mean, b - target
        gram = a.T @ a
        change = np.linalg.solve(gram + ridge * np.trace(gram) / min(a.shape) * np.eye(len(gram)), a.T @ b).T
        return weight + change, None if bias is None else target - change @ mean

    def missed(found: tuple[np.ndarray, np.ndarray | None]) -> float:
        rows = slice(len(x) - held, None)
        return float(((y[rows] - x[rows] @ found[0].T - (0 if found[1] is None else found[1])) ** 2).sum())

    held = round(HELD * len(x))
    ridge = min(RIDGES, key=lambda each: missed(fit(slice(0, len(x) - held), each)))
    if missed(fit(slice(0, len(x) - held), ridge)) >= missed((weight, bias)):
        return weight, bias
    return fit(slice(None), ridge)


def mlp() -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3))
    return convert(net, log_sigma2=SURE).eval()


def test_a_perceptron_by_hand() -> None:
    model, x = mlp(), torch.randn(120, 6)
    masks = without(model, {("0", "2"): [1, 4, 5], ("2", "4"): [0, 7]})
    start = {name: tensor.detach().double().numpy().copy() for name, tensor in model.state_dict().items()}
    dense, cut = x.double().numpy(), x.double().numpy()
    wanted = {}
    for name, gone, more in (("0", [], [1, 4, 5]), ("2", [1, 4, 5], [0, 7]), ("4", [0, 7], [])):
        weight, bias = start[f"{name}.weight"], start[f"{name}.bias"]
        target = dense @ weight.T + bias
        ins = [i for i in range(weight.shape[1]) if i not in gone]
        outs = [o for o in range(weight.shape[0]) if o not in more]
        new, shift = weight.copy(), bias.copy()
        seen, made = shuffled(cut[:, ins], 120), shuffled(target[:, outs], 120)
        new[np.ix_(outs, ins)], shift[outs] = best(seen, made, weight[np.ix_(outs, ins)], bias[outs])
        wanted[name] = new, shift
        live = np.zeros(weight.shape, bool)
        live[np.ix_(outs, ins)] = True
        dense, cut = np.tanh(target), np.tanh(cut @ (new * live).T + shift)
        if more:  # outputs that nothing reads may have any value
            cut[:, more] = 0
    found = reconstruct(model, x, masks)
    assert [layer.name for layer in found.layers] == ["0", "2", "4"] and found.left == {}
    for name, (weight, bias) in wanted.items():
        layer = model.get_submodule(name)
        assert np.allclose(layer.weight.detach().numpy(), weight, atol=1e-4), name
        assert np.allclose(layer.bias.detach().numpy(), bias, atol=1e-4), name
    assert found.layers[0].before == found.layers[0].after < 1e-12  # none of its inputs was removed
    assert all(layer.after < 0.7 * layer.before for layer in found.layers[1:])
    assert found.before > found.after > 0 and "3 layers" in repr(found)


def test_a_convolution_without_bias_by_hand() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 3, stride=2, padding=1, bias=False))
    model: Any = convert(net, log_sigma2=SURE).eval()
    x = torch.randn(30, 2, 8, 8)
    masks = without(model, {("0", "2"): [0, 3]})
    with torch.no_grad():
        first = model[1](model[0](x)).double()
        target = F.conv2d(first, model[2].weight.double(), None, 2, 1).movedim(1, -1).reshape(-1, 4).numpy()
    stays = [1, 2, 4, 5]
    seen = F.unfold(first[:, stays], 3, padding=1, stride=2).transpose(1, 2).reshape(len(target), -1).numpy()
    weight = model[2].weight.detach().double().numpy().copy()
    new, _ = best(shuffled(seen, 30), shuffled(target, 30), weight[:, stays].reshape(4, -1), None)
    found = reconstruct(model, x, masks)
    assert np.allclose(model[2].weight.detach().numpy()[:, stays], new.reshape(4, 4, 3, 3), atol=1e-4)
    assert torch.equal(model[2].weight.detach()[:, [0, 3]].double(), torch.from_numpy(weight[:, [0, 3]]))  # removed ones stay
    assert found.layers[1].after < found.layers[1].before


@pytest.mark.parametrize("kind", ["linear", "convolution", "groups"])
def test_what_others_can_say_is_not_missed(kind: str) -> None:
    """Units that are sums of others can be removed without loss: the next layer uses the others instead."""
    torch.manual_seed(2)
    net: Any
    if kind == "linear":
        net, x = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 4)), torch.randn(300, 5)
    elif kind == "convolution":
        net, x = nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 4, 3)), torch.randn(20, 3, 7, 7)
    else:
        net = nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 4, 3, groups=2, padding=1))
        x = torch.randn(20, 3, 7, 7)
    with torch.no_grad():  # one of each three is the sum of the other two
        for last in (2, 5):
            net[0].weight[last] = net[0].weight[last - 2] + net[0].weight[last - 1]
            net[0].bias[last] = net[0].bias[last - 2] + net[0].bias[last - 1]
    model: Any = convert(net, log_sigma2=SURE).eval()
    masks = everything(model)
    masks["0"][[2, 5]] = False
    if kind == "groups":
        masks["1"][:, 2] = False  # the third of each group
    else:
        masks["1"][:, [2, 5]] = False
    with torch.no_grad():
        before = model(x)
        hold(model, masks)
        cut = model(x)
        hold(model, None)
        reconstruct(model, x, masks)
        small: Any = prune(model, x[:2], masks=masks)
        after = small(x)
    assert small[1].weight.shape[1] == (2 if kind == "groups" else 4)
    scale = float(before.square().mean())
    assert float((cut - before).square().mean()) > 0.1 * scale  # there is an error to correct
    assert float((after - before).square().mean()) < 1e-5 * scale  # the cost of the ridge


def test_errors_upstream_are_made_up_for_downstream() -> None:
    """Each reader is fitted to its actual inputs from the refitted layers before it, which brings the outputs closer."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    x, other = torch.randn(2000, 6), torch.randn(500, 6)
    model: Any = convert(net, log_sigma2=SURE).eval()
    masks = without(model, {("0", "2"): list(range(9))})
    with torch.no_grad():
        before = model(other)
        with reconstructed(model, x, masks) as found:
            whole = float((model(other) - before).square().mean())
        first = dict(masks)  # only the last layer is not refitted
        model[4].weight.requires_grad_(False)
        with reconstructed(model, x, first) as short:
            part = float((model(other) - before).square().mean())
    assert [layer.name for layer in found.layers] == ["0", "2", "4"] and short.left == {"4": "it is frozen"}
    assert whole < 0.95 * part


def test_the_model_is_left_as_it_was_but_for_its_means() -> None:
    model = mlp().train()
    model[2].eval()
    masks = without(model, {("0", "2"): [2, 3]})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    earlier = everything(model)
    earlier["4"][0] = False
    hold(model, earlier)
    reconstruct(model, torch.randn(400, 6), masks, before=everything(model))
    assert [module.training for module in model] == [True, True, False, True, True]
    assert all(layer.mask is not None and torch.equal(layer.mask, earlier[name]) for name, layer in variational_layers(model))
    hold(model, None)
    after = model.state_dict()
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        f"{layer}.{part}" for layer in (2, 4) for part in ("weight", "bias")
    }
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_trying_it_out_puts_everything_back() -> None:
    model, x = mlp(), torch.randn(50, 6)
    masks = without(model, {("0", "2"): [2, 3]})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        with reconstructed(model, x, masks):
            held = [(layer.mask, masks[name]) for name, layer in variational_layers(model)]
            assert all(mask is not None and torch.equal(mask, wanted) for mask, wanted in held)
            found = model(x)
        assert all(layer.mask is None for _, layer in variational_layers(model))
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        reconstruct(model, x, masks)
        assert torch.equal(hold(model, masks)(x), found)
    with pytest.raises(RuntimeError, match="mine"), reconstructed(mlp(), x, masks):
        raise RuntimeError("mine")


def test_before_says_what_the_outputs_were() -> None:
    """Without it, the target is what `eval()` computes, with irrelevant weights at 0."""
    x, model, other = torch.randn(80, 6), mlp(), mlp()
    for one in (model, other):
        with torch.no_grad():
            one[2].log_sigma2[:, 0] = 20.0  # pure noise
    masks = without(model, {("0", "2"): [0]})
    assert reconstruct(model, x, masks).before == pytest.approx(0, abs=1e-9)
    assert reconstruct(other, x, masks, before=everything(other)).before > 1e-4


class Odd(nn.Module):
    """A layer that runs twice, one that never runs, a last one, and two that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.never, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.one.weight
        self.wide = nn.ConvTranspose1d(4, 4, 1)

    def forward(self, *, x: Tensor) -> Tensor:
        x = self.twice(self.twice(x).tanh())
        x = self.wide(self.other(self.one(x).tanh())[..., None])[..., 0]
        return self.last(input=x)


def test_what_cannot_be_fitted_is_named() -> None:
    torch.manual_seed(0)
    model: Any = convert(Odd(), log_sigma2=SURE).eval()
    masks = everything(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    masks["last"][0, 1] = False
    found = reconstruct(model, {"x": torch.randn(30, 4)}, masks)
    assert found.layers == [] and found.left == {
        "twice": "it runs several times",
        "never": "it doesn't run itself",
        "last": "its mask does not consist of whole units",
        "one": "it shares its weight",
        "other": "it shares its weight",
        "wide": "it is a transposed convolution",
    }
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    masks["last"][:] = True
    masks["last"][:, 2] = False
    found = reconstruct(model, {"x": torch.randn(30, 4)}, masks)  # inputs by keyword, at the layer too
    assert [layer.name for layer in found.layers] == ["last"] and found.layers[0].after < found.layers[0].before
    assert found.to_dict() == {"layers": 1, "before": found.before, "after": found.after, "left": found.left}
    masks["last"][:] = False
    assert "last" not in reconstruct(model, {"x": torch.randn(30, 4)}, masks).left  # its bias does what can be done
    model.last.bias = None
    found = reconstruct(model, {"x": torch.randn(30, 4)}, masks)
    assert found.left["last"] == "none of its weights are left, and it has no bias that learns"


class SharedNorm(nn.Module):
    """Two convolutions with biases, and a normalization that both go through."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Conv2d(2, 3, 3, padding=1) for _ in range(2))
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(self.one(x)), self.norm(self.other(x))


def test_a_bias_that_makes_up_leaves_the_norm_alone() -> None:
    torch.manual_seed(0)
    model: Any = convert(SharedNorm().eval(), log_sigma2=SURE).eval()
    with torch.no_grad():
        model.norm.running_mean.normal_()
    before, masks, x = model.norm.running_mean.clone(), everything(model), torch.randn(50, 2, 5, 5) + 1
    masks["one"][:] = False
    wanted = model.other(x)
    reconstruct(model, x, masks)
    assert torch.equal(model.norm.running_mean, before) and torch.equal(model.other(x), wanted)


class Silenced(nn.Module):
    """Two convolutions that are cut off: one with a bias, one without and followed by batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(2, 3, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.norm(self.other(x))


def test_layers_without_weights_give_their_former_mean() -> None:
    torch.manual_seed(0)
    dense = Silenced().eval()
    with torch.no_grad():
        for tensor in (dense.norm.running_mean, dense.norm.weight, dense.norm.bias):
            tensor.copy_(torch.randn(3))
        dense.norm.running_var.copy_(torch.rand(3) + 0.5)  # type: ignore[operator]
    model: Any = convert(dense, log_sigma2=SURE).eval()
    x = torch.randn(50, 2, 5, 5) + 1
    with torch.no_grad():
        first = dense(x)[0].mean((0, 2, 3))
        gone = {name: torch.zeros_like(mask) for name, mask in everything(model).items()}
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with reconstructed(model, x, gone):
            one, other = model(x)
        assert all(
            torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()
        )  # the mean of the norm, too
        found = reconstruct(model, x, gone)
        assert found.left == {} and found.layers == []
        hold(model, gone)
        again = model(x)
    for outputs in ((one, other), again):
        assert torch.allclose(outputs[0], first[:, None, None].expand_as(one), atol=1e-5)
        # what it gives for the mean that training saw, and so for its outputs on average
        assert torch.allclose(outputs[1], dense.norm.bias[:, None, None].expand_as(other), atol=1e-6)
    assert torch.equal(model.norm.running_var, before["norm.running_var"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    model, x = mlp().to(dtype), torch.randn(200, 6, dtype=dtype)
    found = reconstruct(model, x, without(model, {("0", "2"): [1, 4, 5]}))
    assert model[2].weight.dtype == dtype and found.layers[1].after < 0.8 * found.layers[1].before


def test_bad_inputs_are_told() -> None:
    model = mlp()
    masks = without(model, {("0", "2"): [1]})
    x = torch.randn(40, 6)
    x[3, 2] = float("nan")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UsageError, match=r"inputs: the inputs or outputs of layer '0' are not finite; look for NaN"):
        reconstruct(model, x, masks)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        model[4].weight[1, 1] = float("inf")  # found after the layers before it have already changed
    before["4.weight"] = model[4].weight.detach().clone()
    with pytest.raises(UsageError, match="layer '4'"):
        reconstruct(model, torch.randn(40, 6), masks)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        before["4.weight"][1, 1] = model[4].weight[1, 1] = 0.5
    with pytest.raises(PruneError, match="masks of another model"):
        reconstruct(model, x, {"0": masks["0"]})
    found = reconstruct(model, x[:1], masks)  # too few to choose the ridge by
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()) and found.layers == []
    assert found.left == dict.fromkeys("024", "it produced only 1 rows")


def test_a_frozen_bias_stays() -> None:
    model, x = mlp(), torch.randn(200, 6)
    model[2].bias.requires_grad_(False)
    before = model[2].bias.clone()
    found = reconstruct(model, x, without(model, {("0", "2"): [1, 4, 5]}))
    assert torch.equal(model[2].bias, before) and found.layers[1].after < found.layers[1].before


def test_wide_inputs_far_from_zero_and_constant_ones_are_no_problem() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6144, 16), nn.ReLU(), nn.Linear(16, 3))
    model: Any = convert(net, log_sigma2=SURE).eval()
    x = 0.9 + 0.1 * (torch.randn(512, 20) @ torch.randn(20, 6144) / 20**0.5)
    found = reconstruct(model, x, without(model, {("0", "2"): list(range(8))}))
    assert [layer.name for layer in found.layers] == ["0", "2"] and found.layers[1].after <= found.layers[1].before
    still = torch.rand(20).expand(1000, 20)
    model = convert(nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 3)), log_sigma2=SURE).eval()
    assert reconstruct(model, still, without(model, {("0", "2"): [1, 2]})).layers == []  # nothing varies
