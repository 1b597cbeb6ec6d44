"""A flow field from a few sensors: the semi-conditional auto-encoder on the wake behind an obstacle, made sparse.

The lecture's second example has 8,500 fields of an ocean model, 32 x 32 x 2. Here fields of the same size are simulated as a
vortex street: a stream past an obstacle, vortices of both signs in two rows that drift with it, of random phase, strength and
spacing, and weak turbulence. The prior p(z|m) and the decoder p(x|m, z) see velocities at a few places, with the sensors'
noise; the field is drawn from these alone, and compared with the best linear estimate from the same sensors.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.convert import convert
from svdcompress.experiments._common import Context, sparsity, train
from svdcompress.experiments._pictures import INK, figure, save
from svdcompress.experiments._vae import latent_kl
from svdcompress.layers import sampling
from svdcompress.objective import LinearWarmup

SIDE = 32
SENSOR_NOISE = 0.02
TEST = 500


@dataclass(frozen=True)
class Settings:
    """fields: how many for training. epochs, sparse_epochs: passes over them. sensors: places where both velocities are
    measured. latent: dimensions of z. samples: draws for each reconstruction."""

    fields: int = 3000
    epochs: int = 20
    sparse_epochs: int = 30
    sensors: int = 5
    latent: int = 8
    samples: int = 50
    beta: float = 1.0


def wakes(count: int, generator: torch.Generator) -> Tensor:
    """Velocities (count, 2, 32, 32) of a vortex street, along the stream and across it; the free stream is about 1.

    The grid is 4 by 4 obstacle widths. Each part has a stream function, so that no mass is lost.
    """
    rand = lambda low, high, *shape: low + (high - low) * torch.rand(count, *shape, generator=generator)  # noqa: E731
    speed, strength = rand(0.8, 1.2, 1, 1), rand(0.6, 1.4, 1, 1)
    phase, spacing, height = rand(0, 1, 1, 1), rand(1.6, 2.4, 1, 1), rand(0.35, 0.55, 1, 1)
    shift = 0.15 * torch.randn(count, 1, 1, generator=generator)
    axis = (torch.arange(SIDE) + 0.5) * 4 / SIDE
    y, x = torch.meshgrid(axis - 2, axis, indexing="ij")
    u, v = speed.expand(count, SIDE, SIDE).clone(), torch.zeros(count, SIDE, SIDE)
    for number in range(-2, 5):
        for sign in (1.0, -1.0):  # the lower row lies half a spacing behind the upper one
            at_x = (number + phase + (0.0 if sign > 0 else 0.5)) * spacing
            dx, dy = x - at_x, y - shift - sign * height
            square = dx.square() + dy.square()
            turn = -sign * strength * -torch.expm1(-square / 0.18) / square.clamp_min(1e-6) * 0.35  # Lamb-Oseen
            u, v = u - turn * dy, v + turn * dx
    for wave in range(1, 4):  # turbulence, from a stream function of random waves
        angle, offset = rand(0, math.tau, 1, 1), rand(0, math.tau, 1, 1)
        k = wave * math.pi / 2
        slope = 0.03 / wave * torch.cos(k * (angle.cos() * x + angle.sin() * y) + offset)
        u, v = u + slope * angle.sin(), v - slope * angle.cos()
    return torch.stack([u, v], 1)


def places(sensors: int) -> Tensor:
    """Where the sensors are: (sensors, 2), row and column, spread over the wake; the same at each call."""
    order = torch.randperm(SIDE * SIDE // 4, generator=torch.Generator().manual_seed(7))[:sensors]
    half = SIDE // 2
    return torch.stack([SIDE // 4 + order // half, 2 * (order % half)], 1)


class FlowVae(nn.Module):
    """Encoder, prior given the sensors, and decoder with one noise for all places. Input: a field and its sensors' values as
    one row, (N, 2 * 32 * 32 + 2 * sensors)."""

    def __init__(self, latent: int, sensors: int) -> None:
        super().__init__()
        self.sensors = 2 * sensors
        self.encoder = nn.Sequential(
            nn.Conv2d(2, 16, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 4, 2, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2048, 2 * latent),
        )
        self.prior = nn.Sequential(nn.Linear(self.sensors, 128), nn.ReLU(), nn.Linear(128, 2 * latent))
        self.enter = nn.Sequential(nn.Linear(latent + self.sensors, 2048), nn.ReLU())
        self.decoder = nn.Sequential(nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 2, 4, 2, 1))
        self.log_noise = nn.Parameter(torch.tensor(-5.0))  # log variance of a velocity about the decoder's

    def decode(self, z: Tensor, m: Tensor) -> Tensor:
        """Mean velocities, (N, 2, 32, 32)."""
        return self.decoder(self.enter(torch.cat([z, m], 1)).view(-1, 32, SIDE // 4, SIDE // 4))

    def forward(self, row: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mean velocities, parameters of q(z|x) and p(z|m), (N, 2 latent) each, and the log variance of a velocity."""
        x, m = split(row, self.sensors)
        q, p = self.encoder(x), self.prior(m)
        mean, log_variance = q.chunk(2, 1)
        z = mean + (0.5 * log_variance).exp() * torch.randn_like(mean) if self.training else mean
        return self.decode(z, m), q, p, self.log_noise


def split(row: Tensor, sensors: int) -> tuple[Tensor, Tensor]:
    """Fields (N, 2, 32, 32) and the sensors' values (N, sensors)."""
    return row[:, :-sensors].reshape(-1, 2, SIDE, SIDE), row[:, -sensors:]


