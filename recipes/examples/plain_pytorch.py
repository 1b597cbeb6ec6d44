"""Sparsify in your own training loop: plain PyTorch on scikit-learn's digits. Run it: python plain_pytorch.py"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import svdcompress as svdc

images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
train, test = random_split(data, [1500, 297], torch.Generator().manual_seed(0))
model = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))

svdc.convert(model)  # your trained model; the one here is untrained
schedule = svdc.LinearWarmup(start=5, stop=20)
elbo = svdc.ELBO(model, nn.CrossEntropyLoss(), num_examples=len(train), schedule=schedule)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(40):
    elbo.set_epoch(epoch)
    for x, y in DataLoader(train, batch_size=64, shuffle=True):
        optimizer.zero_grad()
        elbo(model(x), y).backward()
        optimizer.step()

x, y = test[:]
small = svdc.prune(model.eval(), x[:2])
svdc.export_onnx(small, "digits.onnx", x[:2])
error = 100 * (small(x).argmax(1) != y).float().mean()
print(f"test error {error:.1f} %, {svdc.relevance(model)}, written to digits.onnx")
