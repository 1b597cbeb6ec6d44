"""A pruned GPT-2, whose layers hold their sizes as numbers, against its dense model with zeros put in by hand."""

import copy

import pytest
import torch

import svdcompress as svdc

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(("inner", "gone"), [(None, 20), (16, 4), (48, 4)])
def test_a_pruned_gpt2_has_the_numbers_of_its_tensors(inner, gone):
    """Variational layers compute without them; plain ones, after `to_dense`, and another pruning need them."""
    size = {"vocab_size": 30, "n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 32, "n_inner": inner}
    plain = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, use_cache=False)).eval()
    model = svdc.convert(copy.deepcopy(plain), log_sigma2=-30.0)
    x = {"input_ids": torch.randint(3, 29, (2, 6), generator=torch.Generator().manual_seed(0))}
    with torch.no_grad():
        for each in (plain, model):
            block, value, name = each.transformer.h[0], *((0.0, "weight") if each is plain else (9.0, "log_sigma2"))
            getattr(block.attn.c_proj, name)[:4] = value  # one head
            getattr(block.mlp.c_proj, name)[:gone] = value
        wanted = plain(**x).logits
        small = svdc.prune(model, x)
        layers = [layer for layer in small.modules() if hasattr(layer, "nx")]
        assert [(layer.nx, layer.nf) for layer in layers] == [tuple(layer.weight.shape) for layer in layers]
        left = (inner or 64) - gone
        assert [tuple(layer.weight.shape) for layer in layers] == [(16, 36), (12, 16), (16, left), (left, 16)]
        for one in (small, svdc.to_dense(copy.deepcopy(small)), svdc.prune(small, x)):
            assert torch.allclose(one(**x).logits, wanted, atol=1e-5)
