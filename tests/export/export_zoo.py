"""Models that the export tests share, and a slow computation of their predictive distribution."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import svdcompress as svdc
from svdcompress.batch import call
from svdcompress.layers import Sampler, StochasticLayer, variational_layers


def varied(model: nn.Module, *, low: float = -6.0, high: float = -2.0, seed: int = 0) -> nn.Module:
    """A converted model with all kinds of weights: relevant, irrelevant and held ones, and a bias with variance."""
    generator = torch.Generator().manual_seed(seed)
    svdc.convert(model)
    for index, (_, layer) in enumerate(variational_layers(model)):
        with torch.no_grad():
            layer.log_sigma2.copy_(low + (high - low) * torch.rand(layer.weight.shape, generator=generator))
        if index % 2:
            layer.mask = layer.relevant() & (torch.rand(layer.weight.shape, generator=generator) < 0.8)
        if index % 3 == 0 and layer.bias is not None:
            layer.bias_sigma2 = 0.1 * torch.rand(layer.bias.shape, generator=generator)
    return model


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return varied(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)))


class Convolutional(nn.Module):
    """Several kinds of convolutions, BatchNorm, a residual, Bernoulli and Gaussian dropout, a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.twice = nn.Conv2d(4, 4, 3, padding=1, groups=2, padding_mode="circular")
        self.drop = nn.Dropout2d(0.3)
        self.up = nn.ConvTranspose2d(4, 2, 2, stride=2)
        self.spread = nn.Dropout(0.2)
        self.head = nn.Linear(2 * 64, 3)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        hidden = hidden + self.drop(torch.relu(self.twice(hidden)))
        hidden = hidden - 0.1 * self.twice(hidden)
        return self.head(self.spread(torch.relu(self.up(nn.functional.avg_pool2d(hidden, 2)))).flatten(1))


def convolutional() -> nn.Module:
    model = varied(Convolutional())
    svdc.convert_dropout(model)
    model.spread = svdc.layers.GaussianDropout(0.2)
    return model


class Attention(nn.Module):
    """Two keyword inputs of different types; an encoder with random feed-forward layers and dropout, sequence first inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor, scale: Tensor, double: bool = False) -> dict[str, Tensor | None]:
        hidden = self.block(self.embed(tokens).transpose(0, 1)).transpose(0, 1) * scale
        return {"hidden": hidden, "logits": self.head(hidden.mean(1)) * (2 if double else 1), "cache": None}


def attention() -> nn.Module:
    return svdc.convert_dropout(varied(Attention()))


def tokens(rows: int, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 11, (rows, 6), generator=generator)
    return {"tokens": ids, "scale": torch.rand(rows, 1, 1, generator=generator), "double": True}


class Replay(Sampler):
    """Returns given noise in the order in which layers ask for it."""

    def __init__(self, noise: Tensor) -> None:
        super().__init__()
        self.noise, self.used = noise, 0

    def _next(self, shape: Sequence[int]) -> Tensor:
        size = torch.Size(shape).numel()
        self.used += size
        return self.noise[self.used - size : self.used].reshape(shape)

    def normal(self, like: Tensor) -> Tensor:
        return self._next(like.shape)

    def bernoulli(self, shape: Sequence[int], rate: float, like: Tensor) -> Tensor:
        return (self._next(shape) < NormalDist().inv_cdf(rate)).to(like.dtype)


@torch.no_grad()
def draws(
    model: nn.Module, inputs: Any, noise: Tensor, layout: Sequence[dict], batch: int, quiet: Sequence[str] = ()
) -> list[Any]:
    """Outputs of a model for each row of noise. layout: of a row, as in the metadata. quiet: layers that do not draw.

    Layers whose weights are drawn as a whole get them written into a copy of the model; other layers draw their own noise.
    """
    outputs = []
    for row in noise:
        twin = copy.deepcopy(model).eval()
        sizes = [math.prod(batch if size is None else size for size in part["shape"]) for part in layout]
        chunks = list(zip(layout, row.split(sizes), strict=True))
        replay = Replay(torch.cat([row[:0], *(chunk for part, chunk in chunks if part["of"] == "output")]))
        whole = {part["layer"] for part, _ in chunks if part["of"] != "output"}
        for name, module in twin.named_modules():
            if isinstance(module, StochasticLayer):
                module.sampler = None if name in (*quiet, *whole) else replay
        for part, chunk in chunks:
            _draw_whole(twin.get_submodule(part["layer"]), part, chunk)
        outputs.append(call(twin, inputs))
        assert replay.used == len(replay.noise)
    return outputs


def _draw_whole(layer: Any, part: dict, noise: Tensor) -> None:
    if part["of"] == "weight":
        keep = layer.relevant()
        where = keep if part.get("kept") else torch.ones_like(keep)
        drawn = torch.zeros_like(layer.weight).masked_scatter(where, noise) * (layer.log_sigma2 / 2).exp()
        layer.weight.copy_((layer.weight + drawn) * keep)
        layer.mask = torch.ones_like(keep)
    elif part["of"] == "bias":
        layer.bias.copy_(layer.bias + layer.bias_sigma2.sqrt() * noise)


def classification(logits: Sequence[Tensor]) -> dict[str, np.ndarray]:
    """Kwon et al. 2018, written out: all draws at once, in float64."""
    p = torch.softmax(torch.stack(list(logits)).double(), -1).numpy()
    mean = p.mean(0)
    aleatoric, epistemic = (p - p * p).mean(0), ((p - mean) ** 2).mean(0)
    entropy, expected = _entropy(mean).sum(-1), _entropy(p).sum(-1).mean(0)
    return {
        "mean": mean,
        "variance": aleatoric + epistemic,
        "predictive_entropy": entropy,
        "expected_entropy": expected,
        "mutual_information": entropy - expected,
        "aleatoric": aleatoric,
        "epistemic": epistemic,
    }


def binary(logits: Sequence[Tensor]) -> dict[str, np.ndarray]:
    p = torch.sigmoid(torch.stack(list(logits)).double()).numpy()
    result = classification([torch.stack([torch.zeros_like(z), z], -1) for z in logits])
    mean = p.mean(0)
    parts = {"aleatoric": (p * (1 - p)).mean(0), "epistemic": p.var(0)}
    return {**result, "mean": mean, "variance": parts["aleatoric"] + parts["epistemic"], **parts}


def regression(values: Sequence[Tensor], tau: float | None) -> dict[str, np.ndarray]:
    values = torch.stack(list(values)).double().numpy()
    noise = np.full(values.shape[1:], 0.0 if tau is None else 1 / tau)
    return {"mean": values.mean(0), "variance": noise + values.var(0), "aleatoric": noise, "epistemic": values.var(0)}


def gaussian(means: Sequence[Tensor], log_variances: Sequence[Tensor]) -> dict[str, np.ndarray]:
    result = regression(means, None)
    noise = np.exp(torch.stack(list(log_variances)).double().numpy()).mean(0)
    return {**result, "variance": noise + result["epistemic"], "aleatoric": noise}


def _entropy(p: np.ndarray) -> np.ndarray:
    return -p * np.log(np.maximum(p, 1e-300))
