"""Pruned models of the zoo export to ONNX, and their files compute the same as the masked models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from masking import masked, random_masks, shake
from zoo_models import ZOO

from svdcompress.convert import convert
from svdcompress.prune import prune

NAMES = [
    *(
        "mlp",
        "lenet5",
        "vgg-bn",
        "conv1d",
        "autoencoder",
        "resnet-basic",
        "resnet-bottleneck",
        "resnext",
        "regnet-y",
        "mobilenet-v2",
    ),
    *("mobilenet-v3", "efficientnet-like", "densenet", "shufflenet", "inception", "unet", "super-resolution", "timm-vit"),
    *("gated-mlp", "hf-vit", "hf-swin", "hf-convnext", "lstm", "hf-bert", "hf-distilbert", "hf-llama", "hf-gpt2"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_file_agrees_with_the_masked_model(name: str, tmp_path) -> None:
    import onnxruntime

    from svdcompress import export_onnx
    from svdcompress.batch import call, main_output, map_tensors

    torch.manual_seed(0)
    factory, inputs = ZOO[name]
    model, x = convert(shake(factory()).eval()), inputs()
    masks = random_masks(model)
    small = prune(model, x, masks=masks)
    exported = export_onnx(small.eval(), tmp_path / "small.onnx", x)
    session = onnxruntime.InferenceSession(str(exported.path), providers=["CPUExecutionProvider"])
    wider = map_tensors(x, lambda t: torch.cat([t, t, t]))
    feed = wider if isinstance(wider, dict) else {session.get_inputs()[0].name: wider}
    names = {node.name for node in session.get_inputs()}
    out = session.run(None, {key: value.numpy() for key, value in feed.items() if key in names})[0]
    with torch.no_grad():
        expected = main_output(call(masked(model, masks), wider)).numpy()
    np.testing.assert_allclose(out, expected, atol=2e-5 * max(1.0, np.abs(expected).max()))
