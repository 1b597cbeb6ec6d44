"""The networks that the recipes use, under the names that they are known by."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import nn

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "silu": nn.SiLU}


def mlp(sizes: Sequence[int] = (64, 300, 100, 10), activation: str = "relu", dropout: float = 0.0) -> nn.Sequential:
    """Fully connected layers of the given sizes; inputs of any shape are flattened.

    sizes: inputs, hidden units ..., outputs. Input (N, ...) -> (N, sizes[-1]).
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for index, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        if index:
            layers.append(ACTIVATIONS[activation]())
            layers += [nn.Dropout(dropout)] if dropout else []
        layers.append(nn.Linear(inputs, outputs))
    return nn.Sequential(*layers)


def lenet_300_100(outputs: int = 10) -> nn.Sequential:
    """LeNet-300-100 (LeCun et al. 1998); (N, 1, 28, 28) or (N, 784) -> (N, outputs)."""
    net = nn.Sequential()
    for name, layer in (
        ("flatten", nn.Flatten()),
        ("fc1", nn.Linear(784, 300)),
        ("relu1", nn.ReLU()),
        ("fc2", nn.Linear(300, 100)),
        ("relu2", nn.ReLU()),
        ("fc3", nn.Linear(100, outputs)),
    ):
        net.add_module(name, layer)
    return net


def lenet_5(outputs: int = 10) -> nn.Sequential:
    """Caffe's LeNet-5: 20 and 50 filters of 5x5 without padding, each max-pooled by 2, 500 hidden units.

    Has a ReLU after each pooling too, as in Molchanov et al. 2017 (Caffe's own has one ReLU, before the last layer).
    (N, 1, 28, 28) -> (N, outputs).
    """
    net = nn.Sequential()
    for name, layer in (
        ("conv1", nn.Conv2d(1, 20, 5)),
        ("pool1", nn.MaxPool2d(2)),
        ("relu1", nn.ReLU()),
        ("conv2", nn.Conv2d(20, 50, 5)),
        ("pool2", nn.MaxPool2d(2)),
        ("relu2", nn.ReLU()),
        ("flatten", nn.Flatten()),
        ("fc1", nn.Linear(800, 500)),
        ("relu3", nn.ReLU()),
        ("fc2", nn.Linear(500, outputs)),
    ):
        net.add_module(name, layer)
    return net


NETS = {"mlp": mlp, "lenet-300-100": lenet_300_100, "lenet-5": lenet_5}
"""Built-in models by name."""
