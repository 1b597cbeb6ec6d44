"""Every architecture of the zoo: masked and pruned agree, units go or a reason is given, and checkpoints preserve it all."""

from __future__ import annotations

import pytest
import torch
from masking import gap, masked, other_inputs, outputs, random_masks, shake
from torch import nn
from zoo_models import ZOO

from svdcompress.checkpoint import load, save
from svdcompress.convert import convert
from svdcompress.layers import variational_layers
from svdcompress.prune import prune

SLOW = {"hf-mobilenet-v2", "hf-efficientnet", "hf-swin", "hf-llama", "hf-gpt2", "hf-distilbert", "hf-resnet", "hf-regnet"}


def _names() -> list:
    return [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in ZOO]


def _model(name: str, seed: int) -> tuple[nn.Module, object]:
    torch.manual_seed(seed)
    factory, inputs = ZOO[name]
    return convert(shake(factory()).eval()), inputs()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", _names())
def test_pruned_is_masked(name: str, seed: int, tmp_path) -> None:
    model, inputs = _model(name, seed)
    masks = random_masks(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    small = prune(model, inputs, masks=masks)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[key], before[key]) for key in before)

    oracle = masked(model, masks)
    fresh = other_inputs(inputs)
    for case in (inputs, fresh):
        assert gap(outputs(small.eval(), case), outputs(oracle, case)) <= 1e-5
    report = small.pruning
    assert report.max_error is not None and report.max_error < 1e-3
    fewer = report.parameters_after < report.parameters_before
    untouched = [group.reason for group in report.groups if group.removed == 0]
    assert fewer or (untouched and all(untouched))

    save(small, tmp_path / "small.safetensors")
    again = load(tmp_path / "small.safetensors", ZOO[name][0]()).eval()
    state, restored = small.state_dict(), again.state_dict()
    assert list(sorted(state)) == list(sorted(restored))
    assert all(torch.equal(state[key], restored[key]) for key in state)
    for a, b in zip(outputs(again, fresh), outputs(small, fresh), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", _names())
def test_dead_units_go(name: str) -> None:
    """With many dead rows, every one of these gets smaller."""
    model, inputs = _model(name, 2)
    small = prune(model, inputs, masks=random_masks(model, strewn=0.0, rows=0.7, columns=0.6))
    assert small.pruning.parameters_after < small.pruning.parameters_before
    assert not [note for note in small.pruning.notes if "left masked" in note]


@pytest.mark.parametrize("name", ["mlp", "vgg-bn", "resnet-basic", "mobilenet-v3", "unet", "timm-vit", "gated-mlp", "hf-bert"])
def test_fine_tuning_goes_on(name: str) -> None:
    """Gradients reach every parameter of the pruned model, and what is masked stays masked."""
    model, inputs = _model(name, 3)
    small = prune(model, inputs, masks=random_masks(model)).train()
    optimizer = torch.optim.SGD(small.parameters(), lr=0.1)
    held = {n: layer.mask.clone() for n, layer in variational_layers(small)}
    small(**inputs) if isinstance(inputs, dict) else small(inputs)
    loss = sum((t.square().mean() for t in _with_gradient(small, inputs)), torch.zeros(()))
    loss.backward()
    optimizer.step()
    layers = dict(variational_layers(small))
    assert layers
    for n, layer in layers.items():
        assert torch.equal(layer.mask, held[n])
        assert layer.weight.grad is not None and layer.weight.grad.shape == layer.weight.shape == layer.log_sigma2.shape
        assert not layer.weight.grad[~layer.mask].any()
    for t in outputs(small.eval(), inputs):
        assert torch.isfinite(t).all()


def _with_gradient(model: nn.Module, inputs: object) -> list[torch.Tensor]:
    from svdcompress.batch import call
    from svdcompress.prune._tensors import tensors_in

    return [t for t in tensors_in(call(model, inputs)) if t.requires_grad]
