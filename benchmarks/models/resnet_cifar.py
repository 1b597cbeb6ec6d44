"""ResNet-20 and -56 for CIFAR (He et al. 2015, section 4.2), with the parameter names of akamaster/pytorch_resnet_cifar10.

Shortcuts have no parameters (option A): they take every second position, with zeros for the new channels.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

WIDTHS = (16, 32, 64)


class Shortcut(nn.Module):
    """Every second position, with zeros for the new channels on both sides (option A).

    A module of its own, as in the original code: pruning can then cut channels from what it returns.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride, self.new = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) -> (N, outputs, H / stride, W / stride)."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.new // 2, self.new - self.new // 2))


class Block(nn.Module):
    """Two 3x3 convolutions with a shortcut; (N, inputs, H, W) -> (N, outputs, H / stride, W / stride)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if inputs == outputs and stride == 1 else Shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """Three stages of `depth` blocks each; (N, 3, H, W) -> (N, outputs)."""

    layer1: nn.Module
    layer2: nn.Module
    layer3: nn.Module

    def __init__(self, depth: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTHS[0], 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(WIDTHS[0])
        inputs = WIDTHS[0]
        for number, width in enumerate(WIDTHS, 1):
            blocks = [Block(inputs if not i else width, width, 2 if number > 1 and not i else 1) for i in range(depth)]
            setattr(self, f"layer{number}", nn.Sequential(*blocks))
            inputs = width
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


def resnet20(outputs: int = 10) -> nn.Module:
    """ResNet-20."""
    return ResNet(3, outputs)


def resnet56(outputs: int = 10) -> nn.Module:
    """ResNet-56."""
    return ResNet(9, outputs)
