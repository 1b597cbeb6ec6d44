"""VGG-16 with batch normalization for CIFAR (Simonyan & Zisserman 2014, as in Liu et al. 2017 and most pruning papers)."""

from __future__ import annotations

from torch import Tensor, nn

PLAN = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512)
"""Channels of the 3x3 convolutions; 0 is a pooling by 2."""


class VGG(nn.Module):
    """Thirteen convolutions and one linear layer; (N, 3, 32, 32) -> (N, outputs)."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for width in PLAN:
            if not width:
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [nn.Conv2d(inputs, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            inputs = width
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.classifier(self.features(x).mean((2, 3)))


def vgg16(outputs: int = 10) -> nn.Module:
    """VGG-16-BN."""
    return VGG(outputs)
