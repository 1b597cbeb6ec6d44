"""Transformer architectures, small and random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from zoo_register import ZOO, image, tokens


def _from(name: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def factory() -> nn.Module:
        import transformers

        return getattr(transformers, name)(getattr(transformers, config)(**settings)).eval()

    return factory


_ENCODER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
_TEXT = {**_ENCODER, "vocab_size": 50, "max_position_embeddings": 32}
_PICTURE = {"image_size": 16, "patch_size": 4, "num_labels": 4}
_HF = {
    "hf-bert": (_from("BertForSequenceClassification", "BertConfig", **_TEXT), tokens()),
    "hf-distilbert": (
        _from(
            "DistilBertForSequenceClassification",
            "DistilBertConfig",
            **{"vocab_size": 50, "dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 24, "max_position_embeddings": 32},
        ),
        tokens(),
    ),
    "hf-gpt2": (
        _from("GPT2LMHeadModel", "GPT2Config", vocab_size=50, n_embd=16, n_layer=2, n_head=4, n_positions=32, use_cache=False),
        tokens(),
    ),
    "hf-llama": (
        _from("LlamaForCausalLM", "LlamaConfig", **{**_TEXT, "num_key_value_heads": 2, "use_cache": False}),
        tokens(),
    ),
    "hf-vit": (_from("ViTForImageClassification", "ViTConfig", **_ENCODER, **_PICTURE), image()),
    "hf-swin": (
        _from(
            "SwinForImageClassification",
            "SwinConfig",
            **{"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4},
        ),
        image(),
    ),
    "hf-convnext": (
        _from("ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[8, 12], depths=[1, 1], num_stages=2),
        image(),
    ),
    "hf-resnet": (
        _from("ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[16, 24], depths=[1, 2]),
        image(),
    ),
    "hf-regnet": (
        _from(
            "RegNetForImageClassification",
            "RegNetConfig",
            hidden_sizes=[16, 24],
            depths=[1, 1],
            groups_width=4,
            embedding_size=8,
        ),
        image(),
    ),
    "hf-mobilenet-v2": (
        _from("MobileNetV2ForImageClassification", "MobileNetV2Config", depth_multiplier=0.25, image_size=32),
        image(32),
    ),
    "hf-efficientnet": (
        _from(
            "EfficientNetForImageClassification",
            "EfficientNetConfig",
            **{"image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
        ),
        image(32),
    ),
}
ZOO.update(_HF)
