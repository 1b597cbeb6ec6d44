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
        module.loss = svdc.ELBO(module, module.loss, num_examples=len(data), schedule=svdc.LinearWarmup(start=5, stop=20))

    def on_train_epoch_start(self, trainer, module):
        module.loss.set_epoch(trainer.current_epoch)


class Digits(L.LightningModule):  # yours; nothing in it knows of svdcompress
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
        self.loss = nn.CrossEntropyLoss()

    def training_step(self, batch, index):
        return self.loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=3e-3)


images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
model, trainer = Digits(), L.Trainer(max_epochs=40, callbacks=[Sparsify()], logger=False, enable_checkpointing=False)
trainer.fit(model, DataLoader(data, batch_size=64, shuffle=True))
svdc.export_onnx(svdc.prune(model.net.cpu().eval(), data[:2][0]), "digits.onnx", data[:2][0])
print(svdc.relevance(model), "written to digits.onnx")
