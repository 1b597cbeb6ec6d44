"""Sparsify a LightningModule with a callback. Run it: python lightning_callback.py"""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import svdcompress as svdc


class Sparsify(L.Callback):
    def setup(self, trainer, module, stage):  # before the optimizer is made, so that it gets log_sigma2 too
        svdc.convert(module)

    def on_before_backward(self, trainer, module, loss):
        beta = svdc.LinearWarmup(start=5, stop=20)(trainer.current_epoch)
        loss.add_(svdc.kl_divergence(module), alpha=beta / len(trainer.train_dataloader.dataset))


class Digits(L.LightningModule):  # yours; nothing in it knows of svdcompress
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=3e-3)


images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
model, trainer = Digits(), L.Trainer(max_epochs=40, callbacks=[Sparsify()], logger=False, enable_checkpointing=False)
trainer.fit(model, DataLoader(data, batch_size=64, shuffle=True))
small = svdc.prune(model.net.cpu().eval(), data[:2][0])
svdc.export_onnx(small, "digits.onnx", data[:2][0])
print(svdc.relevance(model), "written to digits.onnx")
