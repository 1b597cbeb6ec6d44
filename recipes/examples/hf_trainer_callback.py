"""Sparsify with Hugging Face's Trainer: a small ViT on scikit-learn's digits. Run it: python hf_trainer_callback.py"""

import torch
from sklearn.datasets import load_digits
from transformers import Trainer, TrainerCallback, TrainingArguments, ViTConfig, ViTForImageClassification

import svdcompress as svdc


class FollowEpochs(TrainerCallback):
    def on_epoch_begin(self, args, state, control, **kwargs):
        elbo.set_epoch(state.epoch or 0)


def loss(outputs, labels, num_items_in_batch=None):  # Trainer sums the losses of a step's batches
    return elbo(outputs.logits, labels) * len(labels) / (num_items_in_batch or len(labels))


digits = load_digits()
images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
data = [{"pixel_values": x, "labels": int(y)} for x, y in zip(images, digits.target, strict=True)]
size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **size))

svdc.convert(model, exclude=["vit.embeddings.*"])
schedule = svdc.LinearWarmup(start=5, stop=15)
elbo = svdc.ELBO(model, torch.nn.CrossEntropyLoss(), num_examples=len(data), schedule=schedule)
Trainer(
    model,
    TrainingArguments("trainer", num_train_epochs=25, per_device_train_batch_size=64, learning_rate=3e-3, report_to="none"),
    train_dataset=data,
    callbacks=[FollowEpochs()],
    compute_loss_func=loss,
).train()

example = {"pixel_values": images[:2]}
small = svdc.prune(model.cpu().eval(), example)
svdc.export_onnx(small, "digits.onnx", example)
print(svdc.relevance(model), "written to digits.onnx")
