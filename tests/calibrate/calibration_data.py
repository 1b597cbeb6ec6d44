"""Small sparse models with data to calibrate on."""

import torch
from torch import nn

import svdcompress as svdc
from svdcompress.sources import InMemory


def examples_of(x, y):
    return InMemory(x, y)


def sparse(model, keep=0.6, log_sigma2=-3.0, seed=0):
    """A converted model in eval() with random held masks and variances large enough to matter."""
    generator = torch.Generator().manual_seed(seed)
    svdc.convert(model)
    for module in model.modules():
        if hasattr(module, "log_sigma2"):
            module.log_sigma2.data = log_sigma2 + torch.rand(module.weight.shape, generator=generator)
            module.mask = torch.rand(module.weight.shape, generator=generator) < keep
    return model.eval()


def mlp_classifier(n=80, classes=3, seed=0):
    torch.manual_seed(seed)
    model = sparse(nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, classes)))
    x = torch.randn(n, 4)
    y = torch.multinomial((2 * model(x)).detach().softmax(1), 1).squeeze(1)
    return model, (x, y)
