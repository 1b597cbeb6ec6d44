"""A semi-conditional variational auto-encoder of MNIST, made sparse: its own ELBO plus the weights' KL.

As in the lecture (SCVAE): q(z|x) encodes a digit, p(z|m) is a prior given a few of its pixels m, and the decoder p(x|m, z),
made of ConvTranspose layers, sees both. `-log p(x|m, z) + KL[q(z|x) || p(z|m)]` bounds a digit's negative log likelihood; the
weights' KL over N is added to it. Reconstruction draws z from q(z|x); from a few pixels it draws z from p(z|m).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from svdcompress.convert import convert
from svdcompress.experiments._common import Context, sparsity, train
from svdcompress.experiments._pictures import figure, save
from svdcompress.layers import sampling
from svdcompress.objective import LinearWarmup
from svdcompress.sources import InMemory, open_data


@dataclass(frozen=True)
class Settings:
    """digits: how many for training, the first ones. epochs, sparse_epochs: passes over them. pixels: how many of each digit
    are measured. latent: dimensions of z. samples: draws for each reconstruction from few pixels."""

    digits: int = 10_000
    epochs: int = 10
    sparse_epochs: int = 15
    pixels: int = 60
    latent: int = 16
    samples: int = 50
    beta: float = 1.0


class Vae(nn.Module):
    """Encoder, prior given few pixels, and decoder. x: (N, 1, 28, 28) in [0, 1]; the measured pixels are drawn again at each
    call in `train()`, and with a fixed seed in `eval()`."""

    def __init__(self, latent: int, pixels: int) -> None:
        super().__init__()
        self.latent, self.pixels = latent, pixels
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 4, 2, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(1568, 2 * latent),
        )
        self.prior = nn.Sequential(nn.Flatten(), nn.Linear(2 * 784, 128), nn.ReLU(), nn.Linear(128, 2 * latent))
        self.measured = nn.Sequential(nn.Flatten(), nn.Linear(2 * 784, 64), nn.ReLU())
        self.enter = nn.Sequential(nn.Linear(latent + 64, 1568), nn.ReLU())
        self.decoder = nn.Sequential(nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 2, 1))

    def measure(self, x: Tensor) -> Tensor:
        """Values at some of the pixels, and where these are: (N, 2, 28, 28)."""
        generator = None if self.training else torch.Generator(x.device).manual_seed(0)
        order = torch.rand(len(x), 784, device=x.device, generator=generator).argsort(1)
        mask = (order < self.pixels).to(x.dtype).view(-1, 1, 28, 28)
        return torch.cat([x * mask, mask], 1)

    def decode(self, z: Tensor, m: Tensor) -> Tensor:
        """Logits of the pixels."""
        return self.decoder(self.enter(torch.cat([z, self.measured(m)], 1)).view(-1, 32, 7, 7))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the pixels, and the parameters of q(z|x) and p(z|m), each (N, 2 latent): means and log variances."""
        m = self.measure(x)
        q, p = self.encoder(x), self.prior(m)
        mean, log_variance = q.chunk(2, 1)
        z = mean + (0.5 * log_variance).exp() * torch.randn_like(mean) if self.training else mean
        return self.decode(z, m), q, p


def bound(output: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
    """The mean over digits of `-log p(x|m, z) + KL[q(z|x) || p(z|m)]`, in nats."""
    logits, q, p = output
    reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="none").flatten(1).sum(1)
    return (reconstruction + latent_kl(q, p)).mean()


def latent_kl(q: Tensor, p: Tensor) -> Tensor:
    """KL between normal distributions given as means and log variances, (N, 2 D) each -> (N,)."""
    (q_mean, q_log), (p_mean, p_log) = q.chunk(2, 1), p.chunk(2, 1)
    return 0.5 * (p_log - q_log + (q_log.exp() + (q_mean - p_mean).square()) * (-p_log).exp() - 1).sum(1)


