"""Attention heads are removed whole and head counts follow; hidden units of MLP blocks go; streams under a norm stay."""

from __future__ import annotations

import pytest
import torch
from masking import gap, masked, other_inputs, outputs, shake
from torch import Tensor, nn
from zoo_models import ZOO

from svdcompress.convert import convert
from svdcompress.layers import variational_layers
from svdcompress.prune import groups, prune

# name: (output projection of the first attention, its value rows as (layer, first row), number of heads that share a key)
CASES = {
    "hf-bert": ("bert.encoder.layer.0.attention.output.dense", ("bert.encoder.layer.0.attention.self.value", 0), 1),
    "hf-distilbert": (
        "distilbert.transformer.layer.0.attention.out_lin",
        ("distilbert.transformer.layer.0.attention.v_lin", 0),
        1,
    ),
    "hf-vit": ("vit.layers.0.attention.o_proj", ("vit.layers.0.attention.v_proj", 0), 1),
    "timm-vit": ("blocks.0.attn.proj", ("blocks.0.attn.qkv", 32), 1),
    "hf-llama": ("model.layers.0.self_attn.o_proj", ("model.layers.0.self_attn.v_proj", 0), 2),
}
HEAD = 4


def setup(name: str) -> tuple[nn.Module, object, dict[str, Tensor]]:
    torch.manual_seed(0)
    factory, inputs = ZOO[name]
    model = convert(shake(factory()).eval())
    return model, inputs(), {n: torch.ones_like(layer.weight, dtype=torch.bool) for n, layer in variational_layers(model)}


def agree(model: nn.Module, small: nn.Module, masks: dict[str, Tensor], inputs: object) -> None:
    oracle = masked(model, masks)
    for case in (inputs, other_inputs(inputs)):
        assert gap(outputs(small.eval(), case), outputs(oracle, case)) <= 1e-5


@pytest.mark.parametrize("name", CASES)
def test_heads_that_nothing_reads_go(name: str) -> None:
    model, inputs, masks = setup(name)
    out, _, shared = CASES[name]
    width = HEAD * shared
    masks[out][:, width : 2 * width] = False
    small = prune(model, inputs, masks=masks)
    agree(model, small, masks, inputs)
    assert small.get_submodule(out).in_features == 16 - width
    counts = {
        attribute: (getattr(a, attribute), getattr(b, attribute))
        for a, b in zip(model.modules(), small.modules(), strict=True)
        for attribute in vars(a)
        if "heads" in attribute and type(getattr(a, attribute)) is int and getattr(a, attribute) != getattr(b, attribute)
    }
    assert name not in ("timm-vit",) or counts == {"num_heads": (4, 3)}


@pytest.mark.parametrize("name", CASES)
def test_part_of_a_head_stays(name: str) -> None:
    model, inputs, masks = setup(name)
    out = CASES[name][0]
    masks[out][:, 1:3] = False
    small = prune(model, inputs, masks=masks)
    agree(model, small, masks, inputs)
    assert small.get_submodule(out).in_features == 16


@pytest.mark.parametrize("name", ["hf-bert", "hf-distilbert", "timm-vit"])
def test_heads_of_constant_value_are_folded(name: str) -> None:
    """A softmax's weights add up to 1, so a head whose values are only their bias emits that bias."""
    model, inputs, masks = setup(name)
    out, (layer, first), _ = CASES[name]
    masks[layer][first + HEAD : first + 2 * HEAD] = False
    small = prune(model, inputs, masks=masks)
    agree(model, small, masks, inputs)
    if isinstance(inputs, dict):  # a fully masked example has no weights to add up, so the head stays
        holes = {**inputs, "attention_mask": torch.tensor([[1, 1, 1, 0, 0, 0, 0], [0] * 7])}
        assert gap(outputs(small, holes), outputs(masked(model, masks), holes)) <= 1e-5
    else:
        assert small.get_submodule(out).in_features == 12


@pytest.mark.parametrize("name", ["hf-bert", "hf-vit", "timm-vit", "torch-transformer"])
def test_streams_under_a_norm_stay_with_a_reason(name: str) -> None:
    model, inputs, _ = setup(name)
    told = [(group.prunable, group.reason) for group in groups(model, inputs).groups]
    assert any(not prunable and ("LayerNorm" in reason or "MultiheadAttention" in reason) for prunable, reason in told)
    assert any(prunable for prunable, _ in told)


def test_hidden_units_of_a_transformer_go() -> None:
    model, inputs, masks = setup("hf-bert")
    masks["bert.encoder.layer.1.intermediate.dense"][3:9] = False
    masks["bert.encoder.layer.1.output.dense"][:, 20:] = False
    small = prune(model, inputs, masks=masks)
    agree(model, small, masks, inputs)
    assert small.bert.encoder.layer[1].intermediate.dense.out_features == 24 - 6 - 4


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_recurrent_layers_are_left_alone_and_what_is_around_them_goes(name: str) -> None:
    model, inputs, masks = setup(name)
    masks["project"][:, :3] = False
    masks["fc1"][:5] = False
    small = prune(model, inputs, masks=masks)
    agree(model, small, masks, inputs)
    assert (small.embed.embedding_dim, small.fc1.out_features, small.project.out_features) == (9, 9, 16)
    assert "recurrent" in {group.name: group.reason for group in small.pruning.groups}["project"]


@pytest.mark.parametrize("name", ["resnext", "regnet-y", "depthwise-multiplier", "mobilenet-v2"])
def test_groups_of_convolutions_lose_equally_many(name: str) -> None:
    model, inputs, masks = setup(name)
    for layer, module in variational_layers(model):
        view = module.canonical(masks[layer])
        if view.shape[0] == 1 and module.weight.dim() == 4:
            view[0, 1::4] = False  # this many in each group of the next layer, leaving one to carry the constants
            view[0, 2::4] = False
    small = prune(model, inputs, masks=masks)
    agree(model, small, masks, inputs)
    grouped = [m for _, m in variational_layers(small) if getattr(m, "groups", 1) > 1]
    before = [m for _, m in variational_layers(model) if getattr(m, "groups", 1) > 1]
    assert grouped and all(a.in_channels < b.in_channels for a, b in zip(grouped, before, strict=True))
    assert all(m.in_channels % m.groups == 0 and m.out_channels % m.groups == 0 for m in grouped)
