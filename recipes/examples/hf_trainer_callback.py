"""Sparsify with Hugging Face's Trainer: a small ViT on scikit-learn's digits. Run it: python hf_trainer_callback.py"""

import torch
from sklearn.datasets import load_digits
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import svdcompress as svdc
from svdcompress.interop.transformers import SparsifyCallback

digits = load_digits()
images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
data = [{"pixel_values": x, "labels": int(y)} for x, y in zip(images, digits.target, strict=True)]
size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **size))

# Converts the model when the Trainer is created, before its optimizer, and adds the KL to the loss that the model returns.
callback = SparsifyCallback(schedule=svdc.LinearWarmup(start=5, stop=15), exclude=["vit.embeddings.*"])
Trainer(
    model,
    TrainingArguments("trainer", num_train_epochs=25, per_device_train_batch_size=64, learning_rate=3e-3, report_to="none"),
    train_dataset=data,
    callbacks=[callback],
).train()

example = {"pixel_values": images[:2]}
small = svdc.prune(model.cpu().eval(), example)
svdc.export_onnx(small, "digits.onnx", example)
print(svdc.relevance(model), "written to digits.onnx")
