"""Small models whose weights are used at several positions of a row, each in a different way, with an input."""

import torch
from small_models import widen
from torch import nn
from torch.nn import functional as F

import svdcompress as svdc


class Tokens(nn.Module):
    """The issue's example: a Linear over 64 tokens, and their mean."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 2)

    def forward(self, x):
        return self.linear(x).mean(1)


class Vit(nn.Module):
    """Patches, a transformer encoder, the mean of the tokens, a head."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 4, stride=4)
        self.place = nn.Parameter(0.5 * torch.randn(1, 4, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.place
        return self.head(self.block(tokens).mean(1))


class Twice(nn.Module):
    """A layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.body(x) + self.body(0.8 * x))


class Tied(nn.Module):
    """Two layers with a shared weight, and their own biases."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(self.first(x) + self.second(0.8 * x))


class Folded(nn.Module):
    """Tokens folded into the batch: the Linear sees two dimensions, yet several rows belong to one input."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x.flatten(0, 1)).unflatten(0, x.shape[:2]).sum(1)


class TokensFirst(nn.Module):
    """Equal numbers of tokens and inputs, with the batch second."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x.transpose(0, 1)).mean(0)


class Sequence(nn.Module):
    """Convolutions in one dimension, a transposed one, and pooling over the length."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.GELU(), nn.ConvTranspose1d(4, 4, 2, stride=2))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(F.gelu(self.body(x)).mean(-1))


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def map_of_pixels():
    """A label for each pixel: one weight gives outputs at several positions."""
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 1))


def bert():
    transformers = __import__("pytest").importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=8,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.5,
    )
    config._attn_implementation = "eager"
    return transformers.BertForSequenceClassification(config)


MODELS = {
    "tokens": (Tokens, (3, 64, 8)),
    "cnn": (cnn, (3, 1, 8, 8)),
    "pixels": (map_of_pixels, (2, 1, 4, 4)),
    "vit": (Vit, (3, 1, 8, 8)),
    "sequence": (Sequence, (3, 2, 10)),
    "twice": (Twice, (4, 6)),
    "tied": (Tied, (4, 6)),
    "folded": (Folded, (3, 5, 4)),
    "tokens first": (TokensFirst, (4, 4, 4)),
    "bert": (bert, (3, 6)),
}


def made(name, low=-5.0, high=-2.0):
    """A variational model in `eval()`, with some dead weights and noisy biases, and an input."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = widen(svdc.convert(make()), low=low, high=high, dead=0.2).eval()
    for index, layer in enumerate(svdc.layers.stochastic_layers(model)):
        if index % 2 == 0 and layer.bias is not None:
            layer.bias_sigma2 = 0.05 * torch.rand(layer.bias.shape)
    generator = torch.Generator().manual_seed(5)
    if name == "bert":
        return model, {"input_ids": torch.randint(20, shape, generator=generator)}
    return model, 0.5 + torch.randn(shape, generator=generator)