def measured(x: Tensor, at: Tensor, generator: torch.Generator) -> Tensor:
    """What the sensors measure in fields, with their noise: (N, 2 * sensors)."""
    values = x[:, :, at[:, 0], at[:, 1]].flatten(1)
    return values + SENSOR_NOISE * torch.randn(values.shape, generator=generator)


def bound(output: tuple[Tensor, Tensor, Tensor, Tensor], row: Tensor) -> Tensor:
    """The mean over fields of `-log p(x|m, z) + KL[q(z|x) || p(z|m)]`, in nats."""
    mean, q, p, log_noise = output
    x = row[:, : mean[0].numel()].reshape(mean.shape)
    nll = 0.5 * (math.log(math.tau) + log_noise + (x - mean).square() * (-log_noise).exp())
    return (nll.flatten(1).sum(1) + latent_kl(q, p)).mean()


def run(settings: Settings, context: Context) -> dict[str, Any]:
    """Train the dense model, make it sparse, reconstruct new fields with both and by least squares; writes flow.png."""
    generator = torch.Generator().manual_seed(context.seed)
    at = places(settings.sensors)
    x, test = wakes(settings.fields, generator), wakes(TEST, generator)
    seen, test_seen = measured(x, at, generator), measured(test, at, generator)
    rows = torch.cat([x.flatten(1), seen], 1)
    torch.manual_seed(context.seed)
    dense = FlowVae(settings.latent, settings.sensors)
    train(dense, rows, rows, bound, context, stage="dense", epochs=settings.epochs, lr=2e-3)
    epochs = settings.sparse_epochs
    beta = LinearWarmup(0.1 * epochs, 0.6 * epochs, settings.beta)
    start = convert(copy.deepcopy(dense), log_sigma2=-10.0)
    sparse: Any = train(start, rows, rows, bound, context, stage="sparse", epochs=epochs, beta=beta)
    found = {
        name: complete(model, test_seen, settings.samples, context.seed)
        for name, model in (("dense", dense), ("sparse", sparse))
    }
    found["least squares"] = least_squares(x, seen, test_seen)
    return {
        "models": {name: judge(mean, std, test) for name, (mean, std) in found.items()},
        "sparsity": sparsity(sparse),
        "pictures": [_plot(found, test, at, context)],
    }


@torch.no_grad()
def complete(model: Any, m: Tensor, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the velocities given the sensors: over draws of z from p(z|m) and of the weights, and
    with the decoder's noise."""
    generator = torch.Generator().manual_seed(seed)
    total, squares = torch.zeros(len(m), 2, SIDE, SIDE, dtype=torch.float64), torch.zeros(len(m), 2, SIDE, SIDE).double()
    with sampling(model, generator=generator):
        for _ in range(samples):
            mean, log_variance = model.prior(m).chunk(2, 1)
            z = mean + (0.5 * log_variance).exp() * torch.randn(mean.shape, generator=generator)
            field = model.decode(z, m).double()
            total += field
            squares += field.square()
    mean = total / samples
    variance = (squares / samples - mean.square()).clamp_min(0) + float(model.log_noise.exp())
    return mean, variance.sqrt()


def least_squares(x: Tensor, seen: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """The linear estimate of the field from the sensors, and the standard deviation of its residuals at each place."""
    design = torch.cat([seen, torch.ones(len(seen), 1)], 1).double()
    slopes = torch.linalg.lstsq(design, x.flatten(1).double()).solution
    left = (x.flatten(1).double() - design @ slopes).std(0)
    mean = torch.cat([new, torch.ones(len(new), 1)], 1).double() @ slopes
    return mean.view(-1, *x.shape[1:]), left.view(1, *x.shape[1:]).expand(len(new), -1, -1, -1)


def judge(mean: Tensor, std: Tensor, x: Tensor) -> dict[str, float]:
    """Figures of reconstructions from the sensors: the error relative to the variation of the fields (1: no better than the
    mean field), the share of velocities within the 95% bands, and the bands' mean standard deviation."""
    off = (mean - x).square()
    varies = (x - x.mean(0)).double().square().mean()
    return {
        "relative_error": float((off.mean() / varies).sqrt()),
        "covered": float((off.sqrt() <= 1.959964 * std).double().mean()),
        "std": float(std.mean()),
    }


def _plot(found: dict[str, tuple[Tensor, Tensor]], test: Tensor, at: Tensor, context: Context) -> dict[str, str]:
    shown = 4
    rows = {"field and sensors": test} | {f"{name},\nfrom these": mean for name, (mean, _) in found.items()}
    rows["sparse, its\nstandard deviation"] = found["sparse"][1]
    drawing, axes = figure(len(rows), shown, (2.1 * shown + 1, 2.0 * len(rows)))
    for row, (name, fields) in enumerate(rows.items()):
        for column in range(shown):
            axis, field = axes[row, column], fields[column]
            if "deviation" in name:
                axis.imshow(field.square().sum(0).sqrt().numpy(), cmap="magma", origin="lower", vmin=0)
            else:
                curl = field[1].diff(dim=1)[:-1] - field[0].diff(dim=0)[:, :-1]
                axis.imshow(curl.numpy(), cmap="RdBu_r", origin="lower", vmin=-0.4, vmax=0.4)
            if not row:
                axis.plot(at[:, 1], at[:, 0], "o", ms=4, mfc="none", color=INK)
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
        axes[row, 0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
    caption = (
        "Vorticity of four wakes that no net has seen, and as reconstructed from the velocities at the circles: stream from "
        "the left."
    )
    return save(drawing, context.out / "flow.png", "A flow from a few sensors", caption)
