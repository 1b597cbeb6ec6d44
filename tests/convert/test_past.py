"""Layers whose weight other code reads directly: found by one pass and left dense; reported later if no inputs were given."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import svdcompress as svdc
from svdcompress.errors import ModelError
from svdcompress.layers import variational_layers


class Window(nn.Module):
    """Window attention as torchvision's Swin writes it: the layers qkv and proj are never called."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        bias = self.qkv.bias.clone()
        bias[width : 2 * width].zero_()  # as Swin v2 does
        q, k, v = F.linear(x, self.qkv.weight, bias).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = torch.softmax(q @ k.transpose(-2, -1), -1) @ v
        return F.linear(x.transpose(1, 2).reshape(rows, tokens, width), self.proj.weight, self.proj.bias)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(width), Window(width, heads), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(inplace=True), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class MiniSwin(nn.Module):
    """Patches, two blocks, pooling, head."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.Sequential(Block(width, 2), Block(width, 2))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


PAST = [f"blocks.{block}.attn.{layer}" for block in (0, 1) for layer in ("qkv", "proj")]


def swin() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return MiniSwin().eval(), torch.randn(2, 3, 16, 16)


def half(model: nn.Module) -> dict[str, Tensor]:
    """Masks that drop half the rows of every layer but the head's."""
    masks = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}
    for name, mask in masks.items():
        if name != "head":
            mask[: len(mask) // 2] = False
    return masks


def dense_oracle(model: nn.Module, masks: dict[str, Tensor], past: list[str] = PAST) -> nn.Module:
    """A dense copy with zeros written into its weights, except where a mask would have no effect."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, mask in masks.items():
            if name not in past:
                model.get_submodule(name).weight.mul_(mask)
    return model


def test_the_plan_names_who_reads_them_and_changes_nothing():
    model, x = swin()
    state = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    found = {entry.name: entry.reason for entry in svdc.plan(model, example_inputs=x) if entry.name.startswith("blocks.0.attn")}
    assert found == dict.fromkeys(
        PAST[:2], "its weight is read directly by 'blocks.0.attn', which bypasses the layer's mask and noise"
    )
    assert {entry.reason for entry in svdc.plan(model) if entry.name in PAST} == {""}  # without inputs, no forward pass is made
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random) and not model.training
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_others_are_converted_masked_and_pruned_exactly():
    model, x = swin()
    dense = copy.deepcopy(model)
    svdc.convert(model, example_inputs=x)
    names = [name for name, _ in variational_layers(model)]
    assert not set(names) & set(PAST) and len(names) == 6
    masks = half(model)
    fresh = torch.randn(3, 3, 16, 16)
    expected = dense_oracle(dense, masks)(fresh)
    torch.testing.assert_close(svdc.hold(copy.deepcopy(model), masks)(fresh), expected)
    small = svdc.prune(model, x, masks=masks)
    assert small.blocks[0].mlp[0].out_features == 16 and small.pruning.notes == []
    torch.testing.assert_close(small(fresh), expected)
    torch.testing.assert_close(svdc.to_dense(small)(fresh), expected)


def test_a_model_that_does_not_run_on_the_inputs_is_an_error_and_stays_as_it_was():
    model, _ = swin()
    with pytest.raises(ModelError, match="example_inputs: MiniSwin fails on them"):
        svdc.convert(model, example_inputs=torch.randn(2, 4, 16, 16))
    assert not list(variational_layers(model)) and not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("read", "past"),
    [
        (lambda layer, x: F.linear(x, layer.weight), True),
        (lambda layer, x: x @ layer.weight.t(), True),
        (lambda layer, x: x @ layer.weight.data.t(), True),
        (lambda layer, x: nn.Linear.forward(layer, x), True),
        (lambda layer, x: layer.forward(x), False),
        (
            lambda layer, x: layer(x.to(layer.weight.dtype)) + torch.zeros_like(layer.weight)[0, 0] + layer.weight.shape[0],
            False,
        ),
        (lambda layer, x: layer(x) + layer.bias, False),
    ],
)
def test_what_counts_as_reading_past_a_layer(read, past):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(read(self.fc, x))

    found = {entry.name: entry.reason for entry in svdc.plan(Net(), example_inputs=torch.randn(2, 4))}
    assert found["head"] == "" and ("read directly by the model itself" in found["fc"]) == past


def test_convolutions_and_ties():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.left, self.right = nn.Conv2d(2, 2, 1), nn.Linear(4, 4), nn.Linear(4, 4)
            self.right.weight = self.left.weight

        def forward(self, x: Tensor) -> Tensor:
            x = F.conv2d(x, self.conv.weight)
            return F.linear(self.right(x), self.left.weight) + self.left(x)

    found = {entry.name: bool(entry.reason) for entry in svdc.plan(Net(), example_inputs=torch.randn(2, 2, 4, 4))}
    assert found == {"conv": True, "left": True, "right": True}
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    assert all(entry.converted for entry in svdc.plan(tied, example_inputs=torch.randn(2, 4)))


def test_forward_replaced_on_the_object_is_told_without_inputs():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].forward = lambda x: F.linear(x, model[0].weight)
    assert "its forward method was replaced on the instance" in svdc.plan(model)[0].reason and svdc.plan(model)[1].converted


# Without inputs: reported later, and the results are still right


def test_prune_keeps_what_masks_do_not_reach_and_says_why():
    model, x = swin()
    dense = copy.deepcopy(model)
    svdc.convert(model)
    masks = half(model)
    small = svdc.prune(model, x, masks=masks)
    fresh = torch.randn(3, 3, 16, 16)
    expected = dense_oracle(dense, masks)(fresh)
    torch.testing.assert_close(small(fresh), expected)
    torch.testing.assert_close(svdc.hold(copy.deepcopy(model), masks)(fresh), expected)
    assert small.pruning.parameters_after < small.pruning.parameters_before
    assert [note.partition(":")[0] for note in small.pruning.notes] == PAST
    assert "read directly by 'blocks.0.attn'" in small.pruning.notes[0] and "example_inputs" in small.pruning.notes[0]
    torch.testing.assert_close(svdc.to_dense(small)(fresh), expected)


def test_a_layer_that_runs_and_is_read_past_too_is_named():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.fc(x) + F.linear(x, self.fc.weight))

    torch.manual_seed(0)
    model, x = svdc.convert(Net()).eval(), torch.randn(2, 4)
    masks = half(model)
    small = svdc.prune(model, x, masks=masks)
    assert small.pruning.notes[0].startswith("fc: its weight is read directly")
    torch.testing.assert_close(small(x), svdc.hold(model, masks)(x))


def test_export_of_an_unpruned_model_is_what_the_model_computes_and_warns(tmp_path):
    model, x = swin()
    svdc.convert(model)
    svdc.hold(model, half(model))
    with pytest.warns(UserWarning, match=r"blocks.0.attn.qkv: its weight is read directly.*blocks.1.attn.proj.*example_inputs"):
        done = svdc.export_onnx(model, tmp_path / "model.onnx", x)
    assert done.parity is not None and done.parity < 1e-4


def test_the_first_loss_says_that_a_weight_is_read_past_its_layer():
    model, x = swin()
    y = torch.tensor([0, 1])
    svdc.convert(model).train()
    elbo = svdc.ELBO(model, nn.CrossEntropyLoss(), num_examples=10)
    with pytest.warns(UserWarning, match=r"read directly.*blocks.0.attn.qkv.*example_inputs"):
        elbo(model(x), y).backward()
    loss = elbo(model(x), y)  # warned about once only
    loss.backward()


def test_the_first_loss_is_silent_where_all_is_well(recwarn):
    model, x = swin()
    svdc.convert(model, example_inputs=x).train()
    svdc.ELBO(model, nn.CrossEntropyLoss(), num_examples=10)(model(x), torch.tensor([0, 1])).backward()
    idle = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])  # one of them is never called
    svdc.convert(idle)
    svdc.ELBO(idle, nn.CrossEntropyLoss(), num_examples=10)(idle[0](torch.randn(2, 3)), torch.tensor([0, 1])).backward()
    assert [str(warning.message) for warning in recwarn] == []
