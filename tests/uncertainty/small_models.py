"""Small models whose posterior is wide enough to matter."""

import copy
from itertools import pairwise

import torch
from torch import nn

import svdcompress as svdc


def widen(model, seed=0, low=-5.0, high=-1.0, dead=0.3):
    """Set random log variances, with a fraction of the weights irrelevant."""
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
    """n draws of each input, with separate noise for each position, by one ordinary forward pass over repeated rows:
    (n, inputs, ...), float64."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad(), svdc.sampling(model.eval(), generator=generator, local=True):
        output = model(x.repeat(n, *[1] * (x.dim() - 1)))
    return output.double().reshape(n, x.shape[0], *output.shape[1:])


@torch.no_grad()
def weight_draws(model, x, n, seed, run=None):
    """The oracle: n draws of the output, each from a dense copy with weights from the posterior, (n, inputs, ...), float64.

    The copy has torch.nn's own layers. Masks, thresholds and bias variances are read from the parameters here, and tied
    weights are drawn once. run: how to call a model on x.
    """
    generator = torch.Generator().manual_seed(seed)
    dense = copy.deepcopy(model).eval()
    means, stds, biases = {}, {}, {}
    for layer in dense.modules():
        if not hasattr(layer, "log_sigma2"):
            continue
        mean, log_sigma2 = layer.weight.detach().double(), layer.log_sigma2.detach().double()
        keep = log_sigma2 - (mean.square() + 1e-8).log() < 3 if layer.mask is None else layer.mask
        means[layer], stds[layer] = mean * keep, (log_sigma2 / 2).exp() * keep
        biases[layer] = None if layer.bias_sigma2 is None else (layer.bias.detach().clone(), layer.bias_sigma2.sqrt())
        layer.tied = (id(layer.weight), id(layer.log_sigma2))
    layers = list(means)
    for layer in layers:
        tied = layer.tied
        layer.to_dense()
        layer.tied = tied
        layer.weight = nn.Parameter(layer.weight.detach().clone())
    outputs = []
    for _ in range(n):
        noises = {}
        for layer in layers:
            if layer.tied not in noises:
                noises[layer.tied] = torch.randn(means[layer].shape, generator=generator).double()
            layer.weight.copy_(means[layer] + stds[layer] * noises[layer.tied])
            if biases[layer] is not None:
                mean, std = biases[layer]
                layer.bias.copy_(mean + std * torch.randn(mean.shape, generator=generator))
        outputs.append(run(dense, x) if run else dense(x))
    return torch.stack(outputs).double()
