"""Sparsify a LightningModule with a callback. Run it: python lightning_callback.py"""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import svdcompress as svdc
from svdcompress.interop.lightning import SparsifyCallback


class Digits(L.LightningModule):  # yours, unchanged: it does not use svdcompress
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=3e-3)


images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
callback = SparsifyCallback(schedule=svdc.LinearWarmup(start=5, stop=20))
model, trainer = Digits(), L.Trainer(max_epochs=40, callbacks=[callback], logger=False, enable_checkpointing=False)
trainer.fit(model, DataLoader(data, batch_size=64, shuffle=True))
svdc.export_onnx(svdc.prune(model.net.cpu().eval(), data[:2][0]), "digits.onnx", data[:2][0])
print(svdc.relevance(model), "written to digits.onnx")
