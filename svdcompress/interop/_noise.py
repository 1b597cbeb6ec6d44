"""Noise that differs by process while everything else stays alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from svdcompress.train import mix

GENERATED = ("cuda", "xpu")
"""Devices with generators of their own, on which several processes train."""


@contextmanager
def own_noise(rank: int, world: int, step: int, device: torch.device) -> Iterator[None]:
    """In the body, torch's generators (the CPU's and the device's) draw what no other of `world` processes draws.

    The processes of a launch begin with the same seed. With the same noise in all of them, the mean of their gradients would
    vary more. Outside the body the generators stay alike: samplers may rely on this to divide the data, such as Lightning's
    wrapper of a random sampler.

    step: the optimizer step, so that a training resumed with the first seed does not repeat its first noise.
    """
    if world < 2:
        yield
        return
    alike = int(torch.randint(2**62, (), device="cpu"))  # also moves the common generator on
    seed = mix("noise", alike, step, rank)
    kind = device.type if device.type in GENERATED else GENERATED[0]
    devices = [device] if device.type == kind else []
    with torch.random.fork_rng(devices, device_type=kind):
        torch.default_generator.manual_seed(seed)
        if devices:
            backend = getattr(torch, kind)
            with backend.device(device):
                backend.manual_seed(seed)
        yield