def run(settings: Settings, context: Context) -> dict[str, Any]:
    """Train the dense model, make it sparse, reconstruct with both; writes vae.png. Needs MNIST as the recipe's data."""
    data = open_data(context.data, "classification")
    x = _images(data.train)[: settings.digits]
    test = _images(data.test)[:1000]
    torch.manual_seed(context.seed)
    dense = Vae(settings.latent, settings.pixels)
    train(dense, x, x, bound, context, stage="dense", epochs=settings.epochs, lr=2e-3)
    epochs = settings.sparse_epochs
    sparse: Any = train(
        convert(copy.deepcopy(dense), log_sigma2=-10.0),
        x,
        x,
        bound,
        context,
        stage="sparse",
        epochs=epochs,
        beta=LinearWarmup(0.1 * epochs, 0.6 * epochs, settings.beta),
    )
    with torch.no_grad():
        figures = {name: _judge(model, test, settings, context) for name, model in (("dense", dense), ("sparse", sparse))}
    return {
        "models": figures,
        "sparsity": sparsity(sparse),
        "kept_by_layer": {name: _kept(layer) for name, layer in sparse.named_modules() if hasattr(layer, "log_sigma2")},
        "pictures": [_plot(dense, sparse, test[:8], settings, context)],
    }


def _images(examples: Any) -> Tensor:
    assert isinstance(examples, InMemory)
    return examples.inputs.reshape(-1, 1, 28, 28).float().clamp(0, 1)


def _kept(layer: Any) -> dict[str, int]:
    keep = layer.relevant()
    return {"weights": keep.numel(), "kept": int(keep.sum())}


def _judge(model: Vae, x: Tensor, settings: Settings, context: Context) -> dict[str, float]:
    """Bound on new digits (nats), and mean squared errors of pixels: in reconstructions, and in those from few pixels.

    `few_covered`: the share of the pixels that were not measured whose value lies within two standard deviations (plus 0.01,
    since most pixels are black and certain)."""
    logits, q, p = model(x)
    mean, std = complete(model, x, settings.samples, context.seed)
    hidden = model.measure(x)[:, 1:] == 0
    return {
        "bound": float(bound((logits, q, p), x)),
        "latent_kl": float(latent_kl(q, p).mean()),
        "mse": float((logits.sigmoid() - x).square().mean()),
        "few_mse": float((mean - x).square()[hidden].mean()),
        "few_std": float(std[hidden].mean()),
        "few_covered": float(((mean - x).abs() <= 2 * std + 0.01)[hidden].double().mean()),
    }


@torch.no_grad()
def complete(model: Vae, x: Tensor, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the pixels, given the measured ones: over draws of z from p(z|m) and of the weights."""
    generator = torch.Generator().manual_seed(seed)
    m = model.measure(x)
    total, squares = torch.zeros_like(x, dtype=torch.float64), torch.zeros_like(x, dtype=torch.float64)
    with sampling(model, generator=generator):
        for _ in range(samples):
            mean, log_variance = model.prior(m).chunk(2, 1)
            z = mean + (0.5 * log_variance).exp() * torch.randn(mean.shape, generator=generator)
            pixels = model.decode(z, m).sigmoid().double()
            total += pixels
            squares += pixels.square()
    mean = total / samples
    return mean, (squares / samples - mean.square()).clamp_min(0).sqrt()


@torch.no_grad()
def _plot(dense: Vae, sparse: Vae, x: Tensor, settings: Settings, context: Context) -> dict[str, str]:
    few = {name: complete(model, x, settings.samples, context.seed) for name, model in (("dense", dense), ("sparse", sparse))}
    m = dense.measure(x)
    shown = torch.where(m[:, 1:] > 0, m[:, :1], torch.full_like(x, 0.35))
    rows = {
        "digit": x,
        "dense": dense(x)[0].sigmoid(),
        "sparse": sparse(x)[0].sigmoid(),
        f"{settings.pixels} pixels": shown,
        "dense\nfrom these": few["dense"][0],
        "sparse\nfrom these": few["sparse"][0],
        "its standard\ndeviation": few["sparse"][1],
    }
    drawing, axes = figure(len(rows), len(x), (1.05 * len(x) + 1, 1.1 * len(rows)))
    for row, (name, images) in enumerate(rows.items()):
        top = 0.5 if "deviation" in name else 1.0
        for column, image in enumerate(images):
            axis = axes[row, column]
            axis.imshow(image[0].numpy(), cmap="magma" if "deviation" in name else "gray", vmin=0, vmax=top)
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
        axes[row, 0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
    caption = "Digits, their reconstructions, and what a few of their pixels (the gray ones are unknown) reveal about the rest."
    return save(drawing, context.out / "vae.png", "Digits by the dense and the sparse model", caption)
