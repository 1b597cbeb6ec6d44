"""Small models whose posterior is wide enough to matter."""

from itertools import pairwise

import torch
from torch import nn

import svdcompress as svdc


def widen(model, seed=0, low=-5.0, high=-1.0, dead=0.3):
    """Random log variances, with a share of the weights irrelevant."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if hasattr(module, "log_sigma2"):
            module.log_sigma2.data.uniform_(low, high, generator=generator)
            gone = torch.rand(module.weight.shape, generator=generator) < dead
            module.log_sigma2.data[gone] = 10.0
    return model


def mlp(*widths, activation=nn.ReLU):
    torch.manual_seed(len(widths))
    layers = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def convnet():
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(48, 3)
    )


def plain_draws(model, x, n, seed):
    """n draws of each input by one ordinary forward pass over repeated rows: (n, inputs, ...), float64."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad(), svdc.sampling(model.eval(), generator=generator):
        output = model(x.repeat(n, *[1] * (x.dim() - 1)))
    return output.double().reshape(n, x.shape[0], *output.shape[1:])
